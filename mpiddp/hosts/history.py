"""What earlier jobs have shown of each host, for `mpiddp hosts history` and the launcher: JSON lines.

    {"at": 1795329022.1, "job": "7c4f…", "hosts": ["gpu16", "gpu17"], "failed": {"gpu17": "rank 3 was …"}}

They stand beside the hostfile. A line has the hosts that took part in an attempt, those that ended it or did
not answer its preflight, and those of stragglers. Nothing depends on it: a folder that cannot be
written and a disk that is full cost a line, and never a job. Hosts are named by their keys, see `Host.key`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.text import align_columns, counted, escaped

ENDING = ".history.jsonl"
LAST_JOBS = 5  # that count
FLAKY = 2  # so many failures among them are more than bad luck
_OUTDATED_S = 30 * 86400.0  # a host that is left out cannot show that it was fixed
_MOST_READ = 1 << 18  # bytes: 100 jobs a day write 7 MB a year
_LONGEST_REASON = 300  # characters
_COLUMNS = ("host", "in the last jobs", "latest failure")

VERBS = {
    "history": "Print what earlier jobs have shown of each host, or every event of one",
    "forget": "Clear the history of one host, or of all",
}


@dataclass(frozen=True)
class Event:
    """A line.

    Args:
        at: in seconds since 1970.
        job: equal in all lines of one launch, whose attempts count as one job.
        hosts: that took part.
        failed: a sentence for each host that ended the attempt, which is one of `hosts`, or did not answer.
        slow: the part of the others' speed of each host of a straggler.
    """

    at: float
    job: str = ""
    hosts: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    slow: Mapping[str, float] = field(default_factory=dict)

    @property
    def concerned(self) -> list[str]:
        """All hosts of which it says something."""
        return list(dict.fromkeys((*self.hosts, *self.failed, *self.slow)))


@dataclass(frozen=True)
class Record:
    """The last jobs of a host. `reason` is that of its latest failure, "" for none.

    `speed` is its part of the others' speed in the last job that it held up, 0 for none.
    """

    host: str
    jobs: int
    ended: int  # of these, by a failure of its own
    silent: int  # of these, in whose preflight it did not answer
    reason: str = ""
    failed_at: float = 0.0
    speed: float = 0.0

    @property
    def is_flaky(self) -> bool:
        return self.ended + self.silent >= FLAKY

    @property
    def doubt(self) -> str:
        """Why a job would do better without it; "" for no reason."""
        if self.is_flaky:
            return self.summary
        return f"is {_slowness(self.speed)}" if self.speed else ""

    @property
    def summary(self) -> str:
        """ "ended 3 of its last 5 jobs, and did not answer in 1; 14 % slower than the others"."""
        of = f"of its last {counted(self.jobs, 'job')}"
        said = f"ended {self.ended or 'none'} {of}"
        if self.silent and self.ended:
            said += f", and did not answer in {self.silent}"
        elif self.silent:
            said = f"did not answer in {self.silent} {of}"
        return f"{said}; {_slowness(self.speed)}" if self.speed else said


def _slowness(speed: float) -> str:
    return f"{100 * (1 - speed):.0f} % slower than the others"


@dataclass(frozen=True)
class History:
    """The events of a file that count, oldest first."""

    events: tuple[Event, ...] = ()

    @property
    def hosts(self) -> list[str]:
        """All hosts, in the order in which they appear."""
        return list(dict.fromkeys(host for each in self.events for host in each.concerned))

    def of(self, host: str) -> list[Event]:
        """The events of a host."""
        return [event for event in self.events if host in event.concerned]

    def record(self, host: str) -> Record:
        """The record of a host. A job counts as its worst attempt."""
        jobs: dict[str, str] = {}
        speeds: dict[str, float] = {}
        reason, failed_at = "", 0.0
        for event in self.of(host):
            if host in event.slow:
                speeds[event.job] = event.slow[host]
            end = jobs.pop(event.job, "well")  # the latest job is the last
            if host in event.failed:
                reason, failed_at = event.failed[host], event.at
                end = "ended" if host in event.hosts or end == "ended" else "silent"
            jobs[event.job] = end
        last = list(jobs)[-LAST_JOBS:]
        ends = [jobs[job] for job in last]
        speed = ([0.0] + [speeds[job] for job in last if job in speeds])[-1]
        ended, silent = ends.count("ended"), ends.count("silent")
        return Record(host, len(ends), ended, silent, reason, failed_at, speed)


@dataclass(frozen=True)
class File:
    """The history of a hostfile's hosts. `path` is None for hosts that have no hostfile."""

    path: Path | None

    @classmethod
    def of(cls, hostfile: str | None) -> File:
        # os.path.isfile answers False where pathlib raises: in a folder that may not be searched.
        is_device = hostfile is not None and hostfile.startswith(("/dev/", "/proc/"))  # <(…)
        if not hostfile or is_device or not os.path.isfile(hostfile):  # noqa: PTH113
            return cls(None)
        path = Path(f"{hostfile}{ENDING}").absolute()
        # Where all may write, another user may have put a link or a pipe there.
        is_ours = not path.is_symlink() and (path.is_file() or not path.exists())
        return cls(path if is_ours else None)

    def read(self) -> History:
        """The events that count. What is no event is skipped."""
        lines: list[bytes] = []
        if self.path is not None:
            with contextlib.suppress(OSError), self.path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_READ))
                lines = file.read().splitlines()
        since = time.time() - _OUTDATED_S
        events = [event for line in lines if (event := parse(line)) and event.at > since]
        return History(tuple(sorted(events, key=lambda event: event.at)))

    def append(self, event: Event) -> None:
        """Append an event by one write, which no other can divide on a local disk."""
        if self.path is None:
            return
        failed = {host: reason[:_LONGEST_REASON] for host, reason in event.failed.items()}
        facts = {**asdict(event), "at": round(event.at, 3), "failed": failed}
        line = json.dumps({name: fact for name, fact in facts.items() if fact})
        with contextlib.suppress(OSError), self.path.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())

    def forget(self, host: str) -> None:
        """Remove the events of a host, "" for all. Raises OSError."""
        assert self.path is not None
        kept = [_without(event, host) for event in self.read().events if host]
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in kept))
        part.replace(self.path)


