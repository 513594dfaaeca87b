"""What mpirun says about the end of a job is shown where the verdict does not know the reason.

Tests mpiddp/runtime/job/failure.py, mpiddp/launch/streams/output.py.
python -m pytest tests/ranks/launch/test_words_of_mpirun.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.mpis import mpirun_of
from tests.support.ranks import launch, script

BANNER = re.compile(
    "one or more processes exited|Primary job|BAD TERMINATION|^[-=]{60}", re.MULTILINE
)


KILLED = """
import os, time
if os.environ["RANK"] == "1": os.kill(os.getpid(), 9)
time.sleep(600)
"""


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4"])
def test_what_mpirun_says_about_the_end_is_kept(tmp_path: Path, mpi: str) -> None:
    """In the folder of --log-dir, and on the terminal with -v."""
    command = ("--mpirun", mpirun_of(mpi), "-H", "localhost:2", script(tmp_path, KILLED))
    done = launch("--log-dir", str(tmp_path / "logs"), *command)
    assert "was killed by SIGKILL. The other ranks were stopped.\n" in done.stderr
    assert not BANNER.search(done.stderr), done.stderr
    said = (tmp_path / "logs" / "mpirun.log").read_text()
    assert "exited on" in said
    assert BANNER.search(said)
    assert BANNER.search(launch("-v", *command).stderr)


def test_what_mpirun_says_is_shown_if_the_verdict_does_not_know_the_reason(tmp_path: Path) -> None:
    """Hydra's exit code does not tell that a rank was killed, and by which signal."""
    command = ("--mpirun", mpirun_of("mpich"), "-H", "localhost:2", script(tmp_path, KILLED))
    done = launch(*command)
    assert "ended first, without an error" in done.stderr
    assert "BAD TERMINATION" in done.stdout + done.stderr
    assert "Killed (signal 9)" in done.stdout + done.stderr


def test_what_mpirun_says_about_a_start_that_fails_is_shown(tmp_path: Path) -> None:
    done = launch("--mpi-args=--no-such-option", "-H", "localhost:1", script(tmp_path, "pass"))
    assert done.returncode == 1
    *said, verdict, cause = done.stderr.splitlines()
    assert "no-such-option" in "\n".join(said), done.stderr
    assert verdict.startswith("mpiddp: the job failed: mpirun ended with exit code ")
    assert cause.endswith("More: docs/troubleshooting.md#openmpi-option")
