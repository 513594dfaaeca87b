"""What earlier jobs have shown of each host: JSON lines beside the hostfile, or in the user's state folder.

    {"at": 1795329022.1, "job": "7c4f…", "hosts": ["gpu16", "gpu17"], "failed": {"gpu17": "rank 3 was …"}}

A line has the hosts that took part in an attempt, and those that ended it or did not answer its preflight.
Nothing depends on it: a folder that cannot be written and a disk that is full cost a line, and never a job.
Hosts are named by their keys, see `Host.key`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mpiddp.paths import read_limited
from mpiddp.text import counted

ENDING = ".history.jsonl"
MAX_BYTES = 1 << 18  # then the older half is dropped
LAST_JOBS = 5  # that count
FLAKY = 2  # so many failures among them are more than bad luck
_OUTDATED_S = 30 * 86400.0  # a host that is left out cannot show that it was mended
_LOCK_S = 1.0  # longest wait for another launch
_LONGEST_REASON = 300  # characters
_LATEST = 1e11  # in seconds since 1970; localtime has a bound


@dataclass(frozen=True)
class Event:
    """A line.

    Args:
        at: in seconds since 1970.
        job: equal in all lines of one launch, whose attempts count as one job.
        hosts: that took part.
        failed: a sentence for each host that ended the attempt, which is one of `hosts`, or did not answer.
        forgotten: of these hosts no earlier line counts.
    """

    at: float
    job: str = ""
    hosts: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    forgotten: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """The last jobs of a host. `reason` is that of its latest failure, "" for none."""

    host: str
    jobs: int
    ended: int  # of these, by a failure of its own
    silent: int  # of these, in whose preflight it did not answer
    reason: str = ""
    failed_at: float = 0.0

    @property
    def is_flaky(self) -> bool:
        return self.ended + self.silent >= FLAKY

    @property
    def summary(self) -> str:
        """ "ended 3 of its last 5 jobs, and did not answer in 1"."""
        jobs = f"of its last {counted(self.jobs, 'job')}"
        if not self.silent:
            return f"ended {self.ended or 'none'} {jobs}"
        if not self.ended:
            return f"did not answer in {self.silent} {jobs}"
        return f"ended {self.ended} {jobs}, and did not answer in {self.silent}"


@dataclass(frozen=True)
class History:
    """The events of a user's files, oldest first. `broken` names the lines that are none: "FILE:3"."""

    events: tuple[Event, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def hosts(self) -> list[str]:
        """All hosts, in the order in which they appear."""
        return list(
            dict.fromkeys(host for each in self.events for host in (*each.hosts, *each.failed))
        )

    def record(self, host: str) -> Record:
        """The record of a host. A job counts as its worst attempt."""
        jobs: dict[str, str] = {}
        reason, failed_at = "", 0.0
        for event in self.of(host):
            end = jobs.pop(event.job, "well")  # the latest job is the last
            if host in event.failed:
                reason, failed_at = event.failed[host], event.at
                end = "ended" if host in event.hosts or end == "ended" else "silent"
            jobs[event.job] = end
        ends = list(jobs.values())[-LAST_JOBS:]
        return Record(host, len(ends), ends.count("ended"), ends.count("silent"), reason, failed_at)

    def of(self, host: str) -> list[Event]:
        """The events of a host that count."""
        return self._by_host.get(host, [])

    @cached_property
    def _by_host(self) -> dict[str, list[Event]]:
        found: dict[str, list[Event]] = {}
        since = time.time() - _OUTDATED_S
        for event in self.events:
            for host in event.forgotten:
                found.pop(host, None)
            for host in {*event.hosts, *event.failed} if event.at > since else ():
                found.setdefault(host, []).append(event)
        return found


@dataclass(frozen=True)
class Files:
    """Where a history is: beside the hostfile, and in the user's state folder. Either may be missing."""

    beside: Path | None
    state: Path | None

    @classmethod
    def of(cls, hostfile: str | None, env: Mapping[str, str]) -> Files:
        """The files for a hostfile. `hostfile` is None for hosts that have none."""
        beside = None
        is_device = hostfile is not None and hostfile.startswith(("/dev/", "/proc/"))  # <(…)
        if hostfile and not is_device and os.path.isfile(hostfile):  # noqa: PTH113 - False for any error
            beside = Path(f"{hostfile}{ENDING}").absolute()
        home = Path(os.path.expanduser("~"))  # noqa: PTH111 - no error without a home folder
        state = Path(env.get("XDG_STATE_HOME", ""))
        if not state.is_absolute():
            state = home / ".local" / "state"
        has_home = state.is_dir() or (home.is_absolute() and home.is_dir())
        return cls(beside, state / "mpiddp" / f"hosts{ENDING}" if has_home else None)

    @property
    def existing(self) -> list[Path]:
        return [path for path in (self.beside, self.state) if path is not None and path.is_file()]

    def read(self) -> History:
        """The history in the files that can be read."""
        events: list[Event] = []
        broken: list[str] = []
        for path in self.existing:
            with contextlib.suppress(OSError):
                lines = read_limited(path, 4 * MAX_BYTES).split(b"\n")
                for number, line in enumerate(lines, start=1):
                    event = parse(line)
                    if event is not None:
                        events.append(event)
                    elif line.strip():
                        broken.append(f"{path}:{number}")
        return History(tuple(sorted(events, key=lambda event: event.at)), tuple(broken))

    def append(self, event: Event) -> Path | None:
        """Append to the first file that can be written. Returns it, or None if no file can."""
        failed = {host: reason[:_LONGEST_REASON] for host, reason in event.failed.items()}
        facts = {**asdict(event), "at": round(event.at, 3), "failed": failed}
        line = json.dumps({name: fact for name, fact in facts.items() if fact}).encode() + b"\n"
        for path in (self.beside, self.state):
            if path is not None:
                with contextlib.suppress(OSError):
                    if path == self.state:
                        path.parent.mkdir(parents=True, exist_ok=True)
                    _append(path, line)
                    return path
        return None


def parse(line: bytes) -> Event | None:
    """The event in a line, None if it is none."""
    try:
        facts = json.loads(line)
        hosts, forgotten = facts.get("hosts", []), facts.get("forgotten", [])
        failed = facts.get("failed", {})
        event = Event(float(facts["at"]), facts.get("job", ""), (*hosts,), failed, (*forgotten,))
        words: list[Any] = [event.job, *hosts, *forgotten, *failed, *failed.values()]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    are_lists = isinstance(hosts, list) and isinstance(forgotten, list)
    is_event = are_lists and all(isinstance(word, str) for word in words)
    return event if is_event and 0 <= event.at < _LATEST else None


def _append(path: Path, line: bytes) -> None:
    """Append a line by one write, which no other can divide. Drop the older half of a long file."""
    with _opened(path) as (file, is_locked):
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":  # a full disk has cut the last line
            line = b"\n" + line
        os.write(file, line)
        if is_locked and size + len(line) > MAX_BYTES:
            newer = os.pread(file, size + len(line), (size + len(line)) // 2)
            # A new file, because a launch that is killed here must not lose both halves.
            part = path.with_name(f"{path.name}.part")
            part.unlink(missing_ok=True)
            with part.open("xb") as kept:
                kept.write(newer.partition(b"\n")[2])
            part.replace(path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, bool]]:
    """The file, open for appending, and whether no other launch may replace it meanwhile."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    deadline = time.monotonic() + _LOCK_S
    while True:
        file = os.open(path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            is_locked = _lock(file, deadline)
            if not is_locked or os.path.samestat(os.fstat(file), path.stat()):
                yield file, is_locked
                return
        finally:
            os.close(file)


def _lock(file: int, deadline: float) -> bool:
    """Whether the file is locked now. Some file systems have no locks; its owner may be stopped."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK or time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        else:
            return True
