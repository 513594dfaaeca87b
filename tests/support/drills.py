"""The scripts that `mpiddp drill` has to judge: one planted defect each, or none."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.ranks import ROOT

FOLDER = "tests/programs"
SCRIPT = f"{FOLDER}/drilled.py"


@dataclass(frozen=True)
class Defect:
    """A defect of SCRIPT. `fault` on `ranks` ranks shows it, and the cause must have these `words`."""

    fault: str
    ranks: int
    words: str


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


_TRAIN = "-m mpiddp train --use-syn --arch resnet20 --batch-size 2 --save-every 5 --epochs 2"
RIGHT = {
    "mpiddp train": Right((*_TRAIN.split(), "--steps-per-epoch", "20", "--out", "{out}")),
    "Lightning": Right((f"{FOLDER}/lightning_training.py", "{out}"), "lightning", "kill-in-save"),
    "transformers": Right(
        (f"{FOLDER}/transformers_training.py", "{out}", "24"), "transformers", "kill"
    ),
    "accelerate": Right((f"{FOLDER}/accelerated.py", "{out}"), "accelerate", "kill-in-save"),
    "snapshot": Right((f"{FOLDER}/snapshot.py", "{out}"), faults="kill"),
    "plain": Right((SCRIPT, "{out}"), faults="kill,kill-in-save,full,hang,launcher,timeout"),
}  # fmt: skip


def command(*arguments: str) -> list[str]:
    """The arguments with the absolute paths of scripts, so that any folder can be the working one."""
    return [str(ROOT / each) if each.startswith("tests/") else each for each in arguments]
