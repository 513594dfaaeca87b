"""One save and one resume: what they hold in memory, read, send, remove, and refuse."""

import fcntl
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch

import mpiddp
from mpiddp.checkpoints import folders
from mpiddp.checkpoints import save as saving
from mpiddp.checkpoints.agreement import Union
from mpiddp.checkpoints.folders import About, BrokenCheckpoint, RunDir
from mpiddp.checkpoints.records import runs
from mpiddp.checkpoints.run_folder import RunLock
from mpiddp.checkpoints.schedule import SaveSchedule
from mpiddp.checkpoints.state import FlatState
from mpiddp.errors import UserError
from mpiddp.files import read_limited
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.text import parse_interval
from mpiddp.world import World
from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env


@pytest.fixture(autouse=True)
def run_of_this_test() -> Iterator[None]:
    """A run whose folder was refused stays that of the process."""
    yield
    runs().clear()


def num_large_tensors() -> int:
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum(each.numel() >= 1000 for each in alive)


def test_a_state_that_grows_leaves_no_copies_behind(tmp_path):
    before = num_large_tensors()
    with mpiddp.Checkpoints(tmp_path / "run") as checkpoints:
        for step in range(1, 31):
            checkpoints.save(step, {"history": torch.zeros(step * 1000)})
        # The state, the copy that is being written, the next one.
        assert num_large_tensors() - before <= 4


OWNS = """
import sys
from pathlib import Path
from mpiddp.checkpoints.folders import RunDir
from mpiddp.checkpoints.run_folder import RunLock
owner = RunLock(RunDir(Path(sys.argv[1])))
print("owns", flush=True)
sys.stdin.read()
owner.release()
"""


def test_a_run_that_ends_while_the_next_one_opens_its_lock(tmp_path, monkeypatch):
    """It removes the file that the next one has opened already. A lock on that file excludes nobody."""
    run, lock, pipe = RunDir(tmp_path), fcntl.fcntl, subprocess.PIPE
    command = [sys.executable, "-c", OWNS, str(tmp_path)]
    owner = subprocess.Popen(command, env=clean_env(), stdin=pipe, stdout=pipe)
    assert owner.stdout.readline() == b"owns\n"

    def lock_late(file: BinaryIO, operation: int, argument: bytes) -> None:
        if owner.poll() is None:
            owner.communicate(timeout=PATIENCE_S)
        lock(file, operation, argument)

    monkeypatch.setattr(fcntl, "fcntl", lock_late)
    with pytest.raises(UserError, match="writes there"):
        RunLock(run)
    held = RunLock(run)
    assert run.owner.stat().st_ino == os.fstat(held._file.fileno()).st_ino
    held.release()


