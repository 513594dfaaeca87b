"""Two runs with one --out: the second refuses while the first is alive, and takes over when it is dead.

Tests mpiddp/checkpoints/run.py.
python -m pytest tests/integration/checkpoints/test_run_owner.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.checkpoints.run import _Record, own
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.errors import JobFailed, UserError
from tests.support.errors import error
from tests.support.owners import owning
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def refuse_to_wait(sentence: str) -> None:
    raise AssertionError(sentence)


def test_a_second_run_is_refused_with_owner_host_and_age(run: RunDir) -> None:
    with owning(run, "first") as other:
        with pytest.raises(UserError) as refused:
            own(run, "second", on_wait=refuse_to_wait)
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(timeout=PATIENCE_S) == 0
    values = (f"{run}: ", "first ", os.uname().nodename, f"(process {other.pid})")
    assert re.fullmatch(error("Wait for", *values), str(refused.value))
    own(run, "second", on_wait=refuse_to_wait).release()  # the first has given it up
    assert list(run.path.iterdir()) == []


def test_a_killed_owner_of_this_machine_is_replaced_at_once(run: RunDir) -> None:
    with owning(run, "first") as other:
        other.kill()
        other.wait(timeout=PATIENCE_S)
    own(run, "second", on_wait=refuse_to_wait).release()


def test_a_process_that_got_the_pid_of_a_dead_owner_is_not_the_owner(run: RunDir) -> None:
    record = replace(_Record.of_this_process("first"), started="1")
    run.owner.write_bytes(record.encoded())
    own(run, "second", on_wait=refuse_to_wait).release()


def test_a_restart_replaces_its_own_earlier_attempt_at_once(run: RunDir) -> None:
    """Even if that attempt's host was cut off, so that nobody can tell whether it is alive."""
    run.owner.write_bytes(
        replace(_Record.of_this_process("run"), machine="cut off", pid=1).encoded()
    )
    own(run, "run", on_wait=refuse_to_wait).release()


def elsewhere() -> bytes:
    """The file of a run on another machine."""
    return _Record("first", "node7", "another boot", 4711, "1").encoded()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpiddp.checkpoints.run.OWNER_STALE_S", 1.0)
    monkeypatch.setattr("mpiddp.checkpoints.run._POLL_S", 0.05)
    monkeypatch.setattr("mpiddp.checkpoints.run.RENEW_S", 0.05)


@pytest.mark.parametrize("mtime", [0, 4102444800])
@pytest.mark.usefixtures("fast")
def test_an_owner_elsewhere_is_dead_when_its_file_stays_whatever_its_clock_says(
    run: RunDir, mtime: int
) -> None:
    run.owner.write_bytes(elsewhere())
    os.utime(run.owner, (mtime, mtime))
    waits: list[str] = []
    own(run, "second", on_wait=waits.append).release()
    assert waits == [f"{run} belongs to a run on node7; watching for 1 s whether that still runs."]


@pytest.mark.usefixtures("fast")
def test_an_owner_elsewhere_that_renews_its_file_is_alive(run: RunDir) -> None:
    run.owner.write_bytes(elsewhere())
    is_watched = threading.Event()

    def renew() -> None:
        is_watched.wait(PATIENCE_S)
        os.utime(run.owner, ns=(1, 1))

    thread = threading.Thread(target=renew)
    thread.start()
    values = (f"{run}: ", "first ", "node7 ", "(process 4711)")
    with pytest.raises(UserError, match=error("Wait for", *values)):
        own(run, "second", on_wait=lambda sentence: is_watched.set())
    thread.join()
    assert run.owner.read_bytes() == elsewhere()


@pytest.mark.usefixtures("fast")
def test_an_owner_touches_its_file(run: RunDir) -> None:
    held = own(run, "first", on_wait=refuse_to_wait)
    os.utime(run.owner, ns=(1, 1))
    deadline = time.monotonic() + PATIENCE_S
    while run.owner.stat().st_mtime_ns == 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    held.release()


@pytest.mark.parametrize("contents", [b"", b"[]", b"{}", b"\xff", b'{"run_id": 3}'])
@pytest.mark.usefixtures("fast")
def test_a_file_of_another_version_or_a_full_disk_is_replaced_after_the_wait(
    run: RunDir, contents: bytes
) -> None:
    run.owner.write_bytes(contents)
    own(run, "second", on_wait=lambda sentence: None).release()


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "change",
    [
        *({"pid": "../.."}, {"pid": True}, {"pid": -1}, {"pid": 10**400}),
        *({"run_id": 1}, {"host": None}, {"machine": []}, {"more": 1}),
    ],
)
def test_a_crafted_file_names_no_owner(change: dict[str, object]) -> None:
    known = json.loads(_Record.of_this_process("a").encoded())
    assert _Record.parse(json.dumps(known).encode()) is not None
    assert _Record.parse(json.dumps(known | change).encode()) is None
    assert _Record.parse(b"[" * 100_000) is None


def test_a_pipe_instead_of_the_file_blocks_nobody(run: RunDir) -> None:
    os.mkfifo(run.owner)
    with pytest.raises(OSError, match="not a regular file"):
        own(run, "a", on_wait=refuse_to_wait)


@pytest.mark.usefixtures("fast")
def test_an_owner_that_lost_the_folder_notices_and_leaves_the_file_alone(run: RunDir) -> None:
    held = own(run, "first", on_wait=refuse_to_wait)
    held.check()
    other = run.owner.with_name("other")
    other.write_bytes(elsewhere())
    other.replace(run.owner)  # it is read every 0.05 s
    held._thread.join(PATIENCE_S)
    with pytest.raises(JobFailed, match=error("was taken", f"{run} ", "first ", "node7 ")):
        held.check()
    held.release()
    assert run.owner.read_bytes() == elsewhere()


def test_an_owner_whose_folder_can_no_longer_be_read_ends_without_an_error(run: RunDir) -> None:
    """As on a file server that is gone."""
    held = own(run, "first", on_wait=refuse_to_wait)
    run.owner.unlink()
    run.owner.symlink_to("x" * 300)  # longer than a name may be
    held.release()


@pytest.mark.usefixtures("fast")
def test_of_many_that_want_a_dead_owners_folder_one_gets_it(run: RunDir) -> None:
    run.owner.write_bytes(elsewhere())
    owners, refusals = [], []

    def take(number: int) -> None:
        try:
            owners.append(own(run, f"run {number}", on_wait=lambda sentence: None))
        except UserError as refused:
            refusals.append(str(refused))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (len(owners), len(refusals)) == (1, 7)
    # A thread that comes late finds this process as the owner, the others find a change.
    either = (error("process. Close", f"{run} "), error("Wait for", f"{run}: "))
    assert all(re.fullmatch("|".join(either), each) for each in refusals), refusals
    owners[0].release()
    assert [path.name for path in run.path.iterdir()] == []


FULL_DISK = """
import os, resource, sys
from pathlib import Path
from mpiddp.checkpoints.run import own
from mpiddp.checkpoints.run_dir import RunDir
run = RunDir(Path(sys.argv[1]))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
def set_space(is_full):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))
def own_it():
    return own(run, "run", on_wait=sys.exit)
set_space(is_full=True)
try:
    own_it()
except OSError:
    print(os.listdir(run.path))
set_space(is_full=False)
own_it().release()
print(os.listdir(run.path))
"""


def test_a_full_disk_leaves_no_files_behind(run: RunDir) -> None:
    """An empty owner.json would look like a living owner to a restart."""
    command = [sys.executable, "-c", FULL_DISK, str(run)]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")


# --- trainings ---
