"""The stdin of a job: rank 0 has the launcher's, to its end, and every other rank an empty one.

torchrun gives its own stdin to every rank, and rank 0 reads it as here.

Tests mpiddp/runtime/launcher/output.py, mpiddp/launch/supervise/input.py.
python -m pytest tests/ranks/launch/test_stdin.py
"""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, script

READ = """
import os, sys
for line in sys.stdin:
    print(f"rank {os.environ['RANK']}: {line.strip()}\\n", end="", flush=True)
print(f"rank {os.environ['RANK']}: end\\n", end="", flush=True)
"""
MPIS = ("openmpi5", "openmpi4", "mpich", "intelmpi")
HANG_S = 60.0  # a job that has not read an empty stdin by then hangs
WAYS = [(mpi, way) for mpi in MPIS for way in ("script", "command")]


def start(folder: Path, mpi: str, way: str, stdin: int) -> subprocess.Popen[str]:
    python = ["--", sys.executable] if way == "command" else []
    where = ["--mpirun", mpirun_of(mpi), "-H", "localhost:2"]
    return subprocess.Popen(
        [*LAUNCH, *where, *python, script(folder, READ)],
        env=clean_env(),
        cwd=ROOT,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job: subprocess.Popen[str], said: str | None = None) -> list[str]:
    """What the ranks have printed. A job that hangs is ended as by Ctrl-C twice."""
    try:
        stdout, stderr = job.communicate(said, timeout=HANG_S)
    except subprocess.TimeoutExpired:
        job.terminate()
        try:
            job.communicate(timeout=PATIENCE_S)
        finally:
            job.kill()
        raise
    assert job.returncode == 0, stderr
    return sorted(stdout.splitlines())


@pytest.mark.parametrize(("mpi", "way"), WAYS)
def test_dev_null_is_at_its_end_at_once(tmp_path: Path, mpi: str, way: str) -> None:
    """As in cron, nohup and CI."""
    with start(tmp_path, mpi, way, subprocess.DEVNULL) as job:
        assert finish(job) == ["rank 0: end", "rank 1: end"]


@pytest.mark.parametrize(("mpi", "way"), WAYS)
def test_rank_0_reads_a_pipe_to_its_end(tmp_path: Path, mpi: str, way: str) -> None:
    with start(tmp_path, mpi, way, subprocess.PIPE) as job:
        assert finish(job, "one\ntwo\n") == [
            "rank 0: end",
            "rank 0: one",
            "rank 0: two",
            "rank 1: end",
        ]


@pytest.mark.parametrize(("mpi", "way"), WAYS)
def test_a_line_that_comes_late_is_not_lost(tmp_path: Path, mpi: str, way: str) -> None:
    """The second line comes after the job has answered the first, as in a conversation."""
    with start(tmp_path, mpi, way, subprocess.PIPE) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdin.write("one\n")
        job.stdin.flush()
        first = sorted(job.stdout.readline().strip() for _ in range(2))
        assert first == ["rank 0: one", "rank 1: end"]
        assert finish(job, "two\n") == ["rank 0: end", "rank 0: two"]


SHELL = """
import subprocess, sys
job = subprocess.run(sys.argv[1:], preexec_fn=__import__("os").setpgrp)
print("code", job.returncode)
print("the shell read", sys.stdin.readline(), flush=True)
"""
WAIT = "import select, sys; print('rank read', select.select([sys.stdin], [], [], 2.0)[0])"


def test_a_job_in_the_background_leaves_the_terminal_to_its_shell(tmp_path: Path) -> None:
    options = ["--log-ranks", "0", "-H", "localhost:1"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        command = [*LAUNCH, *options, script(tmp_path, WAIT)]
        os.execve(sys.executable, [sys.executable, "-c", SHELL, *command], clean_env())
    os.write(terminal, b"what is typed\n")
    shown = b""
    with contextlib.suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as file:
        while chunk := file.read(4096):
            shown += chunk
    assert os.waitpid(pid, 0)[1] == 0
    text = shown.decode()
    assert "rank read []" in text, text
    assert "code 0" in text
    assert "the shell read what is typed" in text