def test_a_copy_of_the_folder_keeps_the_lock(tmp_path):
    """A lock of lockf ends when the process closes any other descriptor of the file."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    held = RunLock(run)
    shutil.copytree(run.path, tmp_path / "copy")
    attempt = [sys.executable, "-c", OWNS, str(run.path)]
    refused = subprocess.run(attempt, env=clean_env(), capture_output=True, check=False)
    assert b"writes there" in refused.stderr
    reads, writes = os.pipe()
    child = os.fork()  # as a worker of a DataLoader, which outlives this process for a moment
    if child == 0:
        os.write(writes, b"forked")
        time.sleep(PATIENCE_S)
        os._exit(0)
    try:
        assert os.read(reads, 9) == b"forked"
        held._file.close()
        owned = subprocess.run(attempt, env=clean_env(), capture_output=True, check=False)
        assert b"writes there" not in owned.stderr
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def schedule(every: str, first: int = 1, *, is_new: bool = False) -> SaveSchedule:
    alone = Coordinator(World(0, 1, 0, 1))
    return SaveSchedule(parse_interval(every), alone, first - 1, is_new=is_new, timeout_s=1)


@pytest.mark.parametrize("first", [0, 1])
def test_a_schedule_by_steps(first):
    due = schedule("10", first)
    assert [step for step in range(first, 41) if due.is_due(step)] == [10, 20, 30, 40]
    due = schedule("1", first)
    assert [step for step in range(first, 4) if due.is_due(step)] == list(range(first, 4))
    due = schedule("10")  # a script may count samples
    assert [step for step in range(4, 41, 4) if due.is_due(step)] == [12, 20, 32, 40]


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("step_s", [1.0, 0.01])
def test_a_schedule_by_the_clock_saves_early(monkeypatch, is_new, step_s):
    """A start saves after an eighth, a quarter and half of the interval, and then once in each interval."""
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("mpiddp.checkpoints.schedule.time", clock)
    due, saved_at = schedule("80s", is_new=is_new), list[float]()
    for step in range(1, round(330 / step_s)):
        if due.is_due(step):
            saved_at.append(round(now))
        now += step_s
    assert saved_at == [*([0] if is_new else []), 10, 20, 40, 80, 160, 240, 320]


def test_a_schedule_by_the_clock_begins_with_a_new_run():
    assert [schedule("1h", is_new=is_new).is_due(1) for is_new in (True, False)] == [True, False]


def test_no_file_outside_of_the_checkpoint_is_touched(tmp_path):
    """Not even a pipe, which would block the reader, and not before all names have been checked."""
    new = folders.NewFolder(tmp_path / "step_00000007")
    new.path.mkdir()
    new.seal({})
    new.publish()
    os.mkfifo(tmp_path / "pipe")
    entry = {"bytes": 13, "sha256": "0" * 64}
    manifest = json.dumps({"pipe": entry, "../pipe": entry}).encode()
    (tmp_path / "step_00000007/manifest.json").write_bytes(manifest)
    (tmp_path / "step_00000007/COMPLETE").write_text(hashlib.sha256(manifest).hexdigest())
    with pytest.raises(BrokenCheckpoint, match=r'step_00000007: manifest.json lists "\.\./pipe"'):
        folders.verify(tmp_path / "step_00000007")
    assert not folders.is_verified(tmp_path / "step_00000007")


def test_a_read_always_ends(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"1234")
    assert read_limited(tmp_path / "file", 4) == b"1234"
    for path, limit in ((tmp_path / "pipe", 4), (Path("/dev/zero"), 4), (tmp_path / "file", 3)):
        with pytest.raises(OSError, match=r"not a regular file|larger than 3 bytes"):
            read_limited(path, limit)


def test_a_step_before_the_resumed_one_is_refused(tmp_path):
    with mpiddp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, {})
    with mpiddp.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.resume() is not None
        with pytest.raises(ValueError, match=r"step 1 .*step 7"):
            checkpoints.save(1, {})
        checkpoints.save(7, {})  # is saved already
        with pytest.raises(RuntimeError, match="once"):
            checkpoints.resume()


def test_any_key_is_a_file_of_its_own(tmp_path):
    keys = ("model", "a/b", "..", "é x", "%")
    state = {key: torch.tensor(number) for number, key in enumerate(keys)}
    with mpiddp.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    assert mpiddp.load(tmp_path).state == state
    folder = tmp_path / "checkpoints/step_00000001"
    assert [path.parent for path in tmp_path.rglob("*.safetensors")] == [folder] * 5


@pytest.mark.parametrize("key", ["shard_00000", "", "x" * 300])
def test_a_key_that_cannot_be_a_file(tmp_path, key):
    with pytest.raises(ValueError, match="file"):
        mpiddp.Checkpoints(tmp_path).save(1, {key: 1})


def test_what_ranks_save_goes_to_those_who_write(monkeypatch):
    """Of 1,000 ranks on two hosts with 20 kB each, 20 MB are gathered, and sent once to the other host."""
    sent: list[int] = []

    def gather(value: bytes, into: list[bytes] | None, destination: int, group: object) -> None:
        sent.append(1000 * len(value))

    def gather_to_all(into: list[bytes], value: bytes, group: object) -> None:
        sent.append(1000 * 1000 * len(value))

    def broadcast(values: list[bytes], source: int, group: object) -> None:
        assert group == "those who write"
        sent.append(sum(map(len, values)))

    monkeypatch.setattr(saving.dist, "gather_object", gather)
    monkeypatch.setattr(saving.dist, "all_gather_object", gather_to_all)
    monkeypatch.setattr(saving.dist, "broadcast_object_list", broadcast)
    run: Any = SimpleNamespace(
        rank=0, world_size=1000, local_rank=0, writers=[0, 500], is_writer=True, group=None
    )
    run.to_writers = "those who write"
    state = FlatState("per_rank", {"position": torch.zeros(10_000, dtype=torch.uint8)})
    assert len(saving._share(run, FlatState("state", {}), Union(None), state)) == 1000
    assert 20_000_000 < sum(sent) < 100_000_000


def test_records_need_a_run(tmp_path):
    with pytest.raises(mpiddp.UserError, match="Checkpoints"):
        mpiddp.run_dir()
    checkpoints = mpiddp.Checkpoints(tmp_path)
    with pytest.raises(mpiddp.UserError, match="resume"):
        mpiddp.log_metrics(1, loss=2)
    checkpoints.resume()
    with pytest.raises(TypeError, match="loss"):
        mpiddp.log_metrics(1, loss=[2])


def test_a_checkpoint_of_another_version_of_mpiddp_is_read():
    """Its about.json may have further facts, or lack some."""
    assert About.parse(b'{"written_by": "mpiddp", "step": 3, "config": {}}') == About(3, {})
