"""A stranger at the store's port cannot end a job, stop it, or make it look successful.

Tests mpiddp/runtime/job/signed_store.py, mpiddp/runtime/job/failure_watch.py, mpiddp/runtime/job/stop.py.
python -m pytest tests/ranks/runtime/test_signed_store.py
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, mpirun_command, script

# argv[1] is a file: the ranks run until it exists. argv[2] is an exit code of rank 1.
JOB = """
import os, sys, time, mpiddp
with mpiddp.process_group(backend="gloo") as world:
    if world.rank == 0:
        print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
        if mpiddp.should_stop():
            print("stopped", flush=True)
            sys.exit(75)
    if world.rank == 1 and sys.argv[2] != "0":
        sys.exit(int(sys.argv[2]))
print(f"done {world.rank}\\n", end="", flush=True)
"""
WRITTEN = {
    "left with an error/1": ("1",),
    "failed": ("0", "3", "256", "-1", "99999999999999999999", "x", "\x00"),
    "stop/requested": ("",),
    "stop/1/step": ("5", "x", "-1"),
    "stop/1/proposal/0": ("1",),
    "rank 0 left": ("",),
    "first failure/1": ("7",),
}


@contextmanager
def running(command: list[str], cwd: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    job = subprocess.Popen(
        [*command, script(cwd, JOB), str(cwd / "go"), *arguments],
        env=clean_env(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        try:
            yield job
        finally:
            job.kill()


def attack(job: subprocess.Popen[str]) -> PrefixStore:
    """Write what would act, repeatedly for longer than the ranks take to read it."""
    assert job.stdout is not None
    address, port = job.stdout.readline().split()
    store = TCPStore(address, int(port), timeout=timedelta(seconds=PATIENCE_S))
    keys = PrefixStore("mpiddp/0", store)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and job.poll() is None:
        for key, values in WRITTEN.items():
            for value in values:
                keys.set(key, value)
                time.sleep(0.02)
    return keys


@pytest.mark.parametrize("starter", ["launch", "mpirun"])
def test_a_stranger_neither_ends_nor_stops_a_job(tmp_path: Path, starter: str) -> None:
    commands = {
        "launch": [*LAUNCH, "-H", "localhost:2"],
        "mpirun": mpirun_command(2, "-m", "mpiddp", "run"),
    }
    with running(commands[starter], tmp_path, "0") as job:
        attack(job)
        assert job.poll() is None, job.stderr
        (tmp_path / "go").touch()
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, sorted(stdout.splitlines())) == (0, ["done 0", "done 1"]), stderr


def test_a_failure_is_still_found_after_an_attack(tmp_path: Path) -> None:
    with running(mpirun_command(2, "-m", "mpiddp", "run"), tmp_path, "3") as job:
        attack(job)
        (tmp_path / "go").touch()
        _, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 3, stderr
    assert "ended with exit code 3" in stderr


def test_without_a_secret_nonsense_does_not_end_the_watch(tmp_path: Path) -> None:
    """Under torchrun the ranks share no secret, so only the ranges are checked."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=2", "-m", "mpiddp", "run"]
    with running(command, tmp_path, "3") as job:
        assert job.stdout is not None
        address, port = job.stdout.readline().split()
        store = TCPStore(address, int(port), timeout=timedelta(seconds=PATIENCE_S))
        keys = PrefixStore("mpiddp/0", store)
        for value in ("0", "256", "x", "\x00", "9" * 5000):
            keys.set("failed", value)
            keys.set("stop/1/step", value if value != "0" else "x")
            time.sleep(1)  # for the ranks to read it
        assert job.poll() is None
        (tmp_path / "go").touch()
        _, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode != 0
    assert "rank 1 on" in stderr


# Rank 1 takes part in an agreement late. A stranger deletes what rank 0 has written for it.
DELETED = """
import os, time
from mpiddp.runtime.start.join import join
with join() as coordinator:
    if coordinator.world.rank == 0:
        print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
    while True:
        coordinator.all_gather_json(1, timeout_s=2)
"""


def test_a_job_whose_keys_are_deleted_does_not_succeed(tmp_path: Path) -> None:
    command = mpirun_command(2, "-m", "mpiddp", "run", script(tmp_path, DELETED))
    job = subprocess.Popen(
        command,
        env=clean_env(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        assert job.stdout is not None
        address, port = job.stdout.readline().split()
        store = TCPStore(address, int(port), timeout=timedelta(seconds=PATIENCE_S))
        keys = PrefixStore("mpiddp/0", store)
        for number in itertools.cycle(range(2000)):
            if job.poll() is not None:
                break
            with suppress(RuntimeError):  # the job has ended
                keys.delete_key(f"exchange/{number}/1")
                keys.delete_key(f"exchange/{number}/all")
        assert job.wait(timeout=PATIENCE_S) == 1


# --- the values ---
