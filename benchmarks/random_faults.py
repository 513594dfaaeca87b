"""Random signals to random jobs, or one long job that is killed again and again, beside undisturbed runs.

    python -m benchmarks.random_faults --minutes 60 --seed 7 --out random.jsonl
    python -m benchmarks.random_faults --seed 7 --only 12 --out again.jsonl     # the twelfth job alone
    python -m benchmarks.random_faults --one-job --epochs 50 --kill-every 60   # a soak

The seed and its number define a job: how it starts, its options, and its faults. Each job is resumed until
its steps are done, by the command that it has printed, or else by its own. Then no bit of its weights may
differ from those of an undisturbed run, no save may be lost, and nothing may still run 10 s after its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mpiddp
from benchmarks.harness import ENV, markdown
from mpiddp.arguments import OneSentenceParser, duration, whole
from mpiddp.checkpoints import folders
from mpiddp.errors import DONE, STOPPED
from mpiddp.explain.explain import explain
from mpiddp.explain.failures import Weight
from mpiddp.protocol.channel import AGENT_NAME, SPARE_NAME
from tests.support import cluster
from tests.support.cluster import Cluster, Host, Program
from tests.support.cluster.faults import unreachable
from tests.support.cluster.host import ROOT_PATH, Process
from tests.support.installs import library_of, mpirun_of
from tests.support.place import MPIS
from tests.support.ranks import ROOT
from tests.support.training import contents, records, unequal

SCRIPT = str(ROOT / "benchmarks" / "ranks" / "steady.py")
STEPS = 40
START_S = 4.0  # in which a fault hits the start of a job
REACHED_S = 60.0  # the time in which a job reaches a step
END_S = 90.0  # a job that takes longer after its faults hangs
LATER_S = 10.0  # after the end, when nothing of the job may be left
MOST_RESUMES = 3
BRIEFLY = "STOP+CONT"
GROUP, AGENT, CHILD = "process group", "agent", "rank's child"
SIGNALS = ("TERM", "INT", "HUP", "KILL", BRIEFLY, "QUIT", "USR1", "USR2", "ABRT")
TARGETS = ("launcher", "mpirun", "daemon", "rank", CHILD, AGENT, GROUP)
_RANK = r"\S*python\S*( -P)? -m mpiddp (run|train)\b"  # or the agent that starts it
_SCRIPT = r"\S*python\S* -c .*from mpiddp\.runtime\.script "  # the child of an agent
_PREFIX = re.compile(r"^\[[^]]*\]:? ", re.MULTILINE)  # of a rank
_COMMANDS = {
    "launcher": r"\S*python\S* -m mpiddp launch\b",
    "mpirun": r"(\S*sh )?\S*(mpirun|prterun|mpiexec\S*) ",
    "daemon": r"\S*(orted|prted|hydra_\S+) ",
}


@dataclass(frozen=True)
class Fault:
    """A signal to one process of the kind `target`, at a step or, if 0, after some time.

    which: the place of the process among all of its kind, in [0, 1).
    """

    signal: str
    target: str
    which: float
    step: int
    after_s: float
    stopped_s: float  # between STOP and CONT


@dataclass(frozen=True)
class Plan:
    """One job. `way`: launch, command (`launch -- python SCRIPT`) or raw (`mpirun … mpiddp run`)."""

    starter: str
    program: str  # script or train
    way: str
    where: str
    ranks: int
    options: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

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


def draw_plan(seed: int, number: int) -> Plan:
    """The job with this number."""
    draw = random.Random(f"{seed}/{number}")
    program = draw.choice(("script", "train"))
    way = draw.choice(("launch", "launch", "command", "raw"))
    ranks = draw.randint(1, 4)
    where = f"node0:{ranks}"
    if way != "raw" and ranks > 1 and draw.random() < 0.4:
        where = f"node0:{ranks - ranks // 2},node1:{ranks // 2}"
    options: list[str] = []
    if draw.random() < 0.8:
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
    return Plan(draw.choice(MPIS), program, way, where, ranks, tuple(options), tuple(faults))


@dataclass
class Job:
    """A job that was started on node0, in `folder`, which all hosts share."""

    hosts: Cluster
    folder: Path
    program: Program
    plan: Plan

    def end(self, timeout_s: float) -> int | None:
        """The exit code, or None if it had to be killed after this time."""
        try:
            self.program.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.program.end()
            return None
        return self.program.returncode

    def last_step(self) -> int:
        has_records = (self.folder / "metrics.jsonl").exists()
        steps = (record["step"] for record in records(self.folder)) if has_records else ()
        return max(steps, default=0)

    def saved(self) -> int:
        """The newest checkpoint, -1 if one is broken."""
        steps = folders.list_steps(self.folder / "checkpoints")
        if not all(map(folders.is_verified, steps)):
            return -1
        return folders.step_of(steps[-1]) if steps else 0

    def processes(self) -> list[Process]:
        """The processes that still run on the hosts, except ssh logins."""
        processes = [process for host in self.hosts.hosts for process in host.processes()]
        return [process for process in processes if not process.command.startswith("sshd")]

    def kill_orphans(self) -> list[Process]:
        """Give the job's processes time to end. Kill and return those that remain."""
        deadline = time.monotonic() + LATER_S
        while (orphans := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for host in self.hosts.hosts:
            host.kill_processes()
        return orphans

    def resume(self, printed: str) -> subprocess.CompletedProcess[str]:
        """Run the command that the job has printed, else its own."""
        command = self.plan.command()
        if line := re.search("mpiddp: to resume: mpiddp (.*)", printed):
            command = [sys.executable, "-m", "mpiddp", *shlex.split(line[1])]
        run, env = self.hosts["node0"].run, self.plan.env()
        return run(command, env=env, cwd=self.folder, timeout_s=2 * END_S)

    def printed(self) -> str:
        files = [self.folder / "output", *self.folder.glob("printed/**/*")]
        texts = (file.read_text("utf-8", errors="replace") for file in files if file.is_file())
        return "".join(texts)


def start(hosts: Cluster, folder: Path, plan: Plan) -> Job:
    folder.mkdir(exist_ok=True)
    with (folder / "output").open("a", encoding="utf-8") as file:
        out = file.fileno()
        program = hosts["node0"].popen(
            plan.command(), cwd=folder, env=plan.env(), stdout=out, stderr=out
        )
    return Job(hosts, folder, program, plan)


def victims(job: Job, target: str) -> list[tuple[Host, Process]]:
    """The processes of the job on all hosts of this kind."""
    if target == GROUP:  # the job's command leads its process group
        node = job.hosts["node0"]
        return [(node, process) for process in node.processes()[:1]]
    return [(host, process) for host in job.hosts.hosts for process in of_kind(host, target)]


def of_kind(host: Host, kind: str) -> list[Process]:
    table = {process.pid: process for process in host.processes()}
    return [process for process in table.values() if _kind(process, table) == kind]


def _kind(process: Process, table: dict[int, Process]) -> str:
    if process.name in (AGENT_NAME, SPARE_NAME):
        return AGENT if process.name == AGENT_NAME else SPARE_NAME
    parent = table.get(process.parent)
    if re.match(_SCRIPT, process.command) and not (parent and re.match(_SCRIPT, parent.command)):
        return "rank"
    while parent is not None:
        if re.match(_RANK, parent.command):
            return CHILD  # a DataLoader's worker, a command and its children
        parent = table.get(parent.parent)
    if re.match(_RANK, process.command):
        return "rank"
    kinds = (kind for kind, command in _COMMANDS.items() if re.match(command, process.command))
    return next(kinds, "")


def inject(job: Job, fault: Fault) -> bool:
    """Send the signal. Return False if there is no such process, or the job has ended."""
    deadline = time.monotonic() + (REACHED_S if fault.step else fault.after_s)
    while not fault.step or job.last_step() < fault.step:
        if job.program.poll() is not None:
            return False
        if time.monotonic() > deadline:
            if fault.step:
                return False
            break
        time.sleep(0.005)
    processes = victims(job, fault.target)
    if not processes:
        return False
    host, process = processes[int(fault.which * len(processes))]
    target = f"-{process.pid}" if fault.target == GROUP else str(process.pid)
    first, *rest = fault.signal.split("+")
    if host.run(["kill", "-s", first, "--", target]).returncode != 0:
        return False  # it has just ended
    for name in rest:
        time.sleep(fault.stopped_s)
        host.run(["kill", "-s", name, "--", target])
        job.program.send_signal(signal.SIGCONT)  # nsenter stops with its program
    return True


@dataclass
class Result:
    """One job. `faults` has the injected ones. `codes`: of its command and of those that resumed it."""

    number: int
    command: str
    faults: list[tuple[str, str, float]] = field(default_factory=list)  # signal, target, second
    codes: list[int | None] = field(default_factory=list)
    restarts: int = 0  # by --max-restarts
    resumed: bool = False
    not_done: bool = False
    lost_saves: int = 0
    different: bool = False  # a bit of the weights
    hung: int = 0
    orphans_later: int = 0
    tracebacks: int = 0  # with a line of mpiddp
    output: str = ""  # if something is wrong

    @property
    def is_right(self) -> bool:
        return not any(getattr(self, name) for name in COUNTS[2:])


# The restarts and the resumes, and the faults that must not happen.
COUNTS = (
    *("restarts", "resumed"),
    *("not_done", "lost_saves", "different", "hung", "orphans_later", "tracebacks"),
)


def run(number: int, plan: Plan, hosts: Cluster, right: Any) -> Result:
    """Run one job with its faults, resume it until it is done, and judge it by the weights of `right`."""
    folder = hosts.shared / f"random-{number}"
    job = start(hosts, folder, plan)
    result = Result(number, f"{plan.starter}: {shlex.join(plan.command())}")
    since, saved = time.monotonic(), 0
    for fault in plan.faults:
        saved = max(saved, job.saved())
        if inject(job, fault):
            at_s = round(time.monotonic() - since, 1)
            result.faults.append((fault.signal, fault.target, at_s))
    result.codes.append(code := job.end(END_S))
    left = job.kill_orphans()
    output = job.printed()
    result.lost_saves += job.saved() < saved
    result.lost_saves += code == STOPPED and job.saved() < job.last_step()
    while not _is_done(plan, folder, result) and len(result.codes) <= MOST_RESUMES:
        saved = job.saved()
        try:
            resumed = job.resume(output)
        except subprocess.TimeoutExpired:
            result.codes.append(None)
        else:
            output += resumed.stdout + resumed.stderr
            result.codes.append(resumed.returncode)
        left += job.kill_orphans()
        result.lost_saves += job.saved() < saved
    result.hung, result.orphans_later = result.codes.count(None), len(left)
    result.not_done = not _is_done(plan, folder, result)
    result.resumed = len(result.codes) > 1 and not result.not_done
    with contextlib.suppress(OSError):  # there are none
        result.different = True
        result.different = bool(unequal(weights(plan, folder), right))
    result.restarts = output.count("mpiddp: restarting on ")
    result.tracebacks = own_tracebacks(output)
    if not result.is_right:
        result.output = output[-6000:] + "".join(f"\nleft: {process.command}" for process in left)
    return result


def own_tracebacks(output: str) -> int:
    """The number of tracebacks with a line of mpiddp, except for a SIGINT and for the loss of another rank.

    If a rank of a raw mpirun is killed, the first of the others to notice prints where `mpiddp train` was.
    """
    package = f'File "{Path(mpiddp.__file__).parent}/'
    blocks = _PREFIX.sub("", output).split("Traceback (most recent call last):")[1:]
    errors = [re.search(r"^\S.*", block, re.MULTILINE) for block in blocks if package in block]
    errors = [error for error in errors if not (error and error[0].endswith("KeyboardInterrupt"))]
    causes = [explain([error[0]]) if error else None for error in errors]
    return sum(not cause or cause.failure.weight != Weight.CONSEQUENCE for cause in causes)


def _is_done(plan: Plan, folder: Path, result: Result) -> bool:
    """Whether all steps are done. A script that has stopped on request may end with 0 as well."""
    is_whole = plan.program != "script" or (folder / "weights").exists()
    return result.codes[-1] == DONE and is_whole


def weights(plan: Plan, folder: Path) -> Any:
    return (
        (folder / "weights").read_text(encoding="utf-8")
        if plan.program == "script"
        else contents(folder, STEPS)
    )


def undisturbed(plan: Plan, hosts: Cluster) -> Any:
    """The weights of this program on as many ranks of each host, whose threads they share; of one MPI."""
    plain = Plan(MPIS[0], plan.program, "launch", plan.where, plan.ranks)
    folder = hosts.shared / f"{plan.program}-{plan.where}"
    job = start(hosts, folder, plain)
    code = job.end(2 * END_S)
    assert code == DONE, job.printed()
    return weights(plain, folder)


def table(results: Iterable[Result]) -> str:
    """One row for each kind of process. A job counts once for each of its faults."""
    rows: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        for _, target, _ in result.faults:
            rows[target].append(result)
    cells = [
        [target, str(len(group)), *(str(sum(getattr(job, n) for job in group)) for n in COUNTS)]
        for target, group in sorted(rows.items())
    ]
    return markdown(["signals to", "jobs", *(name.replace("_", " ") for name in COUNTS)], cells)


def random_jobs(options: argparse.Namespace) -> int:
    results: list[Result] = []
    right: dict[tuple[str, str], Any] = {}
    deadline = time.monotonic() + options.minutes * 60
    numbers = [options.only] if options.only else range(1, sys.maxsize)
    with cluster.up(2) as hosts:
        for number in numbers:
            if time.monotonic() > deadline:
                break
            plan = draw_plan(options.seed, number)
            key = (plan.program, plan.where)
            if key not in right:
                right[key] = undisturbed(plan, hosts)
            results.append(result := run(number, plan, hosts, right[key]))
            with options.out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(result)) + "\n")
            verdict = "right" if result.is_right else f"WRONG: {result}"
            print(f"{number}: {result.faults} {result.codes} {verdict}", file=sys.stderr)
    print(table(results))
    return int(not all(result.is_right for result in results))


