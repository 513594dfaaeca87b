"""Jobs that stop on request: a script that saves at the agreed step, and its launcher."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.ranks import ROOT, clean_env

# Print a line and its newline in one piece: Intel's mpirun would mix the pieces of several ranks.
# Without collectives, only the agreement on a step keeps the ranks together; the others are three times as
# fast as rank 0, which then needs three times as long to reach the agreed step. Call should_stop() before
# "ready": until then, a request is sent as SIGTERM.
SCRIPT = """
import os, sys, time
import mpiddp
rank = int(os.environ["RANK"])
mpiddp.should_stop()
print("ready\\n", end="", flush=True)
for step in range(1, 1_000_000):
    time.sleep(0.003 if rank else 0.01)
    if mpiddp.should_stop():
        print(f"saved {step}\\n", end="", flush=True)
        sys.exit(75)
"""
LONG_GRACE = ("--grace", "600")  # a slow rank may need minutes to reach the agreed step


def start(command: list[str], cwd: Path = ROOT, ranks: int = 2) -> subprocess.Popen[str]:
    """A job whose ranks have all printed that they are ready."""
    job = piped(command, cwd)
    assert job.stdout is not None
    printed = [job.stdout.readline() for _ in range(ranks)]
    if printed != ["ready\n"] * ranks:
        job.kill()  # or it would run on
    assert printed == ["ready\n"] * ranks
    return job


def piped(command: list[str], cwd: Path = ROOT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=clean_env(),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
