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
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mpiddp
from benchmarks.faults.job import ENV, Job, start
from benchmarks.faults.stops import TEE, last_step
from benchmarks.harness import OPENMPI5, mpirun_of
from benchmarks.harness import start as start_script
from mpiddp.arguments import DefaultsShown, OneSentenceParser, whole
from mpiddp.bench.options import picked
from mpiddp.bench.report import markdown
from mpiddp.errors import DONE, STOPPED
from mpiddp.protocol.messages import OUTPUT_PROCESS
from tests import cluster
from tests.cluster import Cluster, Host
from tests.cluster.host import ROOT_PATH, Process
from tests.mpis import PACKAGES, library_of
from tests.ranks import ROOT
from tests.training import contents, unequal

SCRIPT = str(ROOT / "benchmarks" / "ranks" / "steady.py")
STEPS = 40
START_S = 4.0  # in which a fault hits the start of a job
END_S = 90.0  # a job that takes longer after its faults hangs
LATER_S = 10.0  # after the end, when nothing of the job may be left
MOST_RESUMES = 3
STARTERS = (OPENMPI5, *PACKAGES)
SIGNALS = ("TERM", "INT", "HUP", "KILL", "STOP+CONT", "QUIT", "USR1", "USR2", "ABRT")
GROUP = "process group"
TARGETS = ("launcher", "mpirun", "daemon", "rank", "rank's child", "output process", GROUP)
_RANK = r"\S*python\S* -m mpiddp (run|train)\b"
_COMMANDS = {
    "launcher": r"\S*python\S* -m mpiddp launch\b",
    "mpirun": r"(\S*sh )?\S*(mpirun|prterun|mpiexec\S*) ",
    "daemon": r"\S*(orted|prted|hydra_\S+) ",
}


@dataclass(frozen=True)
class Fault:
    """A signal to the process `which` (0 to 1) of those of `target`, at a step or, if 0, after some time."""

    signal: str
    target: str
    which: float
    step: int
    after_s: float
    stopped_s: float  # between STOP and CONT


@dataclass(frozen=True)
class Plan:
    """`way`: launch, command (`launch -- python SCRIPT`) or raw (`mpirun … mpiddp run`)."""

    starter: str
    program: str  # script or train
    way: str
    where: str
    ranks: int
    options: tuple[str, ...]
    tee: bool
    faults: tuple[Fault, ...]

    def job(self) -> list[str]:
        if self.program == "script":
            return [SCRIPT, ".", str(STEPS)]
        train = ["-m", "mpiddp", "train", "--use-syn", "--batch-size", "2", "--arch", "resnet20"]
        train += ["--amp", "off", "--epochs", "1", "--steps-per-epoch", str(STEPS)]
        return [*train, "--save-every", "5", "--log-every", "1", "--out", "."]

    def command(self) -> list[str]:
        mpirun, python = mpirun_of(self.starter), sys.executable
        if self.way != "raw":
            inner = ["--", python, *self.job()] if self.way == "command" else self.job()
            where = ["--mpirun", mpirun, "-H", self.where]
            return [python, "-m", "mpiddp", "launch", *where, *self.options, *inner]
        is_hydra = self.starter in ("mpich", "intelmpi")
        flags = [] if is_hydra else ["--allow-run-as-root", "--bind-to", "none", "--oversubscribe"]
        run = ["-m", "mpiddp", "run"] if self.program == "script" else []
        return [mpirun, *flags, "-n", str(self.ranks), python, *run, *self.job()]

    def env(self) -> dict[str, str]:
        path = f"{Path(mpirun_of(self.starter)).parent}:{ROOT_PATH}"
        return {**ENV, **library_of(self.starter), "PATH": path} if self.way == "raw" else dict(ENV)


@dataclass
class Result:
    """One job. `faults` has the injected ones. `codes`: of its command and of those that resumed it."""

    number: int
    command: str
    faults: list[tuple[str, str, float]] = field(default_factory=list)  # signal, target, second
    codes: list[int | None] = field(default_factory=list)
    done: bool = False
    lost_saves: int = 0
    different: bool = False
    hung: bool = False
    orphans: int = 0
    orphans_later: list[str] = field(default_factory=list)
    tracebacks: int = 0
    native_frames: int = 0
    said: str = ""

    @property
    def is_right(self) -> bool:
        noise = self.tracebacks or self.native_frames
        wrong = self.lost_saves or self.different or self.hung or self.orphans_later or noise
        return self.done and not wrong


@dataclass(frozen=True)
class Options:
    minutes: float
    seed: int
    only: int | None
    out: Path


def plan(seed: int, number: int) -> Plan:
    draw = random.Random(f"{seed}/{number}")
    program = draw.choice(("script", "train"))
    way = draw.choice(("launch", "launch", "command", "raw"))
    ranks = draw.randint(1, 4)
    where = f"node0:{ranks}"
    if way != "raw" and ranks > 1 and draw.random() < 0.4:
        where = f"node0:{ranks - ranks // 2},node1:{ranks // 2}"
    options: list[str] = []
    if draw.random() < 0.4:
        options += ["--max-restarts", str(draw.randint(1, 2))]
    if draw.random() < 0.3:
        options += ["--grace", draw.choice(("0.2", "2"))]
    if draw.random() < 0.3:
        options += ["--log-dir", "printed"]
    faults = []
    for _ in range(draw.choice((1, 1, 2))):
        step = draw.choice((0, *range(1, STEPS, 3)))
        times = (draw.uniform(0, START_S), draw.uniform(0.2, 2.0))
        which = (draw.choice(SIGNALS), draw.choice(TARGETS), draw.random())
        faults.append(Fault(*which, step, *times))
    starter, tee = draw.choice(STARTERS), draw.random() < 0.25
    return Plan(starter, program, way, where, ranks, tuple(options), tee, tuple(faults))


