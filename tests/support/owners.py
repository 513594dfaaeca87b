"""A process that owns the folder of a run."""

from __future__ import annotations

import subprocess
import sys

from mpiddp.checkpoints.run import RunDir
from tests.support.ranks import ROOT, clean_env

OWNS = """
import sys
from pathlib import Path
from mpiddp.checkpoints.run import RunDir, RunLock
owner = RunLock(RunDir(Path(sys.argv[1])))
print("owns", flush=True)
sys.stdin.read()
owner.release()
"""


def owning(run: RunDir) -> subprocess.Popen[str]:
    """A process that owns the run until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNS, str(run)],
        env=clean_env(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "owns\n"
    return process
