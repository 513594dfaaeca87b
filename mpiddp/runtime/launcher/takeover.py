"""Take a rank's output over from an output process that was killed, as by the kernel for lack of memory.

The rank keeps the reading ends of its stdout and stderr, so no write fails, neither its own nor a child's.
When the output process is gone, a thread puts the rank's files in the place of both streams, or else those
of the MPI, and empties what its children still write into.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpiddp.text import escaped

_CHUNK = 1 << 16  # bytes, the size of a pipe


@dataclass(frozen=True)
class Stream:
    """One stream of this rank, which an output process reads.

    Args:
        number: 1 or 2, the rank's own file descriptor.
        reader: the reading end.
        mpi: the stream that the MPI gave the rank.
        is_shown: whether the launcher shows it.
    """

    number: int
    reader: int
    mpi: int
    is_shown: bool


class Takeover:
    """Write to files, to the MPI, or nowhere, once the output process is gone.

    Args:
        rank: this rank and its host.
        process: the connection to the output process.
    """

    def __init__(self, rank: str, process: socket.socket, streams: Iterable[Stream]) -> None:
        self._rank = rank
        self._process = process
        self._streams = tuple(streams)
        # A script may close these (`os.closerange`) and get other files by their numbers.
        self._identities = {
            file: _identity(file)
            for stream in self._streams
            for file in (stream.number, stream.reader, stream.mpi)
        }
        self._lock = threading.Lock()
        self._paths: Mapping[int, Path] = {}
        self._targets: dict[int, int] = {}  # by stream; none while there is an output process
        # A fork that outlives the rank would hide its end from the MPI, and keep full pipes open.
        os.register_at_fork(after_in_child=self._close)
        atexit.register(self._drain)
        threading.Thread(target=self._watch, name="mpiddp-takeover", daemon=True).start()

    def log_to(self, paths: Mapping[int, Path]) -> None:
        """Name the files, by stream."""
        with self._lock:
            self._paths = paths
            if self._targets:
                self._replace()

    def _watch(self) -> None:
        _wait_for([self._process.fileno()], 0)
        # An output process ends by itself when nobody can write any more.
        if not (streams := [each for each in self._streams if self._has_writer(each)]):
            return
        with self._lock:
            self._replace()
            self._say()
        while streams:
            _wait_for([each.reader for each in streams], select.POLLIN)
            with self._lock:
                streams = [each for each in streams if self._copy(each)]

    def _has_writer(self, stream: Stream) -> bool:
        return self._is_ours(stream.reader) and not _wait_for([stream.reader], 0, timeout_ms=0)

    def _replace(self) -> None:
        """Put the targets in the place of the streams, behind what was written before."""
        for stream in self._streams:
            earlier, target = self._targets.get(stream.number), self._open_target(stream)
            self._targets[stream.number] = target
            self._copy(stream)
            if self._is_ours(stream.number):
                os.dup2(target, stream.number)
                self._identities[stream.number] = _identity(stream.number)
            if earlier is not None:
                os.close(earlier)

    def _open_target(self, stream: Stream) -> int:
        if path := self._paths.get(stream.number):
            with contextlib.suppress(OSError):
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if stream.is_shown and self._is_ours(stream.mpi):
            return os.dup(stream.mpi)
        return os.open(os.devnull, os.O_WRONLY)

    def _say(self) -> None:
        names = " and ".join(escaped(str(path)) for path in self._paths.values())
        where = f"goes to {names} alone" if names else "comes through the MPI where it is shown"
        sentence = (
            f"mpiddp: {self._rank}: its output process was killed, as by the kernel for lack of memory. "
            f"Lines may be missing. The rank continues; its further output {where}.\n"
        )
        stderr = self._streams[-1].mpi
        if self._is_ours(stderr):
            with contextlib.suppress(OSError):
                os.write(stderr, sentence.encode(errors="backslashreplace"))

    def _drain(self) -> None:
        """Copy what is left, at the end of the rank."""
        with self._lock:
            for stream in self._streams if self._targets else ():
                self._copy(stream)

    def _copy(self, stream: Stream) -> bool:
        """Copy what waits in a stream. Whether more may come."""
        from mpiddp.runtime.launcher.output_stream import write_all  # few ranks need it

        try:
            while self._is_ours(stream.reader) and (chunk := os.read(stream.reader, _CHUNK)):
                write_all(self._targets[stream.number], chunk)
        except BlockingIOError:
            return True
        except OSError:  # the end of a terminal
            pass
        return False

    def _is_ours(self, file: int) -> bool:
        try:
            return _identity(file) == self._identities[file]
        except OSError:
            return False

    def _close(self) -> None:
        """Leave all to the rank, in a process that was forked from it."""
        self._lock, self._targets = threading.Lock(), {}  # the thread may have held it
        for stream in self._streams:
            for file in (stream.reader, stream.mpi):
                if self._is_ours(file):
                    os.close(file)


def _wait_for(files: Iterable[int], events: int, timeout_ms: int | None = None) -> bool:
    """Wait until one of the files has one of the events of poll(2), or has lost its other end."""
    poll = select.poll()
    for file in files:
        poll.register(file, events)
    return bool(poll.poll(timeout_ms))


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino
