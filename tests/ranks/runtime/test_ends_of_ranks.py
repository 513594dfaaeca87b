"""Ranks that raise or exit end the job of a real mpirun, and every error is printed.

Tests mpiddp/runtime/job/coordinator.py.
python -m pytest tests/ranks/runtime/test_ends_of_ranks.py
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from socket import gethostname

import pytest

from tests.support.ranks import mpirun, own_lines

JOBS = Path(__file__).parents[2] / "jobs"


SENTENCE = "hosts.txt:3: one sentence."


@pytest.mark.parametrize(
    ("world_size", "who", "slow"),
    [(2, "1", "1"), (3, "all", "0.5")],
)
def test_mpirun_does_not_kill_rank_0_before_it_prints(world_size: int, who: str, slow: str) -> None:
    job = mpirun(world_size, str(JOBS / "refusing.py"), who, *slow.split())
    (sentence,) = own_lines(job.stderr)
    assert re.fullmatch(rf"(rank {who} on \S+: )?{re.escape(SENTENCE)}", sentence)
    assert job.returncode == 2


@pytest.mark.parametrize(("form", "world_size"), [("with", 3), ("init", 2)])
def test_a_rank_that_raises_ends_the_job(form: str, world_size: int) -> None:
    job = mpirun(world_size, str(JOBS / "raising.py"), form)
    ended = time.time()
    (raised,) = re.findall(r"raising at (\S+)", job.stdout)
    assert ended - float(raised) < 100  # the others would wait for 600 s
    assert job.returncode == 1
    assert job.stderr.count("RuntimeError: rank 1 fails on purpose") >= 1


@pytest.mark.parametrize(("form", "world_size"), [("with", 2), ("init", 3)])
def test_a_rank_that_exits_ends_the_job_with_its_code(form: str, world_size: int) -> None:
    """Only that rank is named, not rank 0, whose collective fails as a result."""
    job = mpirun(world_size, str(JOBS / "raising.py"), form, "exit")
    ended = time.time()
    (raised,) = re.findall(r"raising at (\S+)", job.stdout)
    assert ended - float(raised) < 100  # the others would wait for 600 s
    named = [line for line in own_lines(job.stderr) if re.match(r"rank \d", line)]
    assert named == [f"rank 1 on {gethostname()} ended with exit code 3"]
    assert job.returncode == 3
