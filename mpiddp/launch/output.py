"""Copy what the ranks, mpirun and the launcher itself write to this process's stdout and stderr.

Each stream that is shown of a rank has a connection from the rank's agent (`mpiddp.runtime.output`). What MPI
and ssh print comes through mpirun's own pipes, which this process reads until the end: mpirun aborts when the
reader of its output goes away, as `tee` does at the Ctrl-C of `… 2>&1 | tee log`.

One thread reads all of it and writes everything, the launcher's own sentences too. So a slow reader slows the
ranks, and never the event loop, which has to stop the job in time.

Another thread sends stdin to rank 0, over a connection of its own, to its end. mpirun gets none of it: Open
MPI 5 never passes its end on, Open MPI forgets it once a rank's own stdout and stderr have ended, and Slurm
gives it to every rank.
"""

from __future__ import annotations

import os
import select
import socket
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from mpiddp.launch import log
from mpiddp.launch.log import GROWTH_S, Screen, Source
from mpiddp.launch.ranks import MPIRUN, MPIRUN_AT_END
from mpiddp.protocol.channel import STREAMS, notice_silence
from mpiddp.protocol.terminal import Manners, prefix_of

_CHUNK = 1 << 16  # bytes, the size of a pipe
_TAIL = 1 << 16  # bytes that are kept of stderr of all ranks, and of what waits for the verdict
_LATEST = 256  # bytes that are kept of what each rank has written last
_CTRL_D = b"\x04"
_BACKGROUND_S = 0.5  # until the next question whose the terminal is


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr: another file would get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@dataclass(eq=False, kw_only=True)
class _Stream(Source):
    """A stream of a rank, or what mpirun itself writes: MPIRUN, or MPIRUN_AT_END, which is held."""

    file: socket.socket | IO[bytes]
    number: int
    held: bytes = b""


class JobOutput:
    """The job's stdout and stderr, and the thread that copies them: at first `streams`, which are mpirun's.

    has_prefix: each of their lines begins with the rank and its host. shows_end: also show what mpirun says
    of the end of the job.
    """

    def __init__(
        self,
        world_size: int,
        *streams: IO[bytes],
        has_prefix: bool = False,
        has_stamps: bool = False,
        shows_end: bool = False,
    ) -> None:
        self._has_prefix, self._shows_end = has_prefix, shows_end
        kind = {"is_shared": world_size > 1, "has_stamps": has_stamps}
        stdout, stderr = (Screen(each, STREAMS[each], **kind) for each in (1, 2))
        is_one = os.path.samestat(os.fstat(1), os.fstat(2))  # they lead to one place
        self._screens = {1: stdout, 2: stdout if is_one else stderr}
        # One terminal has room for a status.
        self.shows_status = is_one and stdout.is_terminal and not log.is_quiet
        self._of_mpirun: list[_Stream] = []
        self._streams: dict[int, _Stream] = {}  # that have not ended, by file
        self._said: dict[str, str] = {}  # the sentences of the launcher, by what they are about
        self._to_show: deque[Callable[[], None]] = deque()  # of the launcher itself, for the thread
        self.latest: dict[int, bytes] = {}  # the end of what each rank has printed last
        self._tail: deque[tuple[int, bytes]] = deque()  # of stderr
        self._tail_size = 0
        self._is_ending = False
        self._copied_at = time.monotonic()  # the latest
        self._busy_since: float | None = None  # since when the thread has been in one turn
        self._input: socket.socket | None = None  # of rank 0, which another thread writes
        self._manners = Manners.of(0) if os.isatty(0) else None  # of the launcher's own terminal
        self._poll, self._wake = select.epoll(), os.eventfd(0)
        self._poll.register(self._wake, select.EPOLLIN)
        for number, file in enumerate(streams, 1):
            os.set_blocking(file.fileno(), False)
            self._of_mpirun.append(_Stream(rank=MPIRUN, file=file, number=number))
            self._register(self._of_mpirun[-1])
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def add(self, stream: int, rank: int, host: str, connection: socket.socket) -> None:
        """Show a stream of a rank, which comes through this connection."""
        if self._is_ending:  # its rank was given up
            connection.close()
            return
        connection.setblocking(False)
        text = prefix_of(rank, host) if self._has_prefix else ""
        prefix = text.encode(errors="backslashreplace")
        self._register(_Stream(rank=rank, prefix=prefix, file=connection, number=stream))

    def send_stdin(self, connection: socket.socket) -> None:
        """Send stdin to rank 0, which reads this connection. A later attempt goes on where this one stops."""
        self._input = connection
        threading.Thread(target=_send_stdin, args=(connection,), daemon=True).start()

    def follow(self, manners: Manners) -> None:
        """Let the terminal of stdin behave as rank 0's script has set its own, for a password for example."""
        # In the background, the kernel would stop this process.
        if self._manners is not None and not _is_in_background():
            with suppress(OSError, termios.error):  # it is gone
                manners.set(0)

    def _register(self, stream: _Stream) -> None:
        self._streams[stream.file.fileno()] = stream
        self._poll.register(stream.file, select.EPOLLIN)

    def log(self, sentence: str, about: str = "", *, is_error: bool = False) -> None:
        """Print a sentence of the launcher on stderr, one of each text, or of what it is `about`."""
        is_new = (about or sentence) not in self._said
        if is_new and (is_error or not log.is_quiet):
            self._said[about or sentence] = sentence
            self._show(partial(self._screens[2].show_lines, log.line(sentence)))

    def show_status(self, lines: Sequence[str]) -> None:
        """Show these lines below all others there."""
        self._show(partial(self._screens[2].show_status, lines))

    def _show(self, action: Callable[[], None]) -> None:
        self._to_show.append(action)
        os.eventfd_write(self._wake, 1)

    def hold_mpirun(self) -> None:
        """All ranks have joined, or the job ends: what mpirun prints from now on waits for the verdict."""
        for stream in self._of_mpirun:
            stream.rank = MPIRUN_AT_END
        self.show_status([])

    @property
    def last_errors(self) -> dict[int, list[str]]:
        """The last lines on stderr of each rank, MPIRUN and MPIRUN_AT_END, once all is finished."""
        texts: dict[int, bytes] = {}
        for rank, text in self._tail:
            texts[rank] = texts.get(rank, b"") + text
        return {rank: text.decode("utf-8", "replace").splitlines() for rank, text in texts.items()}

    def _of_ranks(self) -> list[_Stream]:
        return [each for each in list(self._streams.values()) if each.rank >= 0]

    @property
    def open_ranks(self) -> list[int]:
        """The ranks with a stream that has not ended."""
        return sorted({each.rank for each in self._of_ranks()})

    @property
    def blocked_s(self) -> float:
        """For how long the thread has been in one turn, as while nobody reads what it writes, in seconds."""
        since = self._busy_since if self._thread.is_alive() else None
        return 0.0 if since is None else time.monotonic() - since

    @property
    def copied_at(self) -> float:
        """When something was copied last, by time.monotonic(): now, while a reader delays it."""
        return time.monotonic() if self.blocked_s else self._copied_at

    def give_up(self) -> None:
        """Read no more of the ranks, whose agents then end: nobody reads what is shown."""
        for each in self._of_ranks():
            with suppress(OSError):  # it has ended
                assert isinstance(each.file, socket.socket)
                each.file.shutdown(socket.SHUT_RDWR)

    def finish(self, within_s: float) -> bool:
        """End after what mpirun's pipes still hold. Whether it has: a terminal that is stopped delays it."""
        self._is_ending = True
        os.eventfd_write(self._wake, 1)
        if self._input is not None:
            with suppress(OSError):  # it has ended
                self._input.shutdown(socket.SHUT_RDWR)
        if self._manners is not None:
            self.follow(self._manners)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def settle(self, *, is_said: bool, log_dir: str | None = None) -> None:
        """Show what mpirun has said at the end; if the verdict says it, write it to `log_dir` instead."""
        left_out = b""
        for stream in self._of_mpirun:
            if is_said and not self._shows_end:
                left_out += stream.held
            elif stream.held.strip():
                self._screens[stream.number].show(stream, stream.held)
        for screen in set(self._screens.values()):
            screen.close()
        self._poll.close()
        os.close(self._wake)
        if left_out and log_dir is not None:
            path = Path(log_dir, "mpirun.log")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(left_out)
            except OSError as error:
                log.error(f"--log-dir: {path} cannot be written: {error.strerror}.")

    # --- the thread ---

    def _copy(self) -> None:
        while not self._is_ending:
            self._busy_since = None
            screens = set(self._screens.values())
            ready = self._poll.poll(GROWTH_S if any(each.grows for each in screens) else None)
            self._busy_since = time.monotonic()
            for file, _ in ready:
                if file == self._wake:
                    os.eventfd_read(file)
                    continue
                if not self._take(self._streams[file]):
                    self._end(file)
                self._copied_at = time.monotonic()
            self._show_own()
            for screen in screens:
                screen.show_growth()
        for file, stream in list(self._streams.items()):
            while stream.rank < 0 and self._take(stream, is_last=True):
                pass
            self._end(file)
        self._show_own()

    def _show_own(self) -> None:
        while self._to_show:
            self._to_show.popleft()()

    def _take(self, stream: _Stream, *, is_last: bool = False) -> bool:
        """Take what a stream has brought, and keep the end of that. False at its end."""
        try:
            chunk = os.read(stream.file.fileno(), _CHUNK)
        except BlockingIOError:
            return not is_last
        except OSError:  # the host is gone
            return False
        if not chunk:
            return False
        rank = stream.rank  # of mpirun's, the other thread may change it
        self.latest[rank] = (self.latest.get(rank, b"") + chunk)[-_LATEST:]
        if stream.number == 2:
            self._tail.append((rank, chunk))
            self._tail_size += len(chunk)
            while self._tail_size > _TAIL:
                self._tail_size -= len(self._tail.popleft()[1])
        if rank == MPIRUN_AT_END:
            chunk, stream.held = stream.held + chunk, b""
            if len(chunk) <= _TAIL:
                stream.held = chunk
                return True
        self._screens[stream.number].show(stream, chunk)
        return True

    def _end(self, file: int) -> None:
        stream = self._streams.pop(file)
        self._poll.unregister(file)
        stream.file.close()
        self._screens[stream.number].end(stream)


def _send_stdin(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(0, select.POLLIN)
    with connection, suppress(OSError):  # the rank has ended, or the terminal is gone
        connection.setblocking(True)
        notice_silence(connection, is_read_slowly=True)
        while connection.fileno() not in dict(poll.poll()):
            if _is_in_background():
                time.sleep(_BACKGROUND_S)
            elif chunk := os.read(0, _CHUNK):
                connection.sendall(chunk)
            elif os.isatty(0):  # Ctrl-D ends what is being read, and another input may follow
                connection.sendall(_CTRL_D)
            else:
                return


def _is_in_background() -> bool:
    """Whether a shell runs this process by `&`. A process that reads its terminal's input then is stopped."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # no terminal
        return False
