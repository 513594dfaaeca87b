"""Faults of disks and of checkpoint files. Each must be detected and leave older checkpoints verified."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.job import launch
from benchmarks.faults.table import Run, Tally
from mpiddp.checkpoints import directory
from mpiddp.drill import injectors
from mpiddp.drill.injectors import Damage, damage, fill_disk, flip_bit, tear
from tests.support.cluster import Cluster, Host
from tests.support.ranks import ROOT, clean_env

KILLS, FLIPS, CUTS = 200, 300, 100
OUT = "/run/faulty-disk"
SAVES = f"{OUT}/checkpoints"  # a separate file system, the only one that becomes full
DISK_SIZE = "20m"
TRAIN = (
    *("-m", "mpiddp", "train", "--use-syn", "--arch", "resnet20", "--batch-size", "4"),
    *("--amp", "off", "--epochs", "1", "--save-every", "1", "--log-every", "100000"),
    *("--steps-per-epoch", "10000"),
)


def killed_saves() -> Tally:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "tests/programs/killed_saves.py", folder, str(KILLS), "whole"]
        ran = subprocess.run(
            command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=600
        )
    found = re.search(rf"^{KILLS} kills, (\d+) in the middle of a save, ", ran.stdout, re.M)
    seen = f"{found[1]} in mid-write; at most one step lost" if found else ran.stderr[-500:]
    return Tally("kill -9 at a random instant of a save", KILLS, KILLS if found else 0, seen)


def flipped_bits() -> Tally:
    return _count_detected("one bit of a checkpoint flipped", FLIPS, flip_bit)


def truncated_files() -> Tally:
    return _count_detected("a file of a checkpoint cut short", CUTS, tear)


def _count_detected(name: str, times: int, how: Damage) -> Tally:
    """Damage the files of a checkpoint in turn, and count how often verification detects it."""
    rng = random.Random()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *TRAIN, "--stop-at-step", "2", "--out", folder]
        subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True)
        saved = directory.list_steps(Path(folder, "checkpoints"))[-1]
        directory.verify(saved)
        files = sorted(saved.iterdir())
        detected = 0
        for index in range(times):
            file = files[index % len(files)]
            before = file.read_bytes()
            damage(file, how, rng)
            detected += not directory.is_verified(saved)
            file.write_bytes(before)
        directory.verify(saved)
    return Tally(name, times, detected, f"in each of {', '.join(file.name for file in files)}")


TALLIES = {
    "kill -9 at a random instant of a save": killed_saves,
    "one bit of a checkpoint flipped": flipped_bits,
    "a file of a checkpoint cut short": truncated_files,
}


class _Filler:
    """A thread that keeps the file system of SAVES full until `remove`."""

    def __init__(self, host: Host) -> None:
        self._file = host.path(f"{SAVES}/filler")
        self._is_full = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._fill)
        self._thread.start()
        self._is_full.wait()

    def _fill(self) -> None:
        while not self._over.is_set():  # a failed save gives its space back
            fill_disk(self._file)
            self._is_full.set()
            time.sleep(0.001)

    def remove(self) -> None:
        self._over.set()
        self._thread.join()
        self._file.unlink()


def _fill_disk(host: Host) -> Callable[[], None]:
    return _Filler(host).remove


def _make_read_only(host: Host) -> Callable[[], None]:
    """Remount read-only. This fails while a file is open for writing, so it needs a few attempts."""
    while host.run(["mount", "-o", "remount,ro", SAVES]).returncode != 0:
        pass

    def make_writable() -> None:
        host.run(["mount", "-o", "remount,rw", SAVES], check=True)

    return make_writable


@dataclass(frozen=True)
class DiskFault:
    """`do` causes the fault and returns a function that repairs the disk."""

    name: str
    message: str
    do: Callable[[Host], Callable[[], None]]


DISK_FAULTS = (
    DiskFault("disk full in mid-save", "no space left for a checkpoint", _fill_disk),
    DiskFault("disk becomes read-only", "Read-only file system", _make_read_only),
)


def measure(fault: DiskFault, hosts: Cluster, starter: str, number: int) -> Run:
    """Break the disk of a one-rank training that saves in every step.

    In rounds with an odd `number` the training continues with a warning and must save again after the disk
    is repaired. In the others it must stop. Older checkpoints must stay verified.
    """
    host, warns = hosts["node0"], bool(number % 2)
    host.run(["mkdir", "-p", SAVES], check=True)
    host.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", SAVES], check=True)
    options = ["--on-save-error", "warn" if warns else "stop", "--out", OUT]
    job = launch(hosts, host.path(OUT), starter, "localhost:1", (), [*TRAIN, *options], cwd=OUT)
    resumed_at = None
    try:
        at = random.randint(2, 12)
        job.wait_until(lambda: job.newest_checkpoint() >= at, f"the checkpoint of step {at}")
        undo = fault.do(host)
        since = time.time()
        try:
            job.wait_until(lambda: fault.message in job.output(), "its warning")
            if not warns:
                job.end()
            kept = job.newest_checkpoint()
        finally:
            undo()
        if warns:
            job.wait_until(lambda: job.newest_checkpoint() > kept, "another checkpoint")
            resumed_at = time.time()
            injectors.send(signal.SIGTERM, job.command_pid())
        code = job.end()
        ended_at = time.time()
        assert job.newest_checkpoint() >= kept > 0
    finally:
        orphans = job.kill_orphans()
        host.run(["umount", SAVES], check=True)
        host.run(["rm", "-r", OUT], check=True)
    warning = next(line for line in job.lines if fault.message in line.text)
    failed = re.search(r"step (\d+)", warning.text)
    return Run(
        fault.name,
        starter,
        number,
        detected_s=warning.at - since,
        ended_s=None if warns else ended_at - since,
        resumed_s=resumed_at - since if resumed_at else None,
        code=code,
        is_code_right=code == (75 if warns else 1),
        orphans=len(orphans),
        steps_lost=0 if warns or failed is None else int(failed[1]) - kept,
        said=job.output()[-2000:],
        load=os.getloadavg()[0],
    )
