"""The files that a script is writing, on a page of memory that it shares with its agent.

    script: a write begins → the page says so          agent: a signal comes → the page says so
            it writes the file                                it waits while a write is in flight
            a write ends → the page says so                   it sends the signal

Two messages for each write would cost a tenth of a small save. The page costs some microseconds and no system call,
and it is still there once the script has been killed.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mpiddp.runtime.job.progress import Progress

_SIZE = 4096
_SIGNAL_WAITS = 0  # a byte of the page
_RECORDS = {
    1: 64,
    2: 2112,
}  # the places of the last write that has ended, and of the newest one in flight, by turns
# The state of a write, when it began, the step, and its file's name.
_RECORD, _STATE = struct.Struct("=BdqH256s"), struct.Struct("=B")
_NONE, _IN_FLIGHT, _WHOLE = range(3)
_LONGEST_NAME = 256
_ENCODING = sys.getfilesystemencoding()
_SEEN_S = 1e-4  # a core sees in this time what another one has written
_PASSES_S, _POLL_S = 0.5, 0.001  # the agent sends a signal that waits in this time


class Write(NamedTuple):
    """A write of a file. `path` is "" if its file has no name."""

    path: str
    at: float  # when it began, in seconds of time.monotonic()
    step: int  # of the training, 0 if it is unknown


class Writes:
    """The script's end of the page: what this process is writing. A fork of it tells nobody."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.page = memoryview(bytearray(_SIZE))
        # The names of the files, the newest last. It alone is on the page.
        self.running: dict[Writing, bytes] = {}
        self.last = 2  # the record of the last write that has ended
        # A handler of a signal may save as well, and so interrupt its own thread here.
        self.lock = threading.RLock()

    def share(self, control: socket.socket, message: bytes) -> None:
        """Send the page to the agent, with this message."""
        file = os.memfd_create("mpiddp-writes", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, _SIZE)
            self.page = _mapped(file)
            socket.send_fds(control, [message], [file])
        finally:
            os.close(file)
        os.register_at_fork(after_in_child=partial(self.__init__, self.progress))  # type: ignore[misc]

    def note(self, record: int, state: int, name: bytes) -> None:
        facts = (state, monotonic(), self.progress.step, len(name), name)
        _RECORD.pack_into(self.page, _RECORDS[record], *facts)

    def let_signal_pass(self) -> None:
        """The agent may have just seen that no write is in flight. Its signal comes before this write."""
        page, running, deadline = self.page, self.running, monotonic() + _PASSES_S
        while page[_SIGNAL_WAITS] and len(running) == 1 and monotonic() < deadline:
            with self.lock:
                state = _NONE if len(running) == 1 else _IN_FLIGHT
                _STATE.pack_into(page, _RECORDS[3 - self.last], state)
            time.sleep(_POLL_S)
        with self.lock:
            _STATE.pack_into(page, _RECORDS[3 - self.last], _IN_FLIGHT)

    def end(self, write: Writing, *, is_whole: bool) -> None:
        with self.lock:
            is_newest = next(reversed(self.running), None) is write
            if (name := self.running.pop(write, None)) is None:
                return
            if is_whole:
                self.last = 3 - self.last if is_newest else self.last
                self.note(self.last, _WHOLE, name)
            if self.running:
                self.note(3 - self.last, _IN_FLIGHT, next(reversed(self.running.values())))
            elif not is_whole:
                self.note(3 - self.last, _NONE, b"")


class Writing:
    """A write of this process, as the context of its code: what `open_file` opens.

    Small saves are often many, and each call costs a cold processor about a microsecond. So this makes few calls.
    `target` is a path, or an object with the method `write`.
    """

    __slots__ = ("_args", "_file", "_open_file", "_target", "_writes")

    def __init__(
        self, writes: Writes, target: Any, open_file: Callable[..., Any] = nullcontext, *args: Any
    ) -> None:
        self._writes, self._target, self._open_file, self._args = writes, target, open_file, args

    def __enter__(self) -> Any:
        writes, target = self._writes, self._target
        try:
            is_short = type(target) is str and len(target) < _LONGEST_NAME // 4
            name = target.encode(_ENCODING, "surrogateescape") if is_short else _name_of(target)
            with writes.lock:
                writes.running[self] = name
                place, step = _RECORDS[3 - writes.last], writes.progress.step
                _RECORD.pack_into(
                    writes.page, place, _IN_FLIGHT, monotonic(), step, len(name), name
                )
            if writes.page[_SIGNAL_WAITS]:
                writes.let_signal_pass()
            self._file = self._open_file(target, *self._args)
            return self._file.__enter__()
        except BaseException:
            self._writes.end(self, is_whole=False)
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> Any:
        writes, is_whole = self._writes, False
        try:
            suppresses = self._file.__exit__(kind, *error)
            is_whole = kind is None
            return suppresses
        finally:
            with writes.lock:
                if is_whole and len(writes.running) == 1 and self in writes.running:
                    del writes.running[self]
                    writes.last = 3 - writes.last
                    _STATE.pack_into(writes.page, _RECORDS[writes.last], _WHOLE)
                else:
                    writes.end(self, is_whole=is_whole)


class WritesOfScript:
    """The agent's end of the page. `file` is that of the script's message."""

    def __init__(self, file: int) -> None:
        import mmap  # scripts without torch have no page

        try:
            self._page = mmap.mmap(file, _SIZE)
        finally:
            os.close(file)

    @property
    def now(self) -> Write | None:
        """The newest of the writes that are in flight."""
        return self._newest(_IN_FLIGHT)

    @property
    def last(self) -> Write | None:
        """The last write that has ended without an error."""
        return self._newest(_WHOLE)

    def are_over(self) -> bool:
        """Whether no write is in flight. Then none begins for a moment, unless `go_on` is called."""
        self._page[_SIGNAL_WAITS] = 1
        time.sleep(_SEEN_S)
        return self.now is None

    def go_on(self) -> None:
        self._page[_SIGNAL_WAITS] = 0

    def _newest(self, state: int) -> Write | None:
        records = (_RECORD.unpack_from(self._page, place) for place in _RECORDS.values())
        writes = [
            Write(os.fsdecode(name[:size]), at, step)
            for of, at, step, size, name in records
            if of == state
        ]
        return max(writes, key=lambda write: write.at, default=None)


def _name_of(target: Any) -> bytes:
    with suppress(Exception):  # the object may be of any class
        path = target if isinstance(target, str | os.PathLike) else target.name
        if not isinstance(path, int):
            return os.fsencode(path)[-_LONGEST_NAME:]
    return b""


def _mapped(file: int) -> memoryview:
    """The page of this file. Python's mmap would keep a file open, whose number the script may reuse."""
    import ctypes
    import mmap

    map_file = ctypes.CDLL(None, use_errno=True).mmap
    map_file.restype = ctypes.c_void_p
    map_file.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = map_file(None, _SIZE, access, mmap.MAP_SHARED, file, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "the page of writes")
    return memoryview((ctypes.c_ubyte * _SIZE).from_address(address)).cast("B")