def parse(line: bytes) -> Event | None:
    """The event in a line, None if it is none."""
    try:
        facts = json.loads(line)
        slow = {host: float(part) for host, part in facts.get("slow", {}).items()}
        hosts, failed = tuple(facts.get("hosts", [])), dict(facts.get("failed", {}))
        event = Event(float(facts["at"]), facts.get("job", ""), hosts, failed, slow)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    words = [event.job, *hosts, *failed, *failed.values()]
    return event if all(isinstance(word, str) for word in words) and event.concerned else None


def _without(event: Event, host: str) -> Event:
    return replace(
        event,
        hosts=tuple(each for each in event.hosts if each != host),
        failed={each: why for each, why in event.failed.items() if each != host},
        slow={each: part for each, part in event.slow.items() if each != host},
    )


def add_arguments(parser: OneSentenceParser) -> None:
    parser.add_argument("file", help="the hostfile")
    parser.add_argument("host", nargs="?", help="one host, by its name in the hostfile")


def main(options: argparse.Namespace) -> int:
    """Run a verb of `VERBS`. Returns 1 if nothing is known of the hosts, else 0.

    Raises:
        UserError: the file cannot be written.
    """
    file = File.of(options.file)
    history = file.read()
    host = (options.host or "").lower()
    known = [each for each in history.hosts if host in ("", each)]
    if not known:
        of = f"a host {escaped(host)}" if host else "any host"
        print(f"nothing is known of {of} of {escaped(options.file)}.")
        return FAILED
    if options.verb == "history":
        print(_events(history, host) if host else _table(history, known))
        print(f"from {escaped(str(file.path))}")
        return DONE
    try:
        file.forget(host)
    except OSError as error:
        raise UserError(f"{escaped(str(file.path))}: {error.strerror}.") from None
    print(f"forgot {escaped(', '.join(known))}.")
    return DONE


def _table(history: History, hosts: list[str]) -> str:
    rows = [_COLUMNS]
    for each in map(history.record, hosts):
        latest = f"{_time(each.failed_at)}  {each.reason}" if each.reason else ""
        rows.append((escaped(each.host), each.summary, escaped(latest)))
    return align_columns(rows)


def _events(history: History, host: str) -> str:
    rows = []
    for event in history.of(host):
        reason = event.failed.get(host)
        if reason is None:
            what = f"took part, with {counted(len(event.hosts) - 1, 'other host')}"
        else:
            what = f"{'ended the job' if host in event.hosts else 'did not answer'}: {reason}"
        if host in event.slow:
            what += f", and was {_slowness(event.slow[host])}"
        rows.append((_time(event.at), escaped(what)))
    return align_columns(rows)


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
