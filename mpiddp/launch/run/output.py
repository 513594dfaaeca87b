"""Copy the output of the ranks, of mpirun and of the launcher itself to this process's stdout and stderr.

Each stream of a rank that is shown has a connection from the rank's agent (`runtime.streams`). The text of
MPI and ssh comes through mpirun's own pipes, which this process reads until the end: mpirun aborts if the
reader of its output goes away, as `tee` does at the Ctrl-C of `… 2>&1 | tee log`.

The event loop copies, and never waits for a reader. As long as a reader has not taken all text, no stream is
read. So a slow reader slows the ranks, loses nothing, and needs little memory here.

A thread sends stdin to rank 0, over a connection of its own. mpirun gets no stdin: Open MPI 5 never passes
its end on, Open MPI forgets it once a rank's stdout and stderr have ended, and Slurm gives it to every rank.
"""

from __future__ import annotations

import os
import re
import select
import selectors
import socket
import termios
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from mpiddp.errors import aid
from mpiddp.launch import log
from mpiddp.launch.judge.events import MPIRUN, MPIRUN_AT_END
from mpiddp.launch.log import Screen, Source
from mpiddp.launch.plan.options import LaunchOptions
from mpiddp.launch.run.log_folder import LogFolder
from mpiddp.protocol.channel import STREAMS, is_shown
from mpiddp.protocol.group import TimedSelector
from mpiddp.protocol.terminal import Manners, prefix_of

_CHUNK = 1 << 16  # bytes, the size of a pipe
_MOST_HELD = 1 << 16  # bytes that wait for the verdict
_LATEST, _TAIL = 256, 1 << 14  # bytes that are kept of the last output of each rank
_CTRL_D = b"\x04"
# Open MPI prints this if an ssh that it has started sets its own process group first.
_HARMLESS = re.compile(rb"\[[^]\n]*\] plm:[rs]sh: Warning: setpgid\([^\n]*\n")
OUTPUT_S = 5.0  # without new output, until the launcher stops waiting for the end of a stream
_BACKGROUND_S = 0.5  # until the next look whether this process owns its terminal again


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr, so that no other file gets its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@dataclass(eq=False, kw_only=True)
class _Stream(Source):
    """A stream of a rank, or of mpirun: MPIRUN, or MPIRUN_AT_END, whose text is kept for the verdict."""

    file: socket.socket | IO[bytes]
    number: int
    kept: bytes = b""


