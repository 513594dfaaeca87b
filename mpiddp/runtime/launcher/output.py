"""Replace this rank's stdout and stderr by pipes, which a small process of its own reads until their end.

`mpiddp.runtime.launcher.output_process` is that process. It is not a thread, because native code may hold
Python's lock, and what a rank has written must outlive its crash. It is forked before the rank loads torch,
so it stays small, and it starts in a millisecond.

The rank keeps the reading ends of its stdout and stderr, so no write fails, neither its own nor a child's.
When the output process was killed, as by the kernel for lack of memory, a thread puts the rank's files in the
place of both streams, or else those of the MPI, and empties what its children still write into.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import os
import select
import socket
import sys
import termios
import threading
import tty
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpiddp.errors import JobFailed
from mpiddp.paths import named_by
from mpiddp.protocol.messages import DRAIN, DRAINED, FILES, GO, INPUT, STREAMS, is_shown
from mpiddp.protocol.variables import LOG_DIR, OUTPUT, is_restart
from mpiddp.runtime.job.channel import identity
from mpiddp.runtime.job.connect import Server, connect_to_launcher
from mpiddp.text import escaped
from mpiddp.world import World

DRAIN_TIMEOUT_S = 10.0
SUFFIXES = {1: "out", 2: "err"}
_CHUNK = 1 << 16  # bytes, the size of a pipe


@dataclass(frozen=True)
class RankOutput:
    """The rank's end of its output process. `log_dir` is the user's folder, None if none is named."""

    rank: int
    log_dir: Path | None
    process: socket.socket
    takeover: Takeover

    def log_to(self, folder: Path) -> Path:
        """Write all output, from the rank's first line on, to files in `folder`.

        The files are opened here, because the rank can report an error. They grow at a restart.

        Returns:
            The path of stderr's file.

        Raises:
            OSError: a file cannot be opened.
        """
        folder.mkdir(parents=True, exist_ok=True)
        paths = {each: folder / f"rank_{self.rank:05d}.{SUFFIXES[each]}" for each in STREAMS}
        files = []
        try:
            for path in paths.values():
                files.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666))
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
            with contextlib.suppress(ConnectionError):  # the process was killed
                self.process.sendmsg([FILES], [rights])
        finally:
            for file in files:
                os.close(file)
        self.takeover.log_to(paths)
        return paths[2]

    def log_to_named_folder(self) -> Path | None:
        """`log_to` the folder of --log-dir, if there is one.

        Raises:
            UserError, JobFailed: it cannot be written.
        """
        if self.log_dir is None:
            return None
        with named_by("--log-dir", has_run=is_restart(os.environ)):
            return self.log_to(self.log_dir)

    def drain(self) -> None:
        """Wait until the launcher has all that was written so far.

        srun needs this at the end of a rank: Slurm kills what is left of a step once its tasks have ended.
        """
        with contextlib.suppress(OSError):  # the process was killed
            self.process.settimeout(DRAIN_TIMEOUT_S)
            self.process.send(DRAIN)
            self.process.recv(len(DRAINED))


def redirect_output(world: World, server: Server) -> RankOutput | None:
    """Give stdout and stderr to an output process, if `mpiddp launch` has requested it.

    Call this before any thread starts. Programs that the rank starts inherit the new streams.

    Raises:
        JobFailed: this host can start no process, or open no file.
    """
    selection, log_dir = os.environ.pop(OUTPUT, ""), os.environ.pop(LOG_DIR, "")
    if not selection:
        return None
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if it was closed
            stream.flush()
    rank = f"rank {world.rank} on {world.hostname}"
    try:
        process, streams = _start_process(world, server, selection)
    except OSError as error:
        raise JobFailed(f"{rank} cannot start its output process: {error.strerror}.") from None
    folder = Path(log_dir).absolute() if log_dir else None
    return RankOutput(world.rank, folder, process, Takeover(rank, process, streams))


def take_stdin(world: World, server: Server) -> None:
    """Give rank 0 the launcher's stdin, and every other rank an empty one.

    No MPI passes it on well, see `mpiddp.launch.streams.input`.

    Raises:
        JobFailed: the launcher cannot be reached.
    """
    if world.rank == 0:
        connection, _ = connect_to_launcher(server, world, INPUT)
        with contextlib.suppress(OSError):  # the launcher is ending, so stdin is at its end
            connection.sendall(GO)  # what follows is no message
        file = connection.detach()
    else:
        file = os.open(os.devnull, os.O_RDONLY)
    if file != 0:  # as it is if stdin was closed
        os.dup2(file, 0)
        os.close(file)


def _start_process(
    world: World, server: Server, selection: str
) -> tuple[socket.socket, list[Stream]]:
    readers, writers = {}, {}
    for number in STREAMS:
        readers[number], writers[number] = _new_stream(number)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank = _open_this_process()
    child = os.fork()
    if child == 0:
        # A grandchild: a script that waits for all of its children must not wait for this one.
        try:
            if os.fork() == 0:
                from mpiddp.runtime.launcher.output_process import run  # the rank needs none of it

                run(world, server, selection, readers, theirs, rank)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    streams = []
    for number in STREAMS:
        is_seen = is_shown(selection, world.rank, number)
        streams.append(Stream(number, readers[number], os.dup(number), is_seen))
        os.dup2(writers[number], number)
        os.close(writers[number])
    theirs.close()
    if rank is not None:
        os.close(rank)
    return ours, streams


def _new_stream(number: int) -> tuple[int, int]:
    """The two ends of a new stream. stdout stays a terminal if it is one, since Python buffers a pipe."""
    if number == 1 and os.isatty(number):
        with contextlib.suppress(OSError, termios.error):  # a container without /dev/pts
            return _new_terminal(like=number)
    return os.pipe()


def _new_terminal(like: int) -> tuple[int, int]:
    """A raw terminal, which passes all bytes on unchanged."""
    reader, writer = os.openpty()
    tty.setraw(writer)
    size = fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8))
    fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
    return reader, writer


def _open_this_process() -> int | None:
    """A file descriptor that is readable when this process has ended, None if the system has none."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # Linux before 5.3, a container that forbids it
        return None


class Stream(NamedTuple):
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
            file: identity(file)
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
                self._identities[stream.number] = identity(stream.number)
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
        found = identity(file)
        return found is not None and found == self._identities[file]

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
