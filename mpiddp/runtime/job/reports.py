"""What a script reports to its launcher by itself: its steps, its values, its stacks, its log."""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpiddp.protocol.messages import (
    CONFIRM_EVERY,
    MOST_SHOWN,
    SHOWN_BYTES,
    STREAMS,
    TEXT_LIMIT,
    UNCONFIRMED_LIMIT,
    is_short,
)
from mpiddp.protocol.variables import LOG_DIR

PROGRESS_EVERY_S = 0.5
SUFFIXES = {1: "out", 2: "err"}


class Reports:
    """A script's reports of its steps and its stacks. `send` sends the launcher a message."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self.step = 0  # the latest step of this rank
        self._is_told = False  # the script counts its steps itself
        self._is_counted = False  # the calls of `should_stop` are the steps
        self._sent_progress_at = 0.0
        self._shown: dict[str, Any] = {}  # that has not been sent
        self._phases: dict[str, Any] = {}  # the same
        self._sent = self._confirmed = 0  # messages of progress

    def progress(self, step: int) -> None:
        """The script has made this step, by its own count."""
        self._is_told = True
        self._report(step)

    def counted(self, step: int) -> None:
        """The script has called `should_stop` in this step."""
        self._is_counted = True
        if not self._is_told:
            self._report(step)

    def optimizer_stepped(self, step: int) -> None:
        """An optimizer of the script has made so many steps."""
        if not (self._is_told or self._is_counted) and step > self.step:
            self._report(step)

    def _report(self, step: int) -> None:
        """Report this rank's step, at most twice a second. Most calls send nothing."""
        self.step = step
        now = time.monotonic()
        is_due = now - self._sent_progress_at >= PROGRESS_EVERY_S
        if is_due and self._sent - self._confirmed < UNCONFIRMED_LIMIT:
            self._sent_progress_at = now
            self._sent += 1
            self._send("progress", step=step, **_usage(), **self._new_shown(), **self._phases)
            self._phases = {}

    def confirm(self) -> None:
        """The launcher has read some messages of progress. Others may be on their way."""
        self._confirmed += CONFIRM_EVERY

    def show(self, values: Mapping[str, Any]) -> None:
        """Send these values of the training with the next progress, but those that cannot be shown."""
        for name, value in values.items():
            if type(value) not in (bool, int, float) and isinstance(value, numbers.Real):  # numpy's
                value = int(value) if isinstance(value, numbers.Integral) else float(value)
            has_room = name in self._shown or len(self._shown) < MOST_SHOWN
            if has_room and is_short(name, value):
                self._shown[name] = value

    def tell_phases(self, phases: Mapping[str, float]) -> None:
        """Send with the next progress what all "steps" so far have spent in each of their phases."""
        self._phases = {"phases": {**phases, "steps": int(phases["steps"])}}

    def _new_shown(self) -> dict[str, Any]:
        shown, self._shown = self._shown, {}
        while len(json.dumps(shown)) > SHOWN_BYTES:
            shown.popitem()
        return {"shown": shown} if shown else {}

    def send_stacks(self) -> None:
        with contextlib.suppress(OSError):  # no file is left, not even to import
            self._send("stacks", step=self.step, **look())


def _usage() -> dict[str, float]:
    """What this thread, which makes the steps, and this process have used so far: seconds, and bytes."""
    queued_ns = pages = 0
    with contextlib.suppress(
        OSError, ValueError, IndexError
    ):  # a kernel without it, or no file is left
        queued_ns = int(_read("/proc/thread-self/schedstat").split()[1])
        pages = int(_read("/proc/self/statm").split()[1])
    return {
        "own_s": round((time.thread_time_ns() + queued_ns) / 1e9, 3),
        "cpu_s": round(time.process_time(), 3),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 256)
    finally:
        os.close(file)


# --- where this process is ---


def look() -> dict[str, Any]:
    """The fields of a message "stacks", but for the step."""
    from mpiddp.hosts.processes import processor_time

    facts: dict[str, Any] = {
        "text": _stacks(),
        "cpu_s": 0.0,
        "state": state_of(os.getpid()),
    }
    with contextlib.suppress(OSError):  # this process has no file left
        facts["cpu_s"] = processor_time(os.getpid())
    return facts


def _stacks() -> str:
    """The Python stacks of all threads of this process except this one, the main thread's first."""
    import traceback  # takes 5 ms

    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        ident: f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    }
    # The end of a long stack is where the thread is.
    first = stacks.pop(main or 0, "")[-TEXT_LIMIT:]
    return "\n".join([first, *stacks.values()])[:TEXT_LIMIT]


def state_of(pid: int) -> str:
    """That of the main thread: "D" while it waits for a disk; "" if the kernel does not tell."""
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/task/{pid}/stat").read_bytes()
        return stat.rpartition(b")")[2].split()[0].decode()
    return ""


class Output:
    """This rank's output, which its agent copies. `log_dir` is the user's folder, None if none is named."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        folder = os.environ.get(LOG_DIR)
        self.log_dir = Path(folder) if folder else None

    def log_to(self, folder: Path) -> Path:
        """Write all output, from the rank's first line on, to files in `folder`, and return that of stderr.

        The files are opened here, because the rank can report an error. They grow at a restart.
        """
        files, path = open_logs(folder, int(os.environ["RANK"]))
        try:
            with contextlib.suppress(ConnectionError):
                socket.send_fds(self._control, [b'{"type": "log_to"}\n'], files)
        finally:
            for file in files:
                os.close(file)
        return path


def open_logs(folder: Path, rank: int) -> tuple[list[int], Path]:
    """The open log files of a rank's streams, and the path of stderr's.

    Raises:
        OSError: a file cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[int] = []
    try:
        for number in STREAMS:
            path = folder / f"rank_{rank:05d}.{SUFFIXES[number]}"
            files.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666))
    except OSError:
        for file in files:
            os.close(file)
        raise
    return files, path
