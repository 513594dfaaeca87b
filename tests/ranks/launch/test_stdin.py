"""The stdin of a job: rank 0 has the launcher's, to its end, and every other rank an empty one.

torchrun gives its own stdin to every rank, and rank 0 reads it as here.

Tests mpiddp/runtime/start/, mpiddp/launch/supervise/mpirun.py.
python -m pytest tests/ranks/launch/test_stdin.py
"""

from __future__ import annotations

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
BUGS = {
    ("mpich", "script"): "Hydra never ends the stdin of a rank other than 0",
    ("intelmpi", "script"): "Hydra never ends the stdin of a rank other than 0",
}


def ways(bugs: dict[tuple[str, str], str]) -> list[object]:
    """Every MPI with a script and with a command, and a mark on those that fail today."""
    found: list[object] = []
    for mpi in MPIS:
        for way in ("script", "command"):
            bug = bugs.get((mpi, way))
            marks = [pytest.mark.xfail(strict=True, reason=bug)] if bug else []
            found.append(pytest.param(mpi, way, marks=marks))
    return found


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


@pytest.mark.parametrize(("mpi", "way"), ways(BUGS))
def test_dev_null_is_at_its_end_at_once(tmp_path: Path, mpi: str, way: str) -> None:
    """As in cron, nohup and CI."""
    with start(tmp_path, mpi, way, subprocess.DEVNULL) as job:
        assert finish(job) == ["rank 0: end", "rank 1: end"]


@pytest.mark.parametrize(("mpi", "way"), ways(BUGS))
def test_rank_0_reads_a_pipe_to_its_end(tmp_path: Path, mpi: str, way: str) -> None:
    with start(tmp_path, mpi, way, subprocess.PIPE) as job:
        assert finish(job, "one\ntwo\n") == [
            "rank 0: end",
            "rank 0: one",
            "rank 0: two",
            "rank 1: end",
        ]


LATE_BUGS = {
    **BUGS,
    ("openmpi5", "command"): "prterun forgets a rank's stdin once its stdout and stderr have ended",
    ("openmpi5", "script"): "prterun forgets a rank's stdin once its stdout and stderr have ended",
    ("openmpi4", "script"): "mpirun forgets a rank's stdin once its stdout and stderr have ended",
    ("openmpi4", "command"): "mpirun forgets a rank's stdin once its stdout and stderr have ended",
}


@pytest.mark.parametrize(("mpi", "way"), ways(LATE_BUGS))
def test_a_line_that_comes_late_is_not_lost(tmp_path: Path, mpi: str, way: str) -> None:
    """The second line comes after the job has answered the first, as in a conversation."""
    with start(tmp_path, mpi, way, subprocess.PIPE) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdin.write("one\n")
        job.stdin.flush()
        lines = []
        while (line := job.stdout.readline().strip()) and line != "rank 0: one":
            lines.append(line)
        lines += [line, *finish(job, "two\n")]
    assert sorted(lines) == ["rank 0: end", "rank 0: one", "rank 0: two", "rank 1: end"]
