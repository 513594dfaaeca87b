"""The launcher of a function as a child process: what it prints, what it reports, and its end.

It is a process of its own, because a launcher handles signals, adopts orphans and writes to the file
descriptors 1 and 2, none of which belongs to a library. In a notebook sys.stdout is a stream of the cell.
"""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, TextIO

from mpiddp.launch.exchange import Answer, messages_over

_LAST_S = 0.5  # for the last lines, once the launcher has ended: another process may have its pipes


@dataclass
class Report:
    """What the launcher has sent: answers by rank, and the outcome, None if it was killed."""

    answers: dict[int, Answer] = field(default_factory=dict)
    outcome: dict[str, Any] | None = None
    exit_code: int = 0
    was_interrupted: bool = False


def run_launcher(call: bytes, cwd: str | None) -> Report:
    """Run a launcher with this call, see `mpiddp.launch.exchange`, and show what it prints.

    A SIGINT meanwhile goes to the launcher, which stops the job; a second one kills it. Nothing of the job is
    left when this returns.
    """
    report = Report()
    ours, theirs = socket.socketpair()
    # If anything fails here, the launcher finds its socket closed, and stops the job.
    with ours:
        with theirs:
            launcher = _start(theirs.fileno(), cwd)
        with _forwarded_interrupts(launcher, report):
            copies = _copy_output(launcher)
            with suppress(OSError):  # it has ended, and its last line says why
                ours.sendall(call)
                _receive(ours, report)
            report.exit_code = launcher.wait()
            for thread in copies:
                thread.join(_LAST_S)
    return report


def _start(descriptor: int, cwd: str | None) -> subprocess.Popen[bytes]:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    return subprocess.Popen(
        [sys.executable, "-m", "mpiddp", "launch-function", str(descriptor)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=None if _is_descriptor(sys.stdout, 1) else subprocess.PIPE,
        stderr=None if _is_descriptor(sys.stderr, 2) else subprocess.PIPE,
        pass_fds=[descriptor],
        start_new_session=True,  # a Ctrl-C reaches it once, from here
    )


def _is_descriptor(stream: TextIO | None, number: int) -> bool:
    """Whether a text stream writes to this file descriptor, so that the launcher can use it itself."""
    try:
        return stream is not None and stream.fileno() == number
    except (OSError, ValueError, AttributeError):  # that of a cell, of a test, of a closed file
        return False


@contextmanager
def _forwarded_interrupts(launcher: subprocess.Popen[bytes], report: Report) -> Iterator[None]:
    """Pass on a SIGINT instead of raising KeyboardInterrupt, which would leave the job alone."""

    def forward(number: int, frame: object) -> None:
        report.was_interrupted = True
        launcher.send_signal(signal.SIGINT)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield
        return
    before = signal.signal(signal.SIGINT, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _receive(connection: socket.socket, report: Report) -> None:
    for facts, body in messages_over(connection):
        if facts["type"] == "outcome":
            report.outcome = facts
            return
        report.answers[facts["rank"]] = Answer(facts["form"], facts["text"], body)


def _copy_output(launcher: subprocess.Popen[bytes]) -> list[threading.Thread]:
    """Copy what the launcher prints to sys.stdout and sys.stderr, in a thread for each, until it ends."""
    threads = []
    for pipe, stream in ((launcher.stdout, sys.stdout), (launcher.stderr, sys.stderr)):
        if pipe is not None:
            threads.append(threading.Thread(target=_copy, args=(pipe, stream), daemon=True))
            threads[-1].start()
    return threads


def _copy(pipe: IO[bytes], stream: TextIO | None) -> None:
    # With newline="", a progress bar keeps its carriage returns.
    with io.TextIOWrapper(pipe, "utf-8", "backslashreplace", newline="") as lines:
        for line in lines:
            try:
                if stream is not None:
                    _write(stream, line)
            except (OSError, ValueError):  # its reader went away: the output is lost, not the job
                stream = None


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError as error:
        stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
    stream.flush()
