"""What earlier jobs have shown of each host, for `mpiddp hosts history` and the launcher: JSON lines.

    {"at": 1795329022.1, "job": "7c4f…", "hosts": {"gpu16": "", "gpu17": "rank 3 was killed …"}}

They stand beside the hostfile. A line has the hosts that took part in an attempt, and why some of them ended
it or did not answer its preflight. Nothing depends on it: a folder that cannot be written and a disk that is
full cost a line, and never a job. Hosts are named by their keys, see `Host.key`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpiddp.errors import DONE, FAILED, named_by
from mpiddp.files import replace_file
from mpiddp.hosts.hostfile import Host
from mpiddp.text import align_columns, counted, escaped

ENDING = ".history.jsonl"
LAST_JOBS = 5  # that count
FLAKY = 2  # so many failures among them are more than bad luck
_OUTDATED_S = 30 * 86400.0  # a host that is left out cannot show that it was fixed
_MOST_READ = 1 << 18  # bytes: 100 jobs a day write 7 MB a year
_LONGEST_REASON = 300  # characters
_JOB = os.urandom(4).hex()  # this launch

VERBS = {
    "history": "Print what earlier jobs have shown of each host, or of one",
    "forget": "Clear the history of one host, or of all",
}


class Event(NamedTuple):
    """A line of the file."""

    at: float  # in seconds since 1970
    job: str  # equal in all lines of one launch, whose attempts count as one job
    hosts: Mapping[str, str]  # why each ended it or did not answer, "" if it only took part


class Record(NamedTuple):
    """The last jobs of a host."""

    jobs: int
    failed: int  # of these
    reason: str  # of the latest failure, "" for none
    failed_at: float

    def __str__(self) -> str:
        return f"failed in {self.failed or 'none'} of its last {counted(self.jobs, 'job')}"


def record_of(host: str, events: Sequence[Event]) -> Record:
    """What the events say of a host, oldest first. A job counts as its worst attempt."""
    jobs: dict[str, bool] = {}
    reason, failed_at = "", 0.0
    for event in (each for each in events if host in each.hosts):
        why = event.hosts[host]
        jobs[event.job] = jobs.pop(event.job, False) or bool(why)  # the latest job is the last
        if why:
            reason, failed_at = why, event.at
    ends = [*jobs.values()][-LAST_JOBS:]
    return Record(len(ends), sum(ends), reason, failed_at)


def file_of(hostfile: str | None) -> Path | None:
    """The history of a hostfile's hosts; None for hosts that have no hostfile."""
    # os.path.isfile answers False where pathlib raises: in a folder that may not be searched.
    if not hostfile or not os.path.isfile(hostfile):  # noqa: PTH113
        return None
    path = Path(f"{hostfile}{ENDING}").absolute()
    # Where all may write, another user may have put a link or a pipe there.
    is_ours = not path.is_symlink() and (path.is_file() or not path.exists())
    return path if is_ours else None


def read(path: Path | None) -> list[Event]:
    """The events that count, oldest first. What is no event is skipped."""
    lines: list[bytes] = []
    if path is not None:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_READ))
            lines = file.read().splitlines()
    since = time.time() - _OUTDATED_S
    events = [event for line in lines if (event := parse(line)) and event.at > since]
    return sorted(events, key=lambda event: event.at)


def parse(line: bytes) -> Event | None:
    """The event in a line, None if it is none."""
    try:
        facts = json.loads(line)
        hosts = {host: str(why) for host, why in facts["hosts"].items()}
        time.localtime(at := float(facts["at"]))  # raises for what is no time
        return Event(at, str(facts["job"]), hosts)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def doubts(path: Path | None, hosts: Sequence[Host]) -> dict[str, str]:
    """Why a job would do better without some of the hosts, by their keys."""
    events = read(path)
    failed = {key for event in events for key, why in event.hosts.items() if why}
    known = [(host, record_of(host.key, events)) for host in hosts if host.key in failed]
    return {host.key: f"{host.name} {each}" for host, each in known if each.failed >= FLAKY}


def note(path: Path | None, used: Collection[str], failed: Mapping[str, str]) -> None:
    """Write down what this launch has shown: the hosts that took part, and why some failed."""
    append(path, Event(time.time(), _JOB, {**dict.fromkeys(used, ""), **failed}))


def append(path: Path | None, event: Event) -> None:
    """Append an event by one write, which no other can divide on a local disk."""
    if path is not None:
        with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
            file.write(_line(event))


def _line(event: Event) -> bytes:
    hosts = {host: why[:_LONGEST_REASON] for host, why in event.hosts.items()}
    facts = {"at": round(event.at, 3), "job": event.job, "hosts": hosts}
    return f"{json.dumps(facts)}\n".encode()


def forget(path: Path, hosts: Collection[str]) -> None:
    """Remove the events of hosts. Raises OSError."""
    left = [
        event._replace(hosts={host: event.hosts[host] for host in event.hosts if host not in hosts})
        for event in read(path)
    ]
    replace_file(path, b"".join(_line(event) for event in left if event.hosts))


def main(options: argparse.Namespace) -> int:
    """Run a verb of `VERBS`. Returns 1 if nothing is known of the hosts, else 0."""
    path = file_of(options.file)
    events = read(path)
    host = (options.host or "").lower()
    concerned = dict.fromkeys(each for event in events for each in event.hosts)
    known = [each for each in concerned if host in ("", each)]
    if path is None or not known:
        of = f"a host {escaped(host)}" if host else "any host"
        print(f"nothing is known of {of} of {escaped(options.file)}.")
        return FAILED
    if options.verb == "history":
        rows = [("host", "in the last jobs", "latest failure")]
        for each in known:
            record = record_of(each, events)
            at = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.failed_at))
            latest = f"{at}  {record.reason}" if record.reason else ""
            rows.append((escaped(each), str(record), escaped(latest)))
        print(f"{align_columns(rows)}\nfrom {escaped(str(path))}")
        return DONE
    with named_by(""):
        forget(path, known)
    print(f"forgot {escaped(', '.join(known))}.")
    return DONE
