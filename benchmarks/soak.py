"""Kill a training repeatedly, and compare its weights with those of an undisturbed training.

    python -m benchmarks.soak --minutes 20 --kill-every 60

Three ranks run on three hosts of the test cluster. At exponentially distributed times a fault hits in turn
a rank, an MPI daemon or a host's link, until all steps are done. The same command then runs undisturbed.
Goodput is the total time of all steps, each counted once and without saves (as in metrics.jsonl), divided
by the wall time of the command.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ENV, start
from mpiddp.arguments import DefaultsShown, OneSentenceParser, duration, whole
from mpiddp.bench.options import picked
from mpiddp.drill import injectors
from tests.support import cluster
from tests.support.cluster import Cluster, Host, Program
from tests.support.ranks import ROOT
from tests.support.training import contents, records, unequal

HOSTS = "node0:1,node1:1,node2:1"
STEPS_PER_EPOCH = 500
LOG_EVERY = 10
CUT_S = 25.0  # the launcher gives the host up after about 12 s; a later restart finds it again
EXPECTED_GOODPUT = 0.7
CALIBRATION_STEPS = 200


@dataclass(frozen=True)
class Soak:
    """The result of the disturbed run.

    `steps_lost`: at each restart from a checkpoint, with an error below LOG_EVERY.
    """

    code: int
    wall_s: float
    injected: Counter[str]
    restarts: int
    steps_lost: list[int]
    messages: str


@dataclass(frozen=True)
class Options:
    minutes: float
    epochs: int | None
    kill_every: float
    seed: int


def main() -> int:
    options = _options()
    random.seed(options.seed)
    with cluster.up(3) as hosts:
        epochs = options.epochs or _epochs_in(options.minutes, hosts)
        steps = epochs * STEPS_PER_EPOCH
        disturbed, alone = hosts.shared / "disturbed", hosts.shared / "alone"
        soak = _soak(hosts, disturbed, epochs, options.kill_every)
        print(soak.messages, file=sys.stderr, flush=True)
        assert soak.code == 0, f"the disturbed run ended with code {soak.code}"
        useful_s = _seconds_of_steps(disturbed)
        ran = hosts["node0"].run(_train(alone, epochs), cwd=ROOT, env=ENV, timeout_s=7200)
        assert ran.returncode == 0, ran.stderr
        different = unequal(contents(disturbed, steps), contents(alone, steps))

    print(
        f"faults injected: {', '.join(f'{kind} {count}' for kind, count in soak.injected.items())}"
    )
    print(f"restarts: {soak.restarts}")
    print(f"steps lost: {sum(soak.steps_lost)} of {steps}")
    print(f"steps lost at each restart from a checkpoint: {soak.steps_lost}")
    print(f"useful step time {useful_s:.0f} s, wall time {soak.wall_s:.0f} s")
    print(f"goodput: {useful_s / soak.wall_s:.3f}")
    identical = f"no: {', '.join(different[:5])}" if different else "yes"
    print(f"bit-identical to the undisturbed run: {identical}")
    return int(bool(different))


def _soak(hosts: Cluster, out: Path, epochs: int, kill_every_s: float) -> Soak:
    """Run the training and inject faults until it ends."""
    injected: Counter[str] = Counter()
    lost: list[int] = []
    messages: list[str] = []
    since = time.monotonic()
    # One pipe for stdout and stderr keeps a restart's line before the output of the new ranks.
    job = hosts["node0"].popen(_train(out, epochs), cwd=ROOT, env=ENV, stderr=subprocess.STDOUT)
    with job:
        reader = threading.Thread(target=_read_messages, args=(job, messages, lost))
        reader.start()
        for kind, inject in itertools.cycle(FAULTS.items()):
            try:
                job.wait(random.expovariate(1 / kill_every_s))
                break
            except subprocess.TimeoutExpired:
                injected[kind] += inject(hosts[random.choice(VICTIMS)])
        reader.join()
        wall_s = time.monotonic() - since
    restarts = sum("mpiddp: restarting on" in line for line in messages)
    return Soak(job.returncode, wall_s, injected, restarts, lost, "\n".join(messages))


def _read_messages(job: Program, messages: list[str], lost: list[int]) -> None:
    """Collect the launcher's messages, and count the steps that must be repeated."""
    reached = 0
    assert job.stdout is not None
    for line in job.stdout:
        if found := re.search(r" step (\d+)/", line):
            reached = int(found[1])
        elif found := re.search(r"resuming from .*: step (\d+)", line):
            lost.append(max(0, reached - int(found[1])))
            messages.append(line.strip())
        elif "mpiddp: " in line:
            messages.append(line.strip())


