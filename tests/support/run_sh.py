"""Copies of this repository in which run.sh runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env


def copy(folder: Path) -> Path:
    """Copy the files that run.sh reads before it sets anything up."""
    folder.mkdir()
    for name in ("run.sh", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, folder)
    return folder


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Without PYTHONPATH, so that the copy's own mpiddp runs."""
    return {name: value for name, value in clean_env(extra).items() if name != "PYTHONPATH"}


def run_sh(
    root: Path,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "run.sh", *arguments],
        cwd=cwd or root,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
