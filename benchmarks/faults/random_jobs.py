"""Random jobs with random faults. A seed and a number define one, see benchmarks/random_faults.py."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ENV, MPIS, mpirun_of
from tests.support.cluster.host import ROOT_PATH
from tests.support.mpis import library_of
from tests.support.ranks import ROOT

SCRIPT = str(ROOT / "benchmarks" / "ranks" / "steady.py")
STEPS = 40
START_S = 4.0  # in which a fault hits the start of a job
STOPPED_BRIEFLY = "STOP+CONT"
SIGNALS = ("TERM", "INT", "HUP", "KILL", STOPPED_BRIEFLY, "QUIT", "USR1", "USR2", "ABRT")
GROUP = "process group"
OUTPUT = "output process"
CHILD = "rank's child"
TARGETS = ("launcher", "mpirun", "daemon", "rank", CHILD, OUTPUT, GROUP)


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
    starter, tee = draw.choice(MPIS), draw.random() < 0.25
    return Plan(starter, program, way, where, ranks, tuple(options), tee, tuple(faults))
