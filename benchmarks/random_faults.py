"""Random jobs, random signals to random processes of them, and a comparison with undisturbed runs.

    python -m benchmarks.random_faults --minutes 60 --seed 7 --out random.jsonl
    python -m benchmarks.random_faults --seed 7 --only 12 --out again.jsonl     # the twelfth job alone

The seed and its number define a job: how it starts, its options, and its faults. A fault is a signal to a
process, at a step or some time after the start. Each job is resumed until its steps are done, by the command
that it has printed, or else by its own. Then no bit of its weights may differ from those of an undisturbed
run, and no save may be lost. Whatever still runs is counted when the job's command has ended, and 10 s later.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mpiddp
from benchmarks.faults.job import Job, start
from benchmarks.faults.random_jobs import (
    CHILD,
    GROUP,
    OUTPUT,
    STEPS,
    STOPPED_BRIEFLY,
    Fault,
    Plan,
    draw_plan,
)
from benchmarks.faults.stops import TEE, last_step
from benchmarks.harness import OPENMPI5
from benchmarks.harness import start as start_script
from mpiddp.arguments import DefaultsShown, OneSentenceParser, whole
from mpiddp.bench.options import picked
from mpiddp.bench.report import markdown
from mpiddp.drill import injectors
from mpiddp.errors import DONE, STOPPED
from mpiddp.protocol.messages import OUTPUT_PROCESS
from tests.support import cluster
from tests.support.cluster import Cluster, Host
from tests.support.cluster.host import Process
from tests.support.training import contents, unequal

END_S = 90.0  # a job that takes longer after its faults hangs
LATER_S = 10.0  # after the end, when nothing of the job may be left
MOST_RESUMES = 3
_RANK = r"\S*python\S* -m mpiddp (run|train)\b"
_COMMANDS = {
    "launcher": r"\S*python\S* -m mpiddp launch\b",
    "mpirun": r"(\S*sh )?\S*(mpirun|prterun|mpiexec\S*) ",
    "daemon": r"\S*(orted|prted|hydra_\S+) ",
}


@dataclass
class Result:
    """One job. `faults` has the injected ones. `codes`: of its command and of those that resumed it."""

    number: int
    command: str
    faults: list[tuple[str, str, float]] = field(default_factory=list)  # signal, target, second
    codes: list[int | None] = field(default_factory=list)
    resumed: bool = False
    not_done: bool = False
    lost_saves: int = 0
    different: bool = False  # a bit of the weights
    hung: int = 0
    orphans: int = 0  # when its command had ended
    orphans_later: int = 0
    tracebacks: int = 0  # with a line of mpiddp
    native_frames: int = 0
    said: str = ""  # if something is wrong

    @property
    def is_right(self) -> bool:
        return not any(getattr(self, name) for name in COUNTS[1:] if name != "orphans")


COUNTS = (
    *("resumed", "not_done", "lost_saves", "different", "hung", "orphans", "orphans_later"),
    *("tracebacks", "native_frames"),
)


@dataclass(frozen=True)
class Options:
    minutes: float
    seed: int
    only: int | None
    out: Path


def processes(job: Job) -> dict[str, list[tuple[Host, Process]]]:
    """The processes of the job on all hosts, by what they are."""
    found = defaultdict(list)
    first = job.hosts["node0"].processes()[:1]  # the job's command, which leads its process group
    found[GROUP] = [(job.hosts["node0"], process) for process in first]
    for host in job.hosts.hosts:
        table = {process.pid: process for process in host.processes()}
        for process in table.values():
            if kind := _kind(process, table):
                found[kind].append((host, process))
    return found


def _kind(process: Process, table: dict[int, Process]) -> str:
    if process.name == OUTPUT_PROCESS:
        return OUTPUT
    parent = table.get(process.parent)
    while parent is not None:
        if re.match(_RANK, parent.command):
            return CHILD  # a DataLoader's worker, a command and what it starts
        parent = table.get(parent.parent)
    if re.match(_RANK, process.command):
        return "rank"
    kinds = (kind for kind, command in _COMMANDS.items() if re.match(command, process.command))
    return next(kinds, "")


def inject(job: Job, fault: Fault) -> bool:
    """Send the signal. Return False if there is no such process, or the job has ended."""
    try:
        if fault.step:
            job.wait_until(lambda: last_step(job) >= fault.step, f"step {fault.step}")
        else:
            time.sleep(fault.after_s)
    except TimeoutError:
        return False
    victims = processes(job)[fault.target]
    if not victims:
        return False
    host, each = victims[int(fault.which * len(victims))]
    try:
        victim = host.pid_here(each.pid)
    except LookupError:
        return False
    if fault.signal == STOPPED_BRIEFLY:
        job.stop_for(fault.stopped_s, victim, is_group=fault.target == GROUP)
        return True
    send = injectors.send_to_group if fault.target == GROUP else injectors.send
    send(getattr(signal, f"SIG{fault.signal}"), victim)
    return True


def run(number: int, each: Plan, hosts: Cluster, right: Any) -> Result:
    """Run one job with its faults, resume it until it is done, and judge it by the weights of `right`."""
    folder = hosts.shared / f"random-{number}"
    around = TEE if each.tee else ()
    job = start(hosts, folder, each.starter, each.command(), each.env(), around=around)
    result = Result(number, f"{each.starter}: {' '.join(each.command())}{' | tee' * each.tee}")
    since, saved = time.monotonic(), 0
    for fault in each.faults:
        saved = max(saved, _saved(job))
        if inject(job, fault):
            at_s = round(time.monotonic() - since, 1)
            result.faults.append((fault.signal, fault.target, at_s))
    code = job.end(END_S)
    result.codes.append(code)
    result.orphans = len(job.processes())
    left = job.kill_orphans(LATER_S)
    output = _printed(job)
    result.lost_saves += _saved(job) < saved
    result.lost_saves += code == STOPPED and _saved(job) < last_step(job)
    while not _is_done(each, folder, result) and len(result.codes) <= MOST_RESUMES:
        saved = _saved(job)
        try:
            resumed = job.resume(output, 2 * END_S)
        except subprocess.TimeoutExpired:
            result.codes.append(None)
        else:
            output += resumed.stdout + resumed.stderr
            result.codes.append(resumed.returncode)
        left += job.kill_orphans(LATER_S)
        result.lost_saves += _saved(job) < saved
    result.hung, result.orphans_later = result.codes.count(None), len(left)
    result.not_done = not _is_done(each, folder, result)
    result.resumed = len(result.codes) > 1 and not result.not_done
    result.different = not result.not_done and _differ(each, folder, right)
    result.tracebacks, result.native_frames = _own_tracebacks(output), output.count("frame #")
    if not result.is_right:
        result.said = output[-6000:] + "".join(f"\nleft: {process.command}" for process in left)
    return result


def _saved(job: Job) -> int:
    """The newest checkpoint, -1 if one is broken."""
    try:
        return job.newest_checkpoint()
    except AssertionError:
        return -1


def _printed(job: Job) -> str:
    files = [job.folder / "stdout", job.folder / "log", *(job.folder / "printed").glob("*")]
    return (
        "".join(file.read_text(errors="replace") for file in files if file.exists()) + job.output()
    )


def _own_tracebacks(output: str) -> int:
    """The tracebacks with a line of this package."""
    package = f'File "{Path(mpiddp.__file__).parent}/'
    _, *tracebacks = re.split(r"Traceback \(most recent call last\)", output)
    indented = (re.match(r"[^\n]*\n(?:(?:\[[^]]*\] ?)?  [^\n]*\n)*", each) for each in tracebacks)
    return sum(package in found[0] for found in indented if found)


def _is_done(each: Plan, folder: Path, result: Result) -> bool:
    """Whether all steps are done. A script that has stopped on request may end with 0 as well."""
    is_whole = each.program != "script" or (folder / "weights").exists()
    return result.codes[-1] == DONE and is_whole


def weights(each: Plan, folder: Path) -> Any:
    return (folder / "weights").read_text() if each.program == "script" else contents(folder, STEPS)


def _differ(each: Plan, folder: Path, right: Any) -> bool:
    try:
        return bool(unequal(weights(each, folder), right))
    except OSError:  # there are none
        return True


def undisturbed(each: Plan, hosts: Cluster) -> Any:
    """The weights of this program on as many ranks of each host, whose threads they share; of one MPI."""
    plain = Plan(OPENMPI5, each.program, "launch", each.where, each.ranks, (), False, ())
    folder = hosts.shared / f"{each.program}-{each.where}"
    job = start(hosts, folder, plain.starter, plain.command(), plain.env())
    code = job.end(2 * END_S)
    assert code == DONE, job.output()
    return weights(plain, folder)


def table(results: Iterable[Result]) -> str:
    """One row for each signal to each kind of process. A job counts once for each of its faults."""
    rows = defaultdict(list)
    for result in results:
        for sent, target, _ in result.faults:
            rows[target, sent].append(result)
    names = (name.replace("_", " ") for name in COUNTS)
    head = ["process", "signal", "jobs", "exit codes", *names]
    cells = []
    for (target, sent), group in sorted(rows.items()):
        codes = Counter(str(each.codes[0]) for each in group)
        shown = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
        counts = [str(sum(getattr(each, name) for each in group)) for name in COUNTS]
        cells.append([target, sent, str(len(group)), shown, *counts])
    return markdown(head, cells)


def main() -> int:
    options = _options()
    results, right = [], {}
    deadline = time.monotonic() + options.minutes * 60
    numbers = iter([options.only]) if options.only else iter(range(1, sys.maxsize))
    with cluster.up(2) as hosts:
        for number in numbers:
            if time.monotonic() > deadline:
                break
            each = draw_plan(options.seed, number)
            key = (each.program, each.where)
            if key not in right:
                right[key] = undisturbed(each, hosts)
            results.append(result := run(number, each, hosts, right[key]))
            with options.out.open("a") as lines:
                lines.write(json.dumps(asdict(result)) + "\n")
            verdict = "right" if result.is_right else f"WRONG: {result}"
            print(
                f"{number}: {result.faults} {result.codes} {verdict}", file=sys.stderr, flush=True
            )
    print(table(results))
    return int(not all(result.is_right for result in results))


def _options() -> Options:
    parser = OneSentenceParser(
        prog="python -m benchmarks.random_faults",
        description="Send random signals to random processes of random jobs, and compare their weights.",
        allow_abbrev=False,
        formatter_class=DefaultsShown,
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, metavar="M", help="begin jobs until then"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="K", help="seed of all jobs")
    parser.add_argument(
        "--only", type=whole(1), metavar="N", help="run only the N-th job of the seed"
    )
    out = "append one line of JSON per job"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=out)
    return picked(Options, parser.parse_args())


if __name__ == "__main__":
    start_script(main)
