"""Copy what mpirun and its ranks write to this process's stdout and stderr, byte by byte.

mpirun aborts when the reader of its output goes away, as `tee` does at the Ctrl-C of `… 2>&1 | tee log`.
Here it writes to pipes that this process reads until the end. A slow reader still slows the ranks, because
a full pipe blocks them.
"""

from __future__ import annotations

import os
import select
import threading

from mpiddp.launch import log

_CHUNK = 1 << 16  # bytes, the size of a pipe
_NAMES = {1: "stdout", 2: "stderr"}


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr: another file would get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


class OutputCopy:
    """A thread that copies one pipe to the file descriptor `target`.

    mpirun gets `pipe`, and `started` closes it here. A reader that goes away loses the output, not the job.
    """

    def __init__(self, target: int) -> None:
        self._name = _NAMES[target]
        self._target: int | None = os.dup(target)
        self._reader, self.pipe = os.pipe()
        os.set_blocking(self._reader, False)
        self._end_reader, self._end_writer = os.pipe()
        self._has_complained = False
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def started(self) -> None:
        """mpirun has its end of the pipe: begin to copy."""
        os.close(self.pipe)
        self._thread.start()

    def finish(self) -> None:
        """No process of the job is left: end after the rest that is in the pipe. Does not wait."""
        os.close(self._end_writer)

    def is_finished(self, within_s: float) -> bool:
        """Whether everything has been copied. A terminal that is stopped by Ctrl-S delays it."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _copy(self) -> None:
        poll = select.poll()
        for descriptor in (self._reader, self._end_reader):
            poll.register(descriptor, select.POLLIN)
        while True:
            poll.poll()
            try:
                chunk = os.read(self._reader, _CHUNK)
            except BlockingIOError:  # only the end is there
                break
            if not chunk:
                break
            self._write(chunk)
        os.close(self._reader)
        os.close(self._end_reader)
        if self._target is not None:
            os.close(self._target)

    def _write(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest and self._target is not None:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:  # another program has made it non-blocking
                select.select([], [self._target], [])
            except BrokenPipeError:
                os.close(self._target)
                self._target = None
                self._complain("its reader went away")
            except OSError as error:  # a full disk may have room again, so the next chunk is tried
                self._complain(error.strerror or str(error))
                return

    def _complain(self, reason: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            log.info(f"{self._name}: {reason}. The job continues, and its output there is lost.")
