"""The jobs of `mpiddp launch --detach`: each has a folder that outlives it.

    ~/.local/state/mpiddp/jobs/train-1/    report.json: how it ended    log-1, log-2 …: its output    lock

The launcher holds the lock until it ends, even by a signal. So a viewer needs neither its pid nor its
terminal, and may run on another machine that shares the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from mpiddp.errors import UserError, cause_of, print_error
from mpiddp.files import locked_folder, read_limited
from mpiddp.hosts.private import private_folders
from mpiddp.protocol.channel import state_folder

LOG_LIMIT = 32 << 20  # bytes of a part of the log; the newest two parts are kept
KEPT = 20  # jobs that have ended and whose folders are kept
_LONGEST_REPORT = 64 << 20  # bytes
_CHECK_S = 1.0  # the size of the log is looked at so often
_NO_REPORT = "its launcher was killed, its machine stopped, or its disk is full"


@dataclass(frozen=True)
class DetachedJob:
    """A job that was started with --detach, whether it runs or has ended."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def title(self) -> str:
        return f"{self.pid or '-'} ({self.name})"

    @property
    def pid(self) -> int | None:
        """The pid of its launcher; None once it has ended, because another process may get the number."""
        return self.report().get("pid") if self.is_running else None

    @property
    def report_path(self) -> Path:
        return self.folder / "report.json"

    def report(self) -> dict[str, Any]:
        """The report that `mpiddp.launch.run.outcome_file` writes, {} if it cannot be read."""
        with suppress(OSError, ValueError):
            report = json.loads(read_limited(self.report_path, _LONGEST_REPORT, is_ours=True))
            return report if isinstance(report, dict) else {}
        return {}

    def wait(self) -> None:
        with (self.folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)

    @property
    def is_running(self) -> bool:
        with suppress(OSError), (self.folder / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @property
    def ending(self) -> str:
        """A sentence about how it ended."""
        report = self.report()
        code = report.get("exit_code")
        if code is None:
            why, host = _NO_REPORT, report.get("launched_on")
            if host not in (None, socket.gethostname()):
                why += f". If it runs on {host}, its lock is not seen here. Log in there"
            return f"job {self.name} has ended without a report: {why}."
        why = (
            f": {report['error']}"
            if report.get("error")
            else f": see mpiddp logs {self.name}"
            if code
            else "."
        )
        return f"job {self.name} has ended with code {code}{why}"

    def parts(self) -> list[tuple[int, Path]]:
        """The parts of its log, with their numbers, the oldest first."""
        names = [path.name for path in self.folder.glob("log-*")]
        return sorted((int(name[4:]), self.folder / name) for name in names if name[4:].isdigit())

    def open_part(self, number: int) -> int:
        """Begin this part of the log, and keep only one part before it. Returns its file descriptor."""
        (self.folder / f"log-{number - 2}").unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self.folder / f"log-{number}", flags, 0o600)


def detached_jobs() -> list[DetachedJob]:
    """All jobs whose folders are kept, the latest first."""
    begun = []
    for folder, _ in private_folders(state_folder() / "jobs", ""):
        with suppress(OSError):  # removed meanwhile
            begun.append(((folder / "lock").stat().st_mtime, DetachedJob(folder)))
    return [job for _, job in sorted(begun, key=lambda pair: pair[0], reverse=True)]


def waiting_jobs() -> list[tuple[DetachedJob, str]]:
    """The jobs of this machine whose start waits, each with what it waits for, the oldest first."""
    here = ("waiting", socket.gethostname())
    reports = [(job, job.report()) for job in reversed(detached_jobs()) if job.is_running]
    return [
        (job, str(r["error"]))
        for job, r in reports
        if (r.get("cause"), r.get("launched_on")) == here
    ]


def detach(beginning: str) -> tuple[DetachedJob, int | None]:
    """Fork a process for the job, which no terminal ends. Both processes return the job.

    The job's process also gets a pipe, to which it writes as soon as its mpirun has started. The parent waits
    for this. If the job is refused instead, the parent prints its log, and ends with its exit code.
    """
    job, lock = new_job(beginning)
    output = job.open_part(1)
    started, starts = os.pipe()
    if pid := os.fork():
        for file in (output, lock, starts):
            os.close(file)
        try:
            has_started = os.read(started, 1)
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGINT)
            has_started = b""
        if has_started:
            return job, None
        _, status = os.waitpid(pid, 0)
        text = b"".join(filter(None, read_log(job, follows=False)))
        sys.stderr.write(text.decode(errors="replace"))
        shutil.rmtree(job.folder)
        sys.exit(os.waitstatus_to_exitcode(status))
    # The lock stays open until this process ends.
    os.setsid()  # neither a terminal nor the end of a shell ends this process
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(file, standard)
    for file in (
        nothing,
        output,
    ):  # `started` stays open: the end of the terminal's process ends no job
        os.close(file)
    threading.Thread(target=_limit, args=(job,), daemon=True).start()
    return job, starts


def _limit(job: DetachedJob) -> None:
    """Begin another part of the log whenever the last one is large."""
    for number in count(2):
        while os.fstat(1).st_size <= LOG_LIMIT:
            time.sleep(_CHECK_S)
        try:
            output = job.open_part(number)
        except OSError as error:  # a full disk may have room again
            print_error(f"the log of {job.name} cannot go on in another file: {error.strerror}.")
            return
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)


def new_job(beginning: str) -> tuple[DetachedJob, int]:
    """A new job, called `beginning` and a number, and the file descriptor that holds its lock.

    The number is higher than all others, because a user may still use the name of a job that was removed.
    """
    here = (None, socket.gethostname())  # of a job elsewhere, this host may not see the lock
    ended = [
        job
        for job in detached_jobs()
        if not job.is_running and job.report().get("launched_on") in here
    ]
    for old in ended[KEPT:]:
        shutil.rmtree(old.folder, ignore_errors=True)
    from tempfile import TemporaryFile  # takes 10 ms

    parent = state_folder() / "jobs"
    if not parent.is_absolute():
        raise UserError(
            "--detach: this user has no home folder.", fix="set XDG_STATE_HOME to a folder"
        )
    try:
        ends = [path.name[len(beginning) + 1 :] for path in parent.glob(f"{beginning}-*")]
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=parent) as file:
            file.write(b"\n")  # fails on a full disk
        for number in count(1 + max((int(end) for end in ends if end.isdecimal()), default=0)):
            with suppress(FileExistsError):  # another job begins at the same time
                job = DetachedJob(parent / f"{beginning}-{number}")
                return job, locked_folder(job.folder, "lock")
    except OSError as error:
        why = f"cannot keep the job's output in {parent} ({error.strerror})"
        raise cause_of(error)(
            f"--detach: {why}.", fix="set XDG_STATE_HOME to another folder"
        ) from None
    raise AssertionError


def read_log(job: DetachedJob, *, follows: bool) -> Iterator[bytes | None]:
    """The log in pieces. With `follows`, None comes whenever nothing is new, until the job has ended."""
    latest, done = 0, 0  # the number of the part that was read last, and its bytes that were read
    while True:
        is_over = not (follows and job.is_running)
        for number, path in [part for part in job.parts() if part[0] >= latest]:
            with suppress(FileNotFoundError), path.open("rb") as file:  # removed meanwhile
                file.seek(done if number == latest else 0)
                latest = number
                while piece := file.read(1 << 16):
                    yield piece
                done = file.tell()
        if is_over:
            return
        yield None
