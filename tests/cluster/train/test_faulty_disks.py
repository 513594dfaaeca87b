"""On a full or read-only disk, older checkpoints are kept, and the run continues or ends as requested.

Tests mpiddp/checkpoints/save.py.
python -m pytest tests/cluster/train/test_faulty_disks.py
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mpiddp.checkpoints import folder as directory
from tests.support import cluster
from tests.support.cluster import Host
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

OUT = "/run/run-of-a-test"
SAVES = f"{OUT}/checkpoints"  # on its own disk, so that only this one is full
COMMAND = [
    sys.executable, "-m", "mpiddp", "train", "--use-syn", "--arch=resnet20", "--batch-size=4",
    "--amp=off", "--epochs=1", "--save-every=1", f"--out={OUT}",
]  # fmt: skip
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(ROOT)}
CHECKPOINT_MB = 2.3


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with cluster.up_or_skip(1) as standing:
        yield standing["node0"]


@contextmanager
def disk(host: Host, megabytes: float, *, at: tuple[str, ...] = (SAVES,)) -> Iterator[None]:
    """A disk at each of these folders, the outer one first."""
    size = f"size={int(megabytes * 1000)}k"
    for folder in at:
        host.run(["mkdir", "-p", folder], check=True)
        host.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        for folder in reversed(at):
            host.run(["umount", folder], check=True)
        host.run(["rm", "-r", OUT], check=True)


def valid(host: Host) -> list[str]:
    folders = directory.list_steps(host.path(SAVES))
    for folder in folders:
        directory.verify(folder)
    return [folder.name for folder in folders]


def test_a_full_disk(host: Host) -> None:
    """Two checkpoints and a part of the third fit."""
    with disk(host, 2.5 * CHECKPOINT_MB):
        command = [*COMMAND, "--steps-per-epoch=5"]
        ran = host.run([*command, "--on-save-error=stop"], env=ENV, cwd=ROOT)
        disk_now = os.statvfs(host.path(SAVES))
        free = disk_now.f_bavail * disk_now.f_frsize / 1e6
        left = ("2.2 MB", f"{free:.1f} MB", "step_00000002 ")
        assert 0.9 < free < 1.9
        assert ran.returncode == 1
        full = error(": step", f"{SAVES}: step 3 ", *left)
        assert re.fullmatch(f"{full}\n", ran.stderr), ran.stderr
        assert valid(host) == ["step_00000001", "step_00000002"]
        assert len(list(host.path(SAVES).iterdir())) == 2, "an incomplete checkpoint was left"

        # By default it continues with warnings, but fails at the end without its last checkpoint.
        ran = host.run(command, env=ENV, cwd=ROOT)
        assert ran.returncode == 1
        assert "epoch 1/1  step 5/5" in ran.stdout
        lines = ran.stderr.splitlines()
        assert re.fullmatch(f"warning: node0: {full}", lines[0]), lines
        assert re.fullmatch(error(": step", f"{SAVES}: step 5 ", *left), lines[-1]), lines
        assert lines[-2] == "warning: 3 of 3 saves failed."
        assert len(lines) == 4
        assert valid(host) == ["step_00000001", "step_00000002"]

        host.run(["mount", "-o", f"remount,size={int(4 * CHECKPOINT_MB)}m", SAVES], check=True)
        ran = host.run(command, env=ENV, cwd=ROOT)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert "step_00000002: step 2" in ran.stdout
        assert valid(host) == ["step_00000004", "step_00000005"]


def test_full_disk_ends_all_ranks_with_on_save_error_stop(host: Host) -> None:
    """Only rank 0 writes. Rank 1 exits together with it, at the next save."""
    launch = [sys.executable, "-m", "mpiddp", "launch", "-H", "localhost:2"]
    with disk(host, 0.5 * CHECKPOINT_MB):
        command = [*launch, *COMMAND[1:], "--steps-per-epoch=9", "--on-save-error=stop"]
        ran = host.run(command, env=ENV, cwd=ROOT)
        assert ran.returncode == 1, ran.stderr
        others = "no older checkpoint. The other ranks were stopped."
        values = ("rank 0 on node0: ", f"{SAVES}: step 1 ", "2.2 MB", "1.2 MB", others)
        assert re.search(error(": step", *values), ran.stderr), ran.stderr
        assert valid(host) == []


def test_a_disk_that_becomes_read_only_and_writable_again(host: Host) -> None:
    command = [*COMMAND, "--steps-per-epoch=10000", "--log-every=100000"]
    with disk(host, 20), host.popen(command, env=ENV, cwd=ROOT) as program:
        try:
            wait_for_step(host, 2)
            for _ in range(1000):  # mount fails with "busy" during a save
                if host.run(["mount", "-o", "remount,ro", SAVES]).returncode == 0:
                    break
            else:
                pytest.fail("the disk was busy at every attempt to make it read-only")
            before = valid(host)
            assert program.stderr is not None
            line = program.stderr.readline()
            if "cannot remove old checkpoints" in line:  # it became read-only just after a save
                line = program.stderr.readline()
            values = (f"warning: node0: {SAVES}: ", ": Read-only file system", f"{before[-1]} ")
            failed = error("", *values)
            assert re.fullmatch(f"{failed}\n", line), line
            assert valid(host) == before
            host.run(["mount", "-o", "remount,rw", SAVES], check=True)
            wait_for_step(host, int(before[-1].removeprefix("step_")) + 3)
            assert program.poll() is None
        finally:
            program.end()
        assert len(valid(host)) >= 2


def test_a_disk_that_is_completely_full_and_has_space_again(host: Host) -> None:
    """While neither metrics.jsonl nor a checkpoint can be written, the training continues."""
    command = [*COMMAND, "--steps-per-epoch=10000", "--log-every=1"]
    with disk(host, 20, at=(OUT,)), host.popen(command, env=ENV, cwd=ROOT) as program:
        try:
            wait_for_step(host, 2)
            fill = f"cat /dev/zero >>{OUT}/filler; sleep 0.1"  # repeated: a failed save frees space
            host.run(["sh", "-c", f"for _ in $(seq 10); do {fill}; done"])
            assert program.stderr is not None
            warned = [program.stderr.readline()]
            while "metrics.jsonl" not in warned[-1]:
                warned.append(program.stderr.readline())
                assert warned[-1], warned
            assert warned[-1] == f"warning: {OUT}/metrics.jsonl: No space left on device.\n"
            full = error(": step", f"{SAVES}: step ")
            assert all(re.search(full, line) for line in warned[:-1]), warned
            recorded = len(host.path(f"{OUT}/metrics.jsonl").read_text().splitlines())
            host.run(["rm", f"{OUT}/filler"], check=True)
            # Saves may have succeeded while records failed, so only later ones prove that there is space.
            saved = [directory.step_of(each) for each in directory.list_steps(host.path(SAVES))]
            wait_for_step(host, max([recorded, *saved]) + 5)
            assert program.poll() is None
        finally:
            program.end()
        records = host.path(f"{OUT}/metrics.jsonl").read_text()
        steps = [json.loads(line)["step"] for line in records.splitlines()]
    assert steps[:2] == [1, 2]
    assert steps[-1] >= recorded + 5
    assert len(steps) == len(set(steps)) < steps[-1], "no record was lost: the disk was not full"


def test_a_disk_that_is_read_only_when_a_run_resumes(host: Host) -> None:
    """A run that exists had a disk that it could write, so code 1: another attempt may succeed."""
    command = [*COMMAND, "--steps-per-epoch=3", "--keep=3"]
    with disk(host, 20, at=(OUT, SAVES)):
        assert host.run(command, env=ENV, cwd=ROOT).returncode == 0
        host.run(["mount", "-o", "remount,ro", SAVES], check=True)
        back = [*command, f"--resume={SAVES}/step_00000001"]
        ran = host.run(back, env=ENV, cwd=ROOT)
        assert ran.returncode == 1
        sentence = error("cannot rename", f"{SAVES}: ", ": Read-only file system")
        assert re.fullmatch(f"{sentence}\n", ran.stderr), ran.stderr
        host.run(["mount", "-o", "remount,ro", OUT], check=True)
        ran = host.run(command, env=ENV, cwd=ROOT)
        assert ran.returncode == 1
        sentence = error("cannot be written", f"{OUT} ", ": Read-only file system")
        assert re.fullmatch(f"{sentence}\n", ran.stderr), ran.stderr
        ran = host.run([*COMMAND[:-1], f"--out={OUT}/new"], env=ENV, cwd=ROOT)
        assert ran.returncode == 2, ran.stderr
        sentence = error("Name another folder", f"{OUT}/new ", ": Read-only file system")
        assert re.search(sentence, ran.stderr), ran.stderr


def wait_for_step(host: Host, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        folders = directory.list_steps(host.path(SAVES))
        if folders and directory.step_of(folders[-1]) >= step:
            return
        assert time.monotonic() < deadline, f"no checkpoint of step {step}: {folders}"
        time.sleep(0.02)
