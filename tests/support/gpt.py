"""Small runs of examples/gpt, and its bad input."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch

from mpiddp.checkpoints import folder as directory
from tests.support.ranks import run_command

STEPS = 400
TINY = (
    "--layers=2",
    "--width=32",
    "--heads=2",
    "--context=32",
    "--batch-size=8",
    f"--steps={STEPS}",
)


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_command(command, cwd, MPIDDP_LOG_RANKS="0")


def weights(run: Path, step: int = STEPS) -> dict[str, Any]:
    folder = run / f"checkpoints/step_{step:08d}"
    directory.verify(folder)
    state: dict[str, Any] = {path.stem: torch.load(path) for path in folder.glob("[!r]*.pt")}
    return state
