"""Runs of the scripts of examples/series, and their losses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.ranks import LAUNCH, ROOT, mpirun_command, run_command

SERIES = ROOT / "examples/series"


def start(launcher: str) -> list[str]:
    """The command that starts a script: two ranks, or with "python" one."""
    return {
        "python": [sys.executable],
        "mpiddp launch": [*LAUNCH, "-H", "localhost:2"],
        "mpirun": mpirun_command(2),
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    }[launcher]


def run(
    launcher: str, script: str, *arguments: str | Path, folder: Path
) -> subprocess.CompletedProcess[str]:
    return run_command([*start(launcher), str(SERIES / script), *map(str, arguments)], folder)


def losses(stdout: str) -> dict[int, float]:
    """The loss of each epoch that the output names."""
    return {
        int(n): float(loss) for n, loss in re.findall(r"^epoch (\d+): loss (\S+)$", stdout, re.M)
    }
