"""How far the training of this process is, what it shows of itself, and its saves."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpiddp.protocol.channel import LARGEST_WHOLE
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.stdlib import own

BY_OPTIMIZER, BY_CALLS, BY_SCRIPT = range(3)  # who counts the steps; the last one is right
# What a script says of its training: values, and the bytes of each, with its name, in the message.
_MOST_SHOWN, _LONGEST_SHOWN = 16, 280
PROGRESS_EVERY_S = 0.5


class Progress:
    """The latest step of this process, the values to show with it, and the saves in flight."""

    def __init__(self, coordinator: Coordinator, tell_agent: Callable[..., object]) -> None:
        self._coordinator, self._tell_agent = coordinator, tell_agent
        self.step, self._counter = 0, BY_OPTIMIZER  # the latest step, 0 before the first
        self._sent_at = 0.0
        self._shown: dict[str, Any] = {}  # these values have not been sent
        self._saves, self._lock = 0, threading.RLock()
        self.savers: list[Callable[[], None]] = []  # functions that wait for saves of this rank
        # They are called on every rank, the latest first, once its script has succeeded.
        self.before_leaving: list[Callable[[], None]] = []

    def count(self, step: int, counter: int) -> None:
        """Report this step by one who counts, at most twice a second. Most calls send nothing.

        Several optimizers may count one step. A launcher that is stopped (Ctrl-Z) reads nothing, and the
        script goes on: while the connection has no room, no step is reported.
        """
        if counter < self._counter or (counter == BY_OPTIMIZER and step <= self.step):
            return
        self._counter, self.step = counter, step
        now = time.monotonic()
        if now - self._sent_at < PROGRESS_EVERY_S:
            return
        self._sent_at = now
        self._tell_agent("progress", at=now)
        if self._coordinator.has_room:
            self._coordinator.tell_launcher(
                "progress", step=step, counter=counter, shown=self._shown, **_usage()
            )
            self._shown = {}

    def show(self, values: Mapping[str, Any]) -> None:
        """Send these values of the training with the next progress, but those that cannot be shown."""
        numbers = own("numbers")  # few scripts need it
        for name, value in values.items():
            if type(value) not in (bool, int) and isinstance(value, numbers.Real):  # numpy's
                value = int(value) if isinstance(value, numbers.Integral) else float(value)
            has_room = name in self._shown or len(self._shown) < _MOST_SHOWN
            is_whole = type(value) is int and abs(value) <= LARGEST_WHOLE
            is_shown = has_room and (is_whole or type(value) in (float, str))
            if is_shown and len(json.dumps({name: value})) <= _LONGEST_SHOWN:
                self._shown[name] = value

    def count_saves(self, difference: int) -> None:
        """Count one more save, or one less. 0 says that this rank has saved, and waits for the others."""
        with self._lock:
            self._saves += difference
            if self._saves == max(0, difference):  # the first begins, or the last has ended
                self._coordinator.tell_launcher("saving", active=bool(self._saves))
                self._tell_agent("saving", active=bool(self._saves))

    def wait_for_saves(self) -> None:
        """Wait until this rank has no save in flight, whether the saves succeed or not. Not a collective."""
        for wait in self.savers:
            wait()

    def finish(self) -> None:
        """Make the calls before leaving. Raises JobFailed if the script has not succeeded after all."""
        while self.before_leaving:
            self.before_leaving.pop()()


def _usage() -> dict[str, float]:
    """What this thread, which makes the steps, and this process have used so far: seconds, and bytes."""
    queued_ns = pages = 0
    # A kernel without them, or no file is left.
    with contextlib.suppress(OSError, ValueError, IndexError):
        queued_ns = int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return {
        "own_s": round((time.thread_time_ns() + queued_ns) / 1e9, 3),
        "cpu_s": round(time.process_time(), 3),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }
