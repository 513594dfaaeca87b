"""What a script tells its launcher and its agent: its steps, its values, and where it is."""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiddp.protocol.messages import MOST_SHOWN, SHOWN_BYTES, TEXT_LIMIT, is_short
from mpiddp.runtime.job.channel import JobChannel

PROGRESS_EVERY_S = 0.5
BY_OPTIMIZER, BY_CALLS, BY_SCRIPT = range(3)  # who counts the steps; the last one is right


class Reporter:
    """The connections of one process, and what it says over them.

    A launcher that is stopped (Ctrl-Z) reads nothing, and the script goes on: while the connection has no
    room, no step is reported.

    Attributes:
        channel: this process's connection to the server of its job; None until there is one.
        control: the connection to the agent that has started this script; None for any other process.
        has_launcher: whether `mpiddp launch` listens.
    """

    def __init__(self) -> None:
        self.channel: JobChannel | None = None
        self.control: socket.socket | None = None
        self.has_launcher = False
        self._step = 0  # the latest step of this rank
        self._counter = BY_OPTIMIZER
        self._sent_at = 0.0
        self._shown: dict[str, Any] = {}  # that has not been sent
        self._phases: dict[str, Any] = {}  # the same

    def send(self, kind: str, **facts: object) -> None:
        """Send the launcher a message, if there is a launcher."""
        if self.has_launcher and self.channel is not None:
            self.channel.send(kind, b"", **facts)

    def tell_agent(self, kind: str, **facts: object) -> None:
        """Tell the agent that has started this script, if one has."""
        if self.control is not None:
            with contextlib.suppress(OSError):  # the script has closed it
                self.control.sendall(json.dumps({"type": kind, **facts}).encode() + b"\n")

    def count(self, step: int, counter: int) -> None:
        """Report this step by one who counts, at most twice a second. Most calls send nothing.

        Several optimizers may count one step.
        """
        if counter < self._counter or (counter == BY_OPTIMIZER and step <= self._step):
            return
        self._counter, self._step = counter, step
        now = time.monotonic()
        is_due = now - self._sent_at >= PROGRESS_EVERY_S
        if is_due and self.channel is not None and self.channel.has_room:
            self._sent_at = now
            facts = {**_usage(), **self._new_shown(), **self._phases}
            self.send("progress", step=step, **facts)
            self._phases = {}

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
        """Send where this process is."""
        with contextlib.suppress(OSError):  # no file is left, not even to import
            self.send("stacks", step=self._step, text=_stacks(), **usage_of(os.getpid()))


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


def usage_of(pid: int) -> dict[str, Any]:
    """The processor time of a process with its descendants, and the state of its main thread.

    "D" while it waits for a disk; "" if the kernel does not tell.
    """
    from mpiddp.hosts.processes import processor_time

    facts = {"cpu_s": 0.0, "state": ""}
    with contextlib.suppress(OSError, IndexError):  # it has ended, or this process has no file left
        facts["cpu_s"] = processor_time(pid)
        stat = Path(f"/proc/{pid}/task/{pid}/stat").read_bytes()
        facts["state"] = stat.rpartition(b")")[2].split()[0].decode()
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