def processes(job: Job) -> dict[str, list[tuple[Host, Process]]]:
    """The processes of the job on all hosts, by what they are."""
    found = defaultdict(list)
    for host in job.hosts.hosts:
        table = {process.pid: process for process in host.processes()}
        for process in table.values():
            if kind := _kind(process, table):
                found[kind].append((host, process))
    return found


def _kind(process: Process, table: dict[int, Process]) -> str:
    if process.name == OUTPUT_PROCESS:
        return "output process"
    parent = table.get(process.parent)
    while parent is not None:
        if re.match(_RANK, parent.command):
            return "rank's child"  # a DataLoader's worker, a command and what it starts
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
    if fault.target == GROUP:  # as a terminal signals it
        pid = job.launcher.inner_pid()
        victims = [(job.hosts["node0"], f"-{_group_on_host(job)}")] if pid else []
    else:
        victims = [(host, str(each.pid)) for host, each in processes(job)[fault.target]]
    if not victims:
        return False
    host, pid_on_host = victims[int(fault.which * len(victims))]
    first, _, then = fault.signal.partition("+")
    sent = host.run(["kill", f"-{first}", "--", pid_on_host]).returncode == 0
    if then:
        time.sleep(fault.stopped_s)
        host.run(["kill", f"-{then}", "--", pid_on_host])
        job.launcher.send_signal(18)  # SIGCONT: nsenter stops with its program
    return sent


def _group_on_host(job: Job) -> int:
    """The first process of the job's command, which leads its process group."""
    table = {process.pid: process for process in job.hosts["node0"].processes()}
    return min(pid for pid, process in table.items() if process.parent not in table)


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
    result.hung = code is None
    result.codes.append(code)
    result.orphans = len(job.processes())
    result.orphans_later = [process.command for process in job.kill_orphans(LATER_S)]
    output = _printed(job)
    result.lost_saves += _saved(job) < saved
    result.lost_saves += code == STOPPED and _saved(job) < last_step(job)
    for _ in range(MOST_RESUMES):
        if result.codes[-1] == DONE:
            break
        saved = _saved(job)
        resumed = job.resume(output, 2 * END_S)
        output += resumed.stdout + resumed.stderr
        result.codes.append(resumed.returncode)
        result.lost_saves += _saved(job) < saved
    result.done = result.codes[-1] == DONE
    result.different = result.done and bool(unequal(weights(each, folder), right))
    result.tracebacks, result.native_frames = _own_tracebacks(output), output.count("frame #")
    result.said = "" if result.is_right else output[-6000:]
    return result


def _saved(job: Job) -> int:
    """The newest checkpoint, -1 if one is broken."""
    try:
        return job.newest_checkpoint()
    except AssertionError:
        return -1


def _printed(job: Job) -> str:
    files = [job.folder / "stdout", job.folder / "log", *(job.folder / "printed").glob("*")]
    return "".join(file.read_text() for file in files if file.exists()) + job.output()


def _own_tracebacks(output: str) -> int:
    """The tracebacks with a line of this package."""
    package = f'File "{Path(mpiddp.__file__).parent}/'
    _, *tracebacks = re.split(r"Traceback \(most recent call last\)", output)
    indented = (re.match(r"[^\n]*\n(?:(?:\[[^]]*\] ?)?  [^\n]*\n)*", each) for each in tracebacks)
    return sum(package in found[0] for found in indented if found)


def weights(each: Plan, folder: Path) -> Any:
    return (folder / "weights").read_text() if each.program == "script" else contents(folder, STEPS)


def undisturbed(each: Plan, hosts: Cluster) -> Any:
    """The weights of this program on as many ranks, started by one MPI on one host."""
    plain = Plan(OPENMPI5, each.program, "launch", f"node0:{each.ranks}", each.ranks, (), False, ())
    folder = hosts.shared / f"{each.program}-{each.ranks}"
    job = start(hosts, folder, plain.starter, plain.command(), plain.env())
    code = job.end(2 * END_S)
    assert code == DONE, job.output()
    return weights(plain, folder)


def table(results: Iterable[Result]) -> str:
    """One row for each signal to each kind of process. A job counts once for each of its faults."""
    rows = defaultdict(list)
    for result in results:
        for signal, target, _ in result.faults:
            rows[target, signal].append(result)
    head = ["process", "signal", "jobs", "exit codes", "resumed", "not done", "lost saves"]
    head += ["different", "hung", "orphans", "10 s later", "tracebacks", "native frames"]
    cells = []
    for (target, signal), group in sorted(rows.items()):
        codes = Counter(str(each.codes[0]) for each in group)
        shown = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
        counts = [sum(len(each.codes) > 1 and each.done for each in group)]
        counts += [sum(not each.done for each in group), sum(each.lost_saves for each in group)]
        counts += [sum(each.different for each in group), sum(each.hung for each in group)]
        counts += [sum(each.orphans for each in group)]
        counts += [sum(len(each.orphans_later) for each in group)]
        counts += [
            sum(each.tracebacks for each in group),
            sum(bool(r.native_frames) for r in group),
        ]
        cells.append([target, signal, str(len(group)), shown, *map(str, counts)])
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
            each = plan(options.seed, number)
            key = (each.program, each.ranks)
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