class JobOutput:
    """The job's stdout and stderr. It copies the streams of mpirun from the beginning.

    If `selector` reports this object, `copy` is to be called. With `has_prefix`, each line of a rank begins
    with the rank and its host.
    """

    def __init__(
        self,
        options: LaunchOptions,
        world_size: int,
        selector: TimedSelector,
        streams: Sequence[IO[bytes]],
        logs: LogFolder | None = None,
        *,
        has_prefix: bool = False,
    ) -> None:
        self._options, self._has_prefix, self._logs = options, has_prefix, logs
        is_one = os.path.samestat(os.fstat(1), os.fstat(2))  # the same file, or terminal
        shown = {
            number: sum(is_shown(options.log_ranks, rank, number) for rank in range(world_size))
            for number in (1, 2)
        }
        if is_one:
            shown[1] = max(shown.values())
        stdout, stderr = (
            Screen(
                number, STREAMS[number], is_shared=shown[number] > 1, has_stamps=options.timestamps
            )
            for number in (1, 2)
        )
        self._screens = {1: stdout, 2: stdout if is_one else stderr}
        # The status has room only where stdout and stderr are the same terminal.
        self.shows_status = is_one and stdout.is_terminal and not log.is_quiet
        self._of_mpirun: list[_Stream] = []
        self._streams: dict[int, _Stream] = {}  # the streams that have not ended, by file
        self._subjects: set[str] = set()  # of the launcher's sentences so far
        self.latest: dict[int, bytes] = {}  # the end of the output of each rank
        self._tails: dict[int, bytes] = {}  # the end of its stderr
        self._copied_at = time.monotonic()  # the time of the latest copy
        self._blocked: set[Screen] = set()  # the screens whose readers have not taken all text
        self.blocked_since: float | None = None  # by time.monotonic()
        self._input: socket.socket | None = None  # leads to rank 0, and another thread writes it
        self.has_input = False  # whether rank 0 has got bytes of a file or a pipe
        self._manners = Manners.of(0) if os.isatty(0) else None  # of the launcher's own terminal
        self._selector = selector
        self._readable = select.epoll()  # all streams; the selector sees them as one file
        selector.register(self._readable, selectors.EVENT_READ, self)
        for number, file in enumerate(streams, 1):
            os.set_blocking(file.fileno(), False)
            self._of_mpirun.append(_Stream(rank=MPIRUN, file=file, number=number))
            self._register(self._of_mpirun[-1])

    def add(self, stream: int, rank: int, host: str, connection: socket.socket) -> None:
        """Show a stream of a rank, which comes through this connection."""
        connection.setblocking(False)
        text = prefix_of(rank, host) if self._has_prefix else ""
        prefix = text.encode(errors="backslashreplace")
        self._register(_Stream(rank=rank, prefix=prefix, file=connection, number=stream))

    def send_stdin(self, connection: socket.socket) -> None:
        """Send stdin to rank 0, which reads this connection. Later attempts get what is left of it."""
        if self._options.stdin != "none":
            with aid("stdin for rank 0"):  # this user may get no more threads
                threading.Thread(target=self._send_stdin, args=(connection,), daemon=True).start()
                self._input = connection
                return
        connection.close()

    def _send_stdin(self, connection: socket.socket) -> None:
        poll, is_terminal = select.poll(), os.isatty(0)
        poll.register(connection, select.POLLIN)
        poll.register(0, select.POLLIN)
        with connection, suppress(OSError):  # the rank has ended, or the terminal is gone
            connection.setblocking(True)
            while connection.fileno() not in dict(poll.poll()):
                if _is_in_background():
                    time.sleep(_BACKGROUND_S)
                elif chunk := os.read(0, _CHUNK):
                    self.has_input |= not is_terminal
                    connection.sendall(chunk)
                elif is_terminal:  # Ctrl-D ends one input, and another may follow
                    connection.sendall(_CTRL_D)
                else:
                    return

    def follow(self, manners: Manners | None) -> None:
        """Set the terminal of stdin as rank 0's script has set its own, for example to ask for a password."""
        # The kernel would stop a process in the background that sets its terminal.
        if self._manners and manners and not _is_in_background():
            with suppress(OSError, termios.error):  # the terminal is gone
                manners.set(0)

    def _register(self, stream: _Stream) -> None:
        self._streams[stream.file.fileno()] = stream
        self._readable.register(stream.file, select.EPOLLIN)

    def log(self, sentence: str, about: str = "", *, is_error: bool = False) -> None:
        """Print a sentence of the launcher on stderr, unless it has printed one about the same subject."""
        subject = about or sentence
        if subject not in self._subjects and (is_error or not log.is_quiet):
            self._subjects.add(subject)
            self._screens[2].show_lines(log.line(sentence))
            self._wait_for_readers()

    def show_status(self, lines: Sequence[str]) -> None:
        self._screens[2].show_status(lines)
        self._wait_for_readers()

    def keep_mpirun(self) -> None:
        """Keep mpirun's text for the verdict, because all ranks have joined, or the job ends."""
        for stream in self._of_mpirun:
            stream.rank = MPIRUN_AT_END
        self.show_status([])

    def begin_again(self) -> None:
        """Begin another attempt: it may repeat sentences, and earlier output does not explain its end."""
        self.follow(self._manners)  # a killed script may have switched the echo off
        self._subjects.clear()
        self.latest.clear()
        self._tails.clear()

    @property
    def last_errors(self) -> dict[int, list[str]]:
        """The last lines on stderr of each rank, MPIRUN and MPIRUN_AT_END."""
        tails = self._tails.items()
        return {rank: text.decode("utf-8", "replace").splitlines() for rank, text in tails}

    @property
    def open_ranks(self) -> list[int]:
        """The ranks with a stream that has not ended."""
        return sorted({stream.rank for stream in self._streams.values() if stream.rank >= 0})

    @property
    def copied_at(self) -> float:
        """The time of the latest copy, by time.monotonic(); now, while a slow reader delays the next copy."""
        return time.monotonic() if self._blocked else self._copied_at

    @property
    def lost_stream(self) -> str:
        """The name of a stream that could not be written, "" if both could."""
        return next((screen.name for screen in self._screens.values() if screen.has_failed), "")

    # --- copying ---

    def copy(self) -> None:
        """Write as much as the readers take now. If they take all, read the streams."""
        for screen in self._blocked:
            screen.flush()
        self._wait_for_readers()
        for file, _ in () if self._blocked else self._readable.poll(0):
            if not self._take(self._streams[file]):
                self._end(file)
            self._copied_at = time.monotonic()
            if any(screen.is_blocked for screen in self._screens.values()):
                break
        self._wait_for_readers()

    def show_growth(self) -> None:
        """Show how open lines grow. Called once a second."""
        for screen in () if self._blocked else self._screens.values():
            screen.show_growth()
        self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Let the selector report readers that take more text. It reports streams once all text is taken."""
        before, screens = self._blocked, self._screens.values()
        self._blocked = {screen for screen in screens if screen.is_blocked}
        if self._blocked and not before:
            self.blocked_since = time.monotonic()
            self._selector.unregister(self._readable)
        if before and not self._blocked:
            self.blocked_since = None
            self._selector.register(self._readable, selectors.EVENT_READ, self)
        for screen in self._blocked - before:
            self._selector.register(screen.file, selectors.EVENT_WRITE, self)
        for screen in before - self._blocked:
            self._selector.unregister(screen.file)

    def _take(self, stream: _Stream, *, is_last: bool = False) -> bool:
        """Read a stream, show the text, and keep the last bytes. Returns False at the end of the stream."""
        try:
            chunk = os.read(stream.file.fileno(), _CHUNK)
        except BlockingIOError:
            return not is_last
        except OSError:  # the host is lost
            return False
        if not chunk:
            return False
        rank = stream.rank
        if rank < 0:
            # Open MPI ends some messages with a zero byte, and grep would take the text for binary.
            chunk = _HARMLESS.sub(b"", chunk.replace(b"\0", b""))
        if self._logs is not None and (rank < 0 or stream.number == 2):
            self._logs.add("mpirun.log" if rank < 0 else f"rank_{rank:05d}.err", chunk)
        self.latest[rank] = (self.latest.get(rank, b"") + chunk)[-_LATEST:]
        if stream.number == 2:
            self._tails[rank] = (self._tails.get(rank, b"") + chunk)[-_TAIL:]
        if rank == MPIRUN_AT_END:
            chunk, stream.kept = stream.kept + chunk, b""
            if len(chunk) <= _MOST_HELD:
                stream.kept = chunk
                return True
        self._screens[stream.number].show(stream, chunk)
        return True

    def _end(self, file: int) -> None:
        stream = self._streams.pop(file)
        self._readable.unregister(file)
        stream.file.close()
        self._screens[stream.number].end(stream)

    # --- the end ---

    def give_up(self) -> None:
        """End the streams of the ranks, so that their agents end, although nobody reads the output."""
        for file in [file for file, stream in self._streams.items() if stream.rank >= 0]:
            self._end(file)

    def end_streams(self) -> None:
        """Read the rest of mpirun's text, and end all streams."""
        for file, stream in list(self._streams.items()):
            while stream.rank < 0 and self._take(stream, is_last=True):
                pass
            self._end(file)
        self._wait_for_readers()
        if self._input is not None:
            with suppress(OSError):  # the rank has ended
                self._input.shutdown(socket.SHUT_RDWR)
        self.follow(self._manners)

    def settle(self, *, is_said: bool) -> None:
        """Show the text that mpirun printed at the end, unless the verdict says the same (`is_said`)."""
        log_dir = self._options.log_dir
        if frames := sum(screen.left_out for screen in set(self._screens.values())):
            where = "They are in" if log_dir else "To keep them: --log-dir"
            self.log(f"{frames} lines of C++ were not shown. {where} {log_dir or 'DIR'}")
        for stream in () if is_said and not self._options.verbose else self._of_mpirun:
            if stream.kept.strip():
                self._screens[stream.number].show(stream, stream.kept)
        for screen in set(self._screens.values()):
            screen.close()
        self._readable.close()


def _is_in_background() -> bool:
    """Whether a shell runs this process by `&`. The kernel stops such a process if it reads its terminal."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # no terminal
        return False
