"""The jobs of this user whose launchers run on this machine: find them, and ask them for facts."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mpiddp.arguments import OneSentenceParser, Option
from mpiddp.errors import DONE, UserError
from mpiddp.hosts.private import private_folders
from mpiddp.hosts.processes import fact_of
from mpiddp.protocol.channel import NAMED_AT, VIEW_JOB, VIEWED_AT, encode, viewed_folders
from mpiddp.text import listed, shown
from mpiddp.watch.detached import DetachedJob, detached_jobs

Facts = Mapping[str, Any]
NO_ANSWER = "no answer"

_ANSWER_S = 3.0  # a launcher answers in a few milliseconds
_LATE_ANSWER_S = 0.01  # after other launchers were waited for, an answer has arrived, or none comes
_STACKS_S = 15.0  # the launcher waits up to 5 s for the stacks of its ranks


@dataclass(frozen=True)
class RunningJob:
    """A job whose launcher listens at `path`."""

    path: Path
    pid: int  # of the launcher, 0 if it runs in another container
    name: str
    facts: dict[str, Any]  # its launcher's answer, {} if there is none

    @property
    def title(self) -> str:
        return f"{self.pid or '-'} ({self.name})"

    @property
    def ended_meanwhile(self) -> UserError:
        return UserError(f"job {self.title} has ended.")

    def connected(self) -> socket.socket:
        """A connection to its launcher. Raises UserError if it has ended, also if another one listens."""
        connected = _connected(self.path)
        if connected is None or connected[1] != self.pid:
            raise self.ended_meanwhile
        return connected[0]

    def ask(self, view: str) -> dict[str, Any]:
        """The answer to one of VIEWS. Raises UserError if the job has ended or does not answer."""
        connection = self.connected()
        _ask(connection, view)
        if facts := _answer(connection, _ANSWER_S if view == VIEW_JOB else _STACKS_S):
            return facts
        why = "it starts, restarts or ends now" if self.silence == NO_ANSWER else "it is suspended"
        raise UserError(f"job {self.title} does not answer: {why}.")

    @property
    def silence(self) -> str:
        """The phase of a job that does not answer."""
        return "suspended" if b") T " in fact_of(self.pid, "stat") else NO_ANSWER


_AnyJob = TypeVar("_AnyJob", RunningJob, DetachedJob)


def job_parser(
    verb: str, purpose: str, *options: Option, default: str = "the only one that runs"
) -> OneSentenceParser:
    parser = OneSentenceParser(prog=f"mpiddp {verb}", description=purpose)
    for option in (
        Option("job", value="JOB", nargs="?", help=f"pid or name (default: {default})"),
        *options,
    ):
        option.add_to(parser)
    return parser


def running_jobs() -> list[RunningJob]:
    """All jobs of this user on this machine, the oldest first. Silent launchers are waited for only once."""
    jobs, asked = [], []
    for path in sockets():
        if connected := _connected(path):
            _ask(connected[0], VIEW_JOB)
            asked.append((path, *connected))
    until = time.monotonic() + _ANSWER_S
    for path, connection, pid in asked:
        facts = _answer(connection, max(_LATE_ANSWER_S, until - time.monotonic()))
        with contextlib.suppress(OSError):  # it has just ended
            name = path.with_name(NAMED_AT).read_text(encoding="utf-8")
            jobs.append(RunningJob(path, pid, name, facts))
    return sorted(jobs, key=lambda job: (-job.facts.get("age_s", 0.0), job.pid))


# All verbs have the same rule: JOB is the pid or the name of a job. Without JOB, they take the only job that runs, if
# this container shows its launcher. `logs` and `wait` take jobs of --detach alone, or else the latest.


def find_job(name: str | None) -> RunningJob:
    """The running job with this name or pid, or the only one.

    If it is a job of --detach that has ended, this process ends, too, and says how. Raises UserError if there is
    no such job, or several.
    """
    jobs = running_jobs()
    if job := _meant(name, [job for job in jobs if name or job.pid]):
        return job
    for detached in detached_jobs() if name else ():
        if detached.name == name:
            where = detached.report().get("launched_on")
            if detached.is_running:
                is_here = where == socket.gethostname()
                state, fix = (
                    ("starts or ends now", "") if is_here else (f"runs on {where}", "log in there")
                )
                raise UserError(f"job {name} {state}.", fix=fix)
            print(detached.ending)
            sys.exit(DONE)
    if not jobs:
        raise UserError(
            "no job of yours runs on this machine: mpiddp launch runs elsewhere, or has ended."
        )
    titles = listed([job.title for job in jobs])
    called = "is called " + shown(name) if name else "runs in this container"
    raise UserError(f"no job of yours {called}. There are: {titles}.")


def find_detached(name: str | None) -> DetachedJob:
    """The job of --detach with this name or pid, or the only one. Raises UserError for none or several."""
    jobs = detached_jobs()
    if job := _meant(name, [job for job in jobs if name or job.is_running]):
        return job
    if name is None and jobs:
        return jobs[0]
    for attached in running_jobs() if name else ():
        if name in (attached.name, str(attached.pid)):
            raise UserError(
                f"job {attached.title} was started without --detach: its output is where it was started."
            )
    called = "" if name is None else f" called {shown(name)}"
    there = f" There are: {listed([job.name for job in jobs])}." if jobs else ""
    raise UserError(f"no job{called} was started with mpiddp launch --detach.{there}")


def _meant(name: str | None, jobs: Sequence[_AnyJob]) -> _AnyJob | None:
    """The job with this name or pid, or without a name the only job; None if there is none."""
    matches = [job for job in jobs if name in (None, job.name, str(job.pid))]
    if len(matches) > 1:
        titles = listed([job.title for job in matches])
        raise UserError(f"several jobs run here: {titles}.", fix="name one of them by its number")
    return matches[0] if matches else None


def hosts_of(facts: Facts) -> list[str]:
    """The hosts of a job, in the order of their ranks."""
    return list(dict.fromkeys(str(rank["host"]) for rank in facts["ranks"]))


def sockets() -> list[Path]:
    """The sockets of all launchers of this user. Dead launchers may have left theirs."""
    return [
        folder / VIEWED_AT
        for path in viewed_folders()
        for folder, _ in private_folders(path.parent, path.name)
    ]


def _connected(path: Path) -> tuple[socket.socket, int] | None:
    """A connection to the launcher that listens there, and its pid; None if there is none.

    The folder belongs to this user alone, so no stranger listens there. That of a dead launcher is removed.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(str(path))
        ucred = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return connection, struct.unpack("3i", ucred)[0]  # linux/socket.h
    except ConnectionRefusedError:
        shutil.rmtree(path.parent, ignore_errors=True)
    except OSError:  # the launcher has just ended, or too many viewers wait
        pass
    connection.close()
    return None


def _ask(connection: socket.socket, view: str) -> None:
    with contextlib.suppress(OSError):  # then `_answer` fails, too
        connection.sendall(encode(view))


def _answer(connection: socket.socket, within_s: float) -> dict[str, Any]:
    """The launcher's answer, {} if none arrives in time. The connection is closed."""
    with connection, contextlib.suppress(OSError, ValueError):
        connection.settimeout(within_s)
        with connection.makefile("rb") as lines:
            lines.readline()  # a challenge, which is for ranks
            facts: dict[str, Any] = json.loads(lines.readline())
            return facts
    return {}
