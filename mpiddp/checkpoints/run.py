"""The folder of a run, open: its one owner, and the ranks that write into it.

    run = open_run(folder, ranks)
    if found := newest(run):
        files = bring(run, found)

The folder has one owner at a time, because two runs in one folder would remove each other's saves. The owner
creates owner.json, and touches it every 10 s. An owner whose file has not been touched for 60 s is dead. Only
the reader's own clock measures that, because the clocks of two hosts differ. An owner on this machine is dead
at once when its process is, and so is an earlier attempt of the same run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import gethostname

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.ranks import FileSystems, Ranks, find_file_systems
from mpiddp.checkpoints.run_dir import (
    OWNER_STALE_S,
    RunDir,
    start_time,
    this_machine,
    writing,
)
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, named_by, read_limited
from mpiddp.protocol.variables import RUN_DIR, RUN_ID
from mpiddp.runtime.log import log
from mpiddp.text import shown

RENEW_S = 10.0  # of the owner's file
_POLL_S = 1.0
_MAX_BYTES = 1 << 16
RUN_AWAY_S, _RETRY_S = 600.0, 2.0  # while the file system of the run is not mounted


@dataclass(frozen=True)
class Run:
    """The open folder of a run, on one rank."""

    dir: RunDir
    ranks: Ranks
    file_systems: FileSystems
    owner: RunOwner | None  # on the ranks that write into the folder: one of each file system

    @property
    def is_writer(self) -> bool:
        return self.ranks.rank in self.file_systems.writers

    def check_owner(self) -> None:
        """Raise JobFailed if another run has taken the folder."""
        if self.owner is not None:
            self.owner.check()

    def set_newer_aside(self, step: int) -> None:
        """Rename the checkpoints of later steps: a restart would resume from the newest of them.

        All ranks must call this.

        Raises:
            UserError, JobFailed: they cannot be renamed.
        """
        root = self.dir.checkpoints
        with self.ranks.together():
            try:
                moved = directory.set_aside(root, step) if self.is_writer else []
            except OSError as error:
                sentence = f"{root}: cannot rename the newer checkpoints: {error.strerror}."
                raise cause_of(error, has_run=True)(sentence) from None
        for folder in moved:
            log.info(
                f"renamed to {folder.name}: its step is later than the one this run resumes from"
            )

    def close(self, *, removes_new: bool = False) -> None:
        """Give the folder up.

        Args:
            removes_new: remove the folders that `open_run` has created, if they are empty.
        """
        if self.owner is not None:
            self.owner.release()
        if removes_new and self.is_writer:
            for folder in (self.dir.checkpoints, self.dir.path):
                with contextlib.suppress(OSError):
                    folder.rmdir()


def open_run(folder: RunDir, ranks: Ranks) -> Run:
    """Create the run's folder on every host, and become its owner. All ranks must call this.

    Raises:
        UserError: the folder cannot be written, another run owns it, or another program has written it.
        JobFailed: a disk has failed, or the folder of the run that is restarted is gone.
    """
    if os.environ.get(RUN_DIR) == str(folder.path.absolute()):
        _wait_for_run(folder.checkpoints, ranks)
    with ranks.together(), named_by(""):
        if folder.metrics.exists() and not folder.checkpoints.exists():
            raise UserError(
                f"{folder} has a {folder.metrics.name} of another program. Name another folder."
            )
    with ranks.together(), writing(folder):
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    file_systems = find_file_systems(folder, ranks)
    owner: RunOwner | None = None
    try:
        with ranks.together(), writing(folder):
            if ranks.rank in file_systems.writers:
                run_id = os.environ.get(RUN_ID) or secrets.token_hex(8)
                owner = own(folder, run_id, on_wait=log.info)
    except BaseException:
        if owner is not None:
            owner.release()
        raise
    return Run(folder, ranks, file_systems, owner)


def _wait_for_run(folder: Path, ranks: Ranks) -> None:
    """Wait until a host has the folder of the run that is restarted. Its file server may be away.

    All ranks must call this.

    Raises:
        JobFailed: no host has it after RUN_AWAY_S.
    """
    since = time.monotonic()
    says_so = False
    while True:
        is_here = ranks.is_first_of_host and _is_there(folder)
        is_late = time.monotonic() - since > RUN_AWAY_S
        answers = ranks.gather((is_here, is_late))
        if any(here for here, _ in answers):
            return
        if answers[0][1]:
            raise JobFailed(
                f"{folder.parent} is not there any more: no host can read {folder.name}."
            )
        if not says_so:
            says_so = True
            log.info(f"{folder.parent} is not there; waiting for its file system …")
        time.sleep(_RETRY_S)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


# Its owner


@dataclass(frozen=True)
class _Record:
    """The contents of the file. `machine` names a boot of a machine, and its namespace of process ids."""

    run_id: str
    host: str
    machine: str
    pid: int
    started: str  # by the kernel's clock; another process may get the same pid later

    @classmethod
    def of_this_process(cls, run_id: str) -> _Record:
        pid = os.getpid()
        return cls(run_id, gethostname(), this_machine(), pid, start_time(pid))

    @classmethod
    def parse(cls, text: bytes) -> _Record | None:
        """None if another version, or a disk that was full, has written it."""
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        texts = (found.run_id, found.host, found.machine, found.started)
        is_record = all(isinstance(each, str) for each in texts)
        is_record &= type(found.pid) is int and 0 <= found.pid < 1 << 32
        return found if is_record else None

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def is_dead(self) -> bool | None:
        """Whether its process has ended; None if it is not one of this machine."""
        if self.machine != this_machine():
            return None
        return start_time(self.pid) != self.started

    @property
    def is_this_process(self) -> bool:
        return self.pid == os.getpid() and self.is_dead is False

    @property
    def sentence(self) -> str:
        run_id, host = shown(self.run_id), shown(self.host)
        return f"the run {run_id} on {host} (process {self.pid}) writes there"


class RunOwner:
    """The ownership of a run's folder, renewed by a thread until `release`."""

    def __init__(self, path: Path, record: _Record) -> None:
        self._path = path
        self._record = record
        self._is_over = threading.Event()
        self._lost_to = ""
        self._thread = threading.Thread(target=self._renew, name="run owner", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise JobFailed if another run has taken the folder, because this one was not seen for 60 s."""
        if self._lost_to:
            raise JobFailed(f"{self._path.parent} was taken over: {self._lost_to}.")

    def release(self) -> None:
        """Give the folder up. In a forked child, or a second time, this does nothing."""
        if os.getpid() != self._record.pid:
            return
        self._is_over.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # a file server that is gone
            if not self._lost_to and _read(self._path) == self._record.encoded():
                self._path.unlink()

    def _renew(self) -> None:
        while not self._is_over.wait(RENEW_S):
            with contextlib.suppress(OSError):  # a file server may be away for a while
                found = read_limited(self._path, _MAX_BYTES)
                if found != self._record.encoded():
                    record = _Record.parse(found)
                    self._lost_to = record.sentence if record else "its owner file has changed"
                    return
                os.utime(self._path)


def own(run: RunDir, run_id: str, *, on_wait: Callable[[str], None]) -> RunOwner:
    """Become the owner of the run's folder.

    Args:
        run_id: the same in all attempts of a job.
        on_wait: called with a sentence before a wait of at most 60 s.

    Raises:
        UserError: another run owns it.
        OSError: the folder is not writable, …
    """
    record = _Record.of_this_process(run_id)
    has_waited = False
    while not _create(run.owner, record):
        touched, found = _touched(run.owner), _read(run.owner)
        if found is None:
            if run.owner.is_symlink():
                raise UserError(f"{run.owner} is a link to a file that does not exist. Remove it.")
            continue  # released meanwhile
        other = _Record.parse(found)
        if other is not None and other.is_this_process:
            raise UserError(f"{run} is in use by this process. Close it there first.")
        is_dead = other is not None and (other.run_id == run_id or other.is_dead)
        if not is_dead:
            if other is not None and other.is_dead is False:
                raise _taken(run, other)
            if not has_waited:
                has_waited = True
                host = shown(other.host) if other else "another host"
                on_wait(
                    f"{run} belongs to a run on {host}; watching for {OWNER_STALE_S:g} s whether that still "
                    "runs."
                )
            if alive := _wait_for_change(run.owner, found, touched):
                raise _taken(run, alive)
        _remove_dead(run.owner, found)
    return RunOwner(run.owner, record)


def _taken(run: RunDir, other: _Record) -> UserError:
    return UserError(f"{run}: {other.sentence}. Wait for its end, or name another folder.")


def _create(path: Path, record: _Record) -> bool:
    """Create the file. False if it exists."""
    try:
        file = path.open("xb")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(record.encoded())
    except OSError:  # a full disk: an empty owner.json would look like a living owner to a restart
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return True


def _wait_for_change(path: Path, before: bytes, touched: int) -> _Record | None:
    """The owner that touches or replaces the file within 60 s; None if nobody does, or removes it."""
    deadline = time.monotonic() + OWNER_STALE_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        found = _read(path)
        if found is None:
            return None
        if (found, _touched(path)) != (before, touched) and (record := _Record.parse(found)):
            return record
    return None


def _remove_dead(path: Path, expected: bytes) -> None:
    """Remove a dead owner's file, if it still has these contents.

    Only the process that creates the claim may remove it. Another one could remove the file of whoever was
    faster than itself.
    """
    claim = path.with_name(f".{path.name}-{hashlib.sha256(expected).hexdigest()[:16]}")
    try:
        claim.open("xb").close()
    except FileExistsError:
        if (
            _wait_for_change(path, expected, _touched(path)) is None
        ):  # the process that claimed it has died
            claim.unlink(missing_ok=True)
        return
    try:
        if _read(path) == expected:
            path.unlink()
    finally:
        claim.unlink(missing_ok=True)


def _touched(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> bytes | None:
    try:
        return read_limited(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
