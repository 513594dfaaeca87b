"""A stranger at the ports of a job cannot end it, stop it, or make it look successful.

Tests mpiddp/protocol/server.py, mpiddp/runtime/job/failure.py, mpiddp/runtime/job/stop.py.
python -m pytest tests/test_strangers.py
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from mpiddp.protocol.channel import CHILD, RANK, child_key, decode, encode, member_proof, public_key
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, mpirun_command, script

# argv[1] is a file: the ranks run until it exists. argv[2] is an exit code of rank 1.
JOB = """
import os, sys, time, mpiddp
from mpiddp.runtime.job.session import current
with mpiddp.process_group(backend="gloo") as world:
    if world.rank == 0:
        print(*(os.environ[each] for each in ("MASTER_ADDR", "MASTER_PORT", "MPIDDP_CHANNEL")), flush=True)
    while True:
        time.sleep(0.01)
        is_there = os.path.exists(sys.argv[1])
        if all(current().coordinator.all_gather_json(is_there, timeout_s=60)):
            break
        if mpiddp.should_stop():
            print("stopped", flush=True)
            sys.exit(75)
    if world.rank == 1 and sys.argv[2] != "0":
        sys.exit(int(sys.argv[2]))
print(f"done {world.rank}\\n", end="", flush=True)
"""
# What the ranks once read in torch's store, and what they send over the channel.
WRITTEN = ("failed", "left with an error/1", "stop/requested", "stop/1/step", "first failure/1")
SENT = (
    encode("fail", code=3, stay=0),
    encode("fail", code=1, stay=1),
    encode("claim", stay=1),
    encode("gather", b"1", key="stop/1", timeout_s=None, calls=True),
    encode("leave", is_over=True),
    encode("done"),
)
BY = {
    "launch": [*LAUNCH, "-H", "localhost:2"],
    "mpirun": mpirun_command(2, "-m", "mpiddp", "run"),
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "mpiddp", "run"),
    ],
}


@contextmanager
def running(command: list[str], cwd: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    job = subprocess.Popen(
        [*command, script(cwd, JOB), str(cwd / "go"), code],
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


def attack(job: subprocess.Popen[str]) -> None:
    """Write and send what would act, repeatedly while the ranks agree with each other."""
    assert job.stdout is not None
    line = job.stdout.readline().split()[-3:]
    address, port, channel = line
    store = TCPStore(address, int(port), timeout=timedelta(seconds=PATIENCE_S))
    keys = PrefixStore("mpiddp/0", store)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and job.poll() is None:
        for key in WRITTEN:
            for value in ("", "1", "3", "\x00"):
                keys.set(key, value)
        for key in ("exchange/1/0", "exchange/1/all"):
            keys.delete_key(key)
        for key in ("0" * 32, child_key("0" * 32), public_key("")):
            speak(channel, key)


def speak(channel: str, key: str) -> None:
    """Introduce oneself with a key, and go on as a rank whatever the answer is."""
    is_path = channel.startswith("unix:")
    with socket.socket(socket.AF_UNIX if is_path else socket.AF_INET) as stranger:
        stranger.settimeout(PATIENCE_S)
        host, _, port = channel.removeprefix("unix:").rpartition(":")
        stranger.connect(channel.removeprefix("unix:") if is_path else (host, int(port)))
        facts, _ = decode(stranger.recv(4096).rstrip())
        for role in (RANK, CHILD):
            proof = member_proof(key, facts["challenge"], role, 1)
            hello = encode("hello", rank=1, role=role, challenge="", proof=proof)
            with suppress(OSError):
                stranger.sendall(hello + b"".join(SENT))
        with suppress(ConnectionError):
            assert stranger.recv(4096) == b""


@pytest.mark.parametrize("starter", BY)
def test_a_stranger_neither_ends_nor_stops_a_job(tmp_path: Path, starter: str) -> None:
    with running(BY[starter], tmp_path, "0") as job:
        attack(job)
        assert job.poll() is None, job.stderr
        (tmp_path / "go").touch()
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    done = sorted(line for line in stdout.splitlines() if line.startswith(("done", "stopped")))
    assert (job.returncode, done) == (0, ["done 0", "done 1"]), stderr


def test_a_failure_is_still_found_after_an_attack(tmp_path: Path) -> None:
    with running(BY["mpirun"], tmp_path, "3") as job:
        attack(job)
        (tmp_path / "go").touch()
        _, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 3, stderr
    assert "ended with exit code 3" in stderr