def _kill(command: str) -> Callable[[Host], bool]:
    """Kill a process whose command line matches. Return False if there is none, as between two attempts."""

    def inject(host: Host) -> bool:
        for process in host.processes():
            if re.match(command, process.command):
                with contextlib.suppress(LookupError):  # it has just ended
                    injectors.kill(host.pid_here(process.pid))
                    return True
        return False

    return inject


def _cut(host: Host) -> bool:
    injectors.cut_link(host.pid)
    time.sleep(CUT_S)
    injectors.mend_link(host.pid)
    return True


VICTIMS = ("node1", "node2")
FAULTS = {
    "rank": _kill(r"\S*python\S* -m mpiddp train"),
    "daemon": _kill(r"\S*prted "),
    "link": _cut,
}


def _train(out: Path, epochs: int, steps_per_epoch: int = STEPS_PER_EPOCH) -> list[str]:
    command = [sys.executable, "-m", "mpiddp", "launch", "--max-restarts", "1000", "-H", HOSTS]
    command += ["-m", "mpiddp", "train", "--use-syn", "--arch", "resnet20", "--batch-size", "2"]
    command += ["--amp", "off", "--epochs", str(epochs), "--steps-per-epoch", str(steps_per_epoch)]
    return [*command, "--save-every", "5s", "--log-every", str(LOG_EVERY), "--out", str(out)]


def _epochs_in(minutes: float, hosts: Cluster) -> int:
    """Measure a step, and return the epochs that about fill this time with faults."""
    out = hosts.shared / "calibration"
    command = _train(out, 1, CALIBRATION_STEPS)
    ran = hosts["node0"].run(command, cwd=ROOT, env=ENV, timeout_s=300)
    assert ran.returncode == 0, ran.stderr
    step_time_s = _seconds_of_steps(out) / CALIBRATION_STEPS
    epochs = max(1, round(minutes * 60 * EXPECTED_GOODPUT / step_time_s / STEPS_PER_EPOCH))
    print(f"{step_time_s * 1e3:.0f} ms a step, {epochs} epochs", file=sys.stderr, flush=True)
    return epochs


def _seconds_of_steps(run: Path) -> float:
    return sum(float(record["step_time_s"]) * LOG_EVERY for record in records(run))


def _options() -> Options:
    parser = OneSentenceParser(
        prog="python -m benchmarks.soak",
        description="Kill a training repeatedly, and compare its weights with those of an undisturbed one.",
        allow_abbrev=False,
        formatter_class=DefaultsShown,
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        metavar="M",
        help="approximate duration of the disturbed run, in minutes, if nothing else runs",
    )
    parser.add_argument(
        "--epochs",
        type=whole(1),
        metavar="N",
        help=f"length of the training, each of {STEPS_PER_EPOCH} steps, instead of --minutes",
    )
    parser.add_argument(
        "--kill-every",
        type=duration,
        default=60.0,
        metavar="1m",
        help="mean time between two faults",
    )
    parser.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        metavar="K",
        help="seed of the times and hosts of the faults",
    )
    return picked(Options, parser.parse_args())


if __name__ == "__main__":
    start(main)