# ---- one long job

HOSTS = "node0:1,node1:1,node2:1"
VICTIMS = ("node1", "node2")
EPOCH, LOG_EVERY = 500, 10  # steps
CUT_S = 25.0  # less than --lost-after, so that the job waits for the link


def soak(options: argparse.Namespace) -> int:
    """Three ranks on three hosts. A fault hits a rank, a daemon or a link in turn until all steps are done.

    Goodput is the time of all steps, each counted once and without saves, by the command's wall time.
    """
    draw = random.Random(options.seed)
    with cluster.up(3) as hosts:
        disturbed, alone = hosts.shared / "disturbed", hosts.shared / "alone"
        since, injected = time.monotonic(), Counter[str]()
        with (hosts.shared / "output").open("w", encoding="utf-8") as file:
            job = hosts["node0"].popen(
                _train(disturbed, options.epochs),
                cwd=ROOT,
                env=ENV,
                stdout=file.fileno(),
                stderr=file.fileno(),
            )
        for number in range(sys.maxsize):
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(draw.expovariate(1 / options.kill_every))
                break
            kind = ("rank", "daemon", "link")[number % 3]
            injected[kind] += _disturb(hosts[draw.choice(VICTIMS)], kind)
        wall_s = time.monotonic() - since
        output = (hosts.shared / "output").read_text(encoding="utf-8")
        assert job.returncode == 0, output[-6000:]
        useful_s = _seconds_of_steps(disturbed)
        ran = hosts["node0"].run(_train(alone, options.epochs), cwd=ROOT, env=ENV, timeout_s=7200)
        assert ran.returncode == 0, ran.stderr
        steps = options.epochs * EPOCH
        different = unequal(contents(disturbed, steps), contents(alone, steps))
    restarts = output.count("restarting on")
    print(f"faults injected: {dict(injected)}, restarts: {restarts}, steps: {steps}")
    print(f"goodput: {useful_s / wall_s:.3f} ({useful_s:.0f} s of steps in {wall_s:.0f} s)")
    print(f"bit-identical to the undisturbed run: {'no' if different else 'yes'} {different[:5]}")
    return int(bool(different))


