"""The threads and the memory of a rank's process, measured by a script under `mpiddp run`.

Tests mpiddp/runtime/start/run.py, mpiddp/runtime/start/join.py.
python -m pytest tests/ranks/runtime/test_process_setup.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env, mpirun, script

# Like a training step: allocate much memory at once, and free all of it. If malloc keeps the pages, a
# later step causes no page faults.
STEPS = """
import json, os, resource
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    return [b"x" * (8 << 20) for _ in range(6)]
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
print(json.dumps([faults() - before, os.environ["OMP_NUM_THREADS"]]))
"""
# Without kept memory, 10 steps cause at least these page faults: one for each huge page of 2 MiB.
HUGE_PAGES = 10 * 6 * (8 << 20) // (2 << 20)


def alone(tmp_path: Path, env: dict[str, str]) -> tuple[int, str]:
    """Page faults of 10 steps and OMP_NUM_THREADS in a job of one rank."""
    done = subprocess.run(
        [sys.executable, "-m", "mpiddp", "run", script(tmp_path, STEPS)],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    faults, threads = json.loads(done.stdout)
    return faults, threads


def test_freed_memory_is_kept_for_the_next_step(tmp_path: Path) -> None:
    faults, _ = alone(tmp_path, clean_env())
    assert faults < HUGE_PAGES / 3


@pytest.mark.skipif(sys.platform != "linux", reason="these variables are glibc's")
@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
)
def test_variables_of_the_user_take_precedence(tmp_path: Path, variables: dict[str, str]) -> None:
    faults, threads = alone(tmp_path, clean_env({**variables, "OMP_NUM_THREADS": "3"}))
    assert faults > HUGE_PAGES / 2
    assert threads == "3"


def test_ranks_share_the_cores(tmp_path: Path) -> None:
    env = clean_env()
    del env["OMP_NUM_THREADS"]
    cores = len(os.sched_getaffinity(0))
    assert alone(tmp_path, env)[1] == str(cores)
    done = mpirun(2, "-m", "mpiddp", "run", script(tmp_path, STEPS), without=["OMP_NUM_THREADS"])
    assert done.returncode == 0, done.stderr
    shares = [json.loads(line)[1] for line in done.stdout.splitlines()]
    assert shares == [str(max(1, cores // 2))] * 2
