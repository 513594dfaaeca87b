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


def bad_texts(folder: Path) -> dict[str, str]:
    """Files that are no text for a training, and the sentence about each."""
    (folder / "empty").write_text("")
    (folder / "short").write_text("x" * 1289)
    (folder / "binary").write_bytes(b"abc\xff" * 1000)
    return {
        "empty": " has 0 characters. With --context 128 a training needs 1,290, the last tenth of them",
        "short": " has 1,289 characters. With --context 128 a training needs 1,290, the last tenth",
        "binary": " is not UTF-8 at byte 3. Convert it, for example with iconv.",
        "missing": " does not exist. Name a file of text in UTF-8.",
        ".": " is not a file. Name a file of text in UTF-8.",
        "x" * 300: ": File name too long.",
    }