def _disturb(host: Host, kind: str) -> bool:
    """Return False if there is no such process, as between two attempts."""
    if kind == "link":
        with unreachable(host):
            time.sleep(CUT_S)
        return True
    for process in of_kind(host, kind)[:1]:
        return host.run(["kill", "-KILL", str(process.pid)]).returncode == 0
    return False


def _train(out: Path, epochs: int) -> list[str]:
    command = [sys.executable, "-m", "mpiddp", "launch", "--max-restarts", "1000", "-H", HOSTS]
    command += ["-m", "mpiddp", "train", "--use-syn", "--arch", "resnet20", "--batch-size", "2"]
    command += ["--amp", "off", "--epochs", str(epochs), "--steps-per-epoch", str(EPOCH)]
    return [*command, "--save-every", "5s", "--log-every", str(LOG_EVERY), "--out", str(out)]


def _seconds_of_steps(run: Path) -> float:
    timed = (record["step_time_s"] for record in records(run) if "step_time_s" in record)
    return float(sum(timed)) * LOG_EVERY


def main() -> int:
    parser = OneSentenceParser(
        prog="python -m benchmarks.random_faults",
        description="Send random signals to random jobs, or kill one long job, and compare their weights.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add: Callable[..., Any] = parser.add_argument
    add("--minutes", type=float, default=60.0, metavar="M", help="begin jobs until then")
    add("--seed", type=whole(0), default=0, metavar="K", help="seed of all jobs and faults")
    add("--only", type=whole(1), metavar="N", help="run only the N-th job of the seed")
    out = "append one line of JSON per job"
    add("--out", type=Path, default=Path("random.jsonl"), metavar="FILE", help=out)
    add("--one-job", action="store_true", help="one training, killed repeatedly")
    add("--epochs", type=whole(1), default=50, metavar="N", help="of --one-job, of 500 steps each")
    add("--kill-every", type=duration, default=60.0, metavar="1m", help="mean time between faults")
    options = parser.parse_args()
    return soak(options) if options.one_job else random_jobs(options)


if __name__ == "__main__":
    os.environ.update(ENV)
    sys.exit(main())
