"""The scripts that `mpiddp drill` has to judge: one planted defect each, or none."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO

from mpiddp.drill import rehearse
from mpiddp.errors import BAD_INPUT, DONE, FAILED, STOPPED
from mpiddp.launch.options import parse_options
from tests.support import forked
from tests.support.machine import reserved
from tests.support.ranks import ROOT

PROGRAMS = str(ROOT / "tests/programs")
SCRIPT = f"{PROGRAMS}/drilled.py"


@dataclass(frozen=True)
class Defect:
    """A defect of SCRIPT. `fault` on `ranks` ranks shows it, and the cause must have these `words`.

    Of the faults, only a signal to all processes depends on how the ranks were started.
    """

    fault: str
    ranks: int
    words: str

    @property
    def needs_launcher(self) -> bool:
        return "signal ended" in self.words


DEFECTS = {
    "scheduler": Defect("kill", 1, "the scheduler is not in the checkpoint (learning rate 0.1 at the"),
    "random": Defect("kill", 1, "the random numbers after the resume are not those"),
    "position": Defect("kill", 1, "the resumed run reads the samples of step "),
    "all ranks": Defect("none", 2, "ranks 0, 1 write into one file, newest.pt: save on rank 0 alone"),
    "non-atomic": Defect("kill-in-save", 1, "the checkpoint is torn ("),
    "rank 0 alone": Defect("kill", 2, "load the checkpoint on every rank"),
    "moved optimizer": Defect(
        "kill", 1, "the optimizer updates tensors that are no longer the model's"
    ),
    "weights_only": Defect("kill", 1, "save tensors, numbers and strings alone"),
    "save in handler": Defect("sigterm", 1, "the script saves within its signal handler"),
    "worker": Defect("sigterm", 1, "the signal ended a DataLoader worker before its rank could save"),
    "warm-up": Defect("kill", 1, "the warm-up begins anew (learning rate "),
    "buffers": Defect("kill", 1, "the model's buffers, such as BatchNorm's statistics, are not in the"),
    "set_epoch": Defect("kill", 1, "the resumed run repeats epoch 0's order: call sampler.set_epoch"),
    "never": Defect("kill", 1, "no checkpoint was written within 36 steps: nothing survives"),
}  # fmt: skip


@dataclass(frozen=True)
class Right:
    """A script that resumes as it should.

    package: the framework that it needs. faults: those that it must survive. Where a framework or a script
    writes its newest checkpoint in place, a kill in the midst of that leaves none that can be loaded.
    """

    job: tuple[str, ...]
    package: str = ""
    faults: str = "kill,kill-in-save"

    @property
    def needs_launcher(self) -> bool:
        return "launcher" in self.faults


_TRAIN = "-m mpiddp train --use-syn --arch resnet20 --batch-size 2 --save-every 5 --epochs 2"
RIGHT = {
    "mpiddp train": Right((*_TRAIN.split(), "--steps-per-epoch", "20", "--out", "{out}")),
    "Lightning": Right((f"{PROGRAMS}/lightning_training.py", "{out}"), "lightning", "kill-in-save"),
    "transformers": Right(
        (f"{PROGRAMS}/transformers_training.py", "{out}", "24"), "transformers", "kill"
    ),
    "accelerate": Right((f"{PROGRAMS}/accelerated.py", "{out}"), "accelerate", "kill-in-save"),
    "snapshot": Right((f"{PROGRAMS}/snapshot.py", "{out}"), faults="kill"),
    "plain": Right((SCRIPT, "{out}"), faults="full,hang,launcher,timeout"),
}  # fmt: skip


class _Launch:
    """In the place of the Popen of `mpiddp launch` on this machine: the ranks are forks."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, **streams: IO[str]
    ) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the ranks get it as well
            options = parse_options([*argv[argv.index("launch") + 1 :]], "mpiddp launch")
            reservation = reserved("127.0.0.1")  # until this process ends
            of_ranks = forked.variables(
                ["localhost"] * (options.n or 1), *reservation.getsockname()
            )
            ranks = [forked.Rank({**env, **each}) for each in of_ranks]
            files = (streams[name].fileno() for name in ("stdout", "stderr"))
            code = forked.in_children(options.job, ranks, cwd, *files)
            os._exit(code if code in (DONE, BAD_INPUT, STOPPED) else FAILED)

    def poll(self) -> int | None:
        if self.code is None and (status := os.waitpid(self.pid, os.WNOHANG)) != (0, 0):
            self.code = os.waitstatus_to_exitcode(status[1])
        return self.code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> _Launch:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def ranks_are_forks() -> None:
    """In this process, a drill of a script on this machine starts no launcher."""
    rehearse.subprocess = SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=_Launch)
