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
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, TextIO

from mpiddp.launch.exchange import messages_over

_LAST_S = 0.5  # for the last lines, once the launcher has ended: another process may have its pipes


@dataclass
class Report:
    """What the launcher has sent: answers by rank, as pickles, and the outcome, None if it was killed.

    They are the results of all ranks, or the error of the one that has failed first.
    """

    answers: dict[int, bytes] = field(default_factory=dict)
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
    streams = {1: sys.stdout, 2: sys.stderr}
    for stream in streams.values():
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # If anything fails here, the launcher finds its socket closed, and stops the job.
    with ours:
        with theirs:
            launcher = subprocess.Popen(
                [sys.executable, "-m", "mpiddp", "launch-function", str(theirs.fileno())],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=None if _is_own(streams[1], 1) else subprocess.PIPE,
                stderr=None if _is_own(streams[2], 2) else subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C reaches it once, from here
            )
        with _forwarded_interrupts(launcher, report):
            pairs = zip((launcher.stdout, launcher.stderr), streams.values(), strict=True)
            copies = [
                threading.Thread(target=_copy, args=pair, daemon=True) for pair in pairs if pair[0]
            ]
            for copy in copies:
                copy.start()
            with suppress(OSError):  # it has ended, and its last line says why
                ours.sendall(call)
                for facts, body in messages_over(ours):
                    if facts["type"] == "outcome":
                        report.outcome = facts
                        break
                    report.answers[facts["rank"]] = b64decode(body)
            report.exit_code = launcher.wait()
            for copy in copies:
                copy.join(_LAST_S)
    return report


def _is_own(stream: TextIO | None, number: int) -> bool:
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


def _copy(pipe: IO[bytes], stream: Any) -> None:
    """Copy what the launcher prints until it ends."""
    # With newline="", a progress bar keeps its carriage returns.
    with io.TextIOWrapper(pipe, "utf-8", "backslashreplace", newline="") as lines:
        for line in lines:
            # Its reader went away: the output is lost.
            with suppress(OSError, ValueError, AttributeError):
                encoding = getattr(stream, "encoding", None) or "utf-8"
                stream.write(line.encode(encoding, "backslashreplace").decode(encoding))
                stream.flush()
