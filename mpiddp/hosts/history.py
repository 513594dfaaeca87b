"""What earlier jobs have shown of each host: JSON lines beside the hostfile, or in the user's state folder.

    {"at": 1795329022.1, "job": "7c4f…", "hosts": ["gpu16", "gpu17"], "failed": {"gpu17": "rank 3 was …"}}
    {"at": 1795329999.2, "figures": {"gpu17": {"disk": 1.2e8, "link": 9e8}}, "slow": {"gpu17": {"disk": 0.4}}}

A line has the hosts that took part in an attempt, those that ended it or did not answer its preflight, and
those that held the others up. `mpiddp doctor` adds what it has measured of each, and which were slow.
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

from mpiddp.text import counted

Figures = Mapping[str, Mapping[str, float]]  # of each host, by what they are of

ENDING = ".history.jsonl"
STEPS = "steps"  # the rank that held the others up is there
MAX_BYTES = 1 << 18  # then the older half of the lines is dropped
_MAX_UNLOCKED = 2 * MAX_BYTES  # where another launch may write meanwhile, whose line is lost then
_MAX_READ = 4 * MAX_BYTES  # of a file that nobody could shorten
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
        slow: of each slow host, what it was slow at and its part of the others' speed. STEPS are of a job.
        figures: of each host, what was measured, in bytes a second or matrix products a second.
        forgotten: of these hosts no earlier line counts.
    """

    at: float
    job: str = ""
    hosts: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    slow: Figures = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)
    forgotten: tuple[str, ...] = ()

    @property
    def concerned(self) -> list[str]:
        """All hosts of which it says something."""
        return list(dict.fromkeys((*self.hosts, *self.failed, *self.slow, *self.figures)))


@dataclass(frozen=True)
class Record:
    """The last jobs of a host. `reason` is that of its latest failure, "" for none.

    `slow`: what it was slow at when that was measured last, and its part of the others' speed.
    """

    host: str
    jobs: int
    ended: int  # of these, by a failure of its own
    silent: int  # of these, in whose preflight it did not answer
    reason: str = ""
    failed_at: float = 0.0
    slow: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_flaky(self) -> bool:
        return self.ended + self.silent >= FLAKY

    @property
    def doubt(self) -> str:
        """Why a job would do better without it; "" for no reason."""
        if not self.is_flaky:
            return f"is {self.slowness}" if self.slow else ""
        return self.summary

    @property
    def summary(self) -> str:
        """ "ended 3 of its last 5 jobs; 14 % slower than the others"."""
        return "; ".join(each for each in (self.jobs and self._ends, self.slowness) if each)

    @property
    def slowness(self) -> str:
        """ "14 % slower than the others", at what it is slowest at; "" for none."""
        if not self.slow:
            return ""
        what = min(self.slow, key=lambda each: self.slow[each])
        where = "" if what == STEPS else f" ({what})"
        return f"{100 * (1 - self.slow[what]):.0f} % slower than the others{where}"

    @property
    def _ends(self) -> str:
        """ "ended 3 of its last 5 jobs, and did not answer in 1"."""
        jobs = f"of its last {counted(self.jobs, 'job')}"
        if not self.silent:
            return f"ended {self.ended or 'none'} {jobs}"
        if not self.ended:
            return f"did not answer in {self.silent} {jobs}"
        return f"ended {self.ended} {jobs}, and did not answer in {self.silent}"


@dataclass(frozen=True)
class History:
    """The events of a user's files, oldest first.

    `broken` names the lines that are none: "FILE:3", or "a line of FILE" if its beginning was not read.
    """

    events: tuple[Event, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def hosts(self) -> list[str]:
        """All hosts, in the order in which they appear."""
        return list(dict.fromkeys(host for each in self.events for host in each.concerned))

    def record(self, host: str) -> Record:
        """The record of a host. A job counts as its worst attempt."""
        jobs: dict[str, str] = {}
        slow_in: dict[str, float] = {}  # the jobs that it has held up
        slow: dict[str, float] = {}
        reason, failed_at = "", 0.0
        for event in self.of(host):
            found = event.slow.get(host, {})
            if host in event.figures:  # of no job
                measured = event.figures[host]
                slow = {what: part for what, part in slow.items() if what not in measured}
                slow |= found
                continue
            if STEPS in found:
                slow_in[event.job] = found[STEPS]
            end = jobs.pop(event.job, "well")  # the latest job is the last
            if host in event.failed:
                reason, failed_at = event.failed[host], event.at
                end = "ended" if host in event.hosts or end == "ended" else "silent"
            jobs[event.job] = end
        last = list(jobs)[-LAST_JOBS:]
        ends = [jobs[job] for job in last]
        if held := [slow_in[job] for job in last if job in slow_in]:
            slow[STEPS] = held[-1]
        return Record(
            host, len(ends), ends.count("ended"), ends.count("silent"), reason, failed_at, slow
        )

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
            for host in event.concerned if event.at > since else ():
                found.setdefault(host, []).append(event)
        return found


@dataclass(frozen=True)
class Files:
    """Where a history is: beside the hostfile, and in the user's state folder. Either may be missing."""

    beside: Path | None
    state: Path | None

    @classmethod
    def of(cls, hostfile: str | None, env: Mapping[str, str]) -> Files:
        """The files for a hostfile. `hostfile` is None for hosts that have none.

        A folder that may not be searched has none: there pathlib raises, and `os.path` answers False.
        """
        beside = None
        is_device = hostfile is not None and hostfile.startswith(("/dev/", "/proc/"))  # <(…)
        if hostfile and not is_device and os.path.isfile(hostfile):  # noqa: PTH113
            beside = Path(f"{hostfile}{ENDING}").absolute()
        home = Path(os.path.expanduser("~"))  # noqa: PTH111 - no error without a home folder
        state = Path(env.get("XDG_STATE_HOME", ""))
        if not state.is_absolute():
            state = home / ".local" / "state"
        has_home = os.path.isdir(state) or (home.is_absolute() and os.path.isdir(home))  # noqa: PTH112
        return cls(beside, state / "mpiddp" / f"hosts{ENDING}" if has_home else None)

    @property
    def existing(self) -> list[Path]:
        both = (self.beside, self.state)
        return [path for path in both if path is not None and os.path.isfile(path)]  # noqa: PTH113

    def read(self) -> History:
        """The history in the files that can be read."""
        events: list[Event] = []
        broken: list[str] = []
        for path in self.existing:
            with contextlib.suppress(OSError):
                with path.open("rb") as file:
                    lines, is_whole = _last_lines(file.fileno())
                for number, line in enumerate(lines, start=1):
                    event = parse(line)
                    if event is not None:
                        events.append(event)
                    elif line.strip():
                        broken.append(f"{path}:{number}" if is_whole else f"a line of {path}")
        return History(tuple(sorted(events, key=lambda event: event.at)), tuple(broken))

    def append(self, event: Event) -> Path | None:
        """Append to the first file that can be written. Returns it, or None if no file can."""
        failed = {host: reason[:_LONGEST_REASON] for host, reason in event.failed.items()}
        figures = {host: _rounded(each) for host, each in event.figures.items()}
        slow = {host: _rounded(each) for host, each in event.slow.items()}
        facts = {**asdict(event), "at": round(event.at, 3), "failed": failed}
        facts |= {"slow": slow, "figures": figures}
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
        slow, figures = (_figures(facts.get(name, {})) for name in ("slow", "figures"))
        job = facts.get("job", "")
        event = Event(float(facts["at"]), job, (*hosts,), failed, slow, figures, (*forgotten,))
        words: list[Any] = [event.job, *hosts, *forgotten, *failed, *failed.values()]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    are_lists = isinstance(hosts, list) and isinstance(forgotten, list)
    is_event = are_lists and all(isinstance(word, str) for word in words)
    return event if is_event and 0 <= event.at < _LATEST else None


def _figures(found: dict[str, dict[str, float]]) -> Figures:
    """Raises ValueError, TypeError or AttributeError: these are no figures."""
    figures = {
        host: {what: float(value) for what, value in each.items()} for host, each in found.items()
    }
    if not all(0 <= value < float("inf") for each in figures.values() for value in each.values()):
        raise ValueError(figures)
    return figures


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {what: float(f"{value:.4g}") for what, value in figures.items()}


def _last_lines(file: int) -> tuple[list[bytes], bool]:
    """The whole lines at the end of a file, and whether these are all. The last one may lack its end."""
    size = os.fstat(file).st_size
    first = max(0, size - _MAX_READ)
    lines = os.pread(file, size - first, first).splitlines(keepends=True)
    return (lines[1:], False) if first else (lines, True)


def _append(path: Path, line: bytes) -> None:
    """Append a line by one write, which no other can divide. Drop the older half of a long file."""
    with _opened(path) as (file, is_locked):
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":  # a full disk has cut the last line
            line = b"\n" + line
        os.write(file, line)
        if size + len(line) > (MAX_BYTES if is_locked else _MAX_UNLOCKED):
            with contextlib.suppress(OSError):  # the line is there
                _shorten(path, file)


def _shorten(path: Path, file: int) -> None:
    """Drop the older half of the lines of an open file, and never the newest one."""
    lines, _ = _last_lines(file)
    # A new file, because a launch that is killed here must not lose both halves.
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with part.open("xb") as kept:
        kept.writelines(lines[len(lines) // 2 :])
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
