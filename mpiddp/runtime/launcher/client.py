"""A rank's reports to its launcher over the job channel, and its acts on the launcher's messages.

A rank does not report over stdout, which belongs to the script, or by mpirun's exit code, which cannot
be trusted. `mpiddp.protocol.messages` defines the messages, and how both ends prove that they belong to
one job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import numbers
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mpiddp.protocol.messages import (
    CONFIRM_EVERY,
    MOST_SHOWN,
    SHOWN_BYTES,
    TEXT_LIMIT,
    UNCONFIRMED_LIMIT,
    is_short,
)
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.job.ending import Ending
from mpiddp.world import World

PROGRESS_EVERY_S = 0.5
LOST_LAUNCHER = 1  # the exit code of a rank that loses its launcher
_F_SETOWN_EX, _F_OWNER_TID = 15, 0  # linux/fcntl.h


class LauncherClient:
    """The launcher, over this process's channel. A thread receives its messages.

    Args:
        request_stop: called in that thread when the launcher requests a stop.
        exit_now: ends this process; called in that thread.
    """

    def __init__(
        self,
        channel: JobChannel,
        world: World,
        request_stop: Callable[[], None],
        exit_now: Callable[[int], object] = os._exit,
    ) -> None:
        self.channel = channel
        self.world = world
        self.stopping = threading.Event()  # the launcher has requested a stop of this rank
        self._exit_now = exit_now
        self.step = 0  # the latest step of this rank
        self._actions: dict[str, Callable[[dict[str, Any]], object]] = {
            "end": lambda message: exit_now(int(message["code"])),
            "stop": lambda message: self._stop(request_stop),
            "stopping": lambda message: self.stopping.set(),  # its script has got a "stop"
            "stacks": lambda message: self._send_stacks(),
            "received": lambda message: self._confirm_progress(),
        }
        self._sent_progress_at = 0.0
        self._shown: dict[str, Any] = {}  # that has not been sent
        self._phases: dict[str, Any] = {}  # the same
        self._sent = self._confirmed = 0  # messages of progress
        self._is_over = False
        _write_stack_on_urgent_byte(channel.connection)
        channel.on_closed = _write_no_stack
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, kind: str, **fields: object) -> None:
        self.channel.send(kind, b"", **fields)

    def progress(self, step: int) -> None:
        """Report this rank's step, at most twice a second. Most calls send nothing."""
        self.step = step
        now = time.monotonic()
        is_due = now - self._sent_progress_at >= PROGRESS_EVERY_S
        if is_due and self._sent - self._confirmed < UNCONFIRMED_LIMIT:
            self._sent_progress_at = now
            self._sent += 1
            self.send("progress", step=step, **_usage(), **self._new_shown(), **self._phases)
            self._phases = {}

    def show(self, values: Mapping[str, Any]) -> None:
        """Send these values of the training with the next progress, but those that cannot be shown."""
        for name, value in values.items():
            if type(value) not in (bool, int, float) and isinstance(value, numbers.Real):  # numpy's
                value = int(value) if isinstance(value, numbers.Integral) else float(value)
            has_room = name in self._shown or len(self._shown) < MOST_SHOWN
            if has_room and is_short(name, value):
                self._shown[name] = value

    def tell_phases(self, steps: int, seconds: Mapping[str, float]) -> None:
        """Send with the next progress what all steps so far have spent in each of their phases."""
        self._phases = {"phases": {"steps": steps, **seconds}}

    def _new_shown(self) -> dict[str, Any]:
        shown, self._shown = self._shown, {}
        while len(json.dumps(shown)) > SHOWN_BYTES:
            shown.popitem()
        return {"shown": shown} if shown else {}

    def _stop(self, request_stop: Callable[[], None]) -> None:
        self.stopping.set()
        request_stop()

    def _confirm_progress(self) -> None:
        self._confirmed += CONFIRM_EVERY  # others may be on their way

    def failed(self, ending: Ending) -> None:
        """Report how this rank failed, unless it has been reported."""
        if self._is_over:
            return
        self._is_over = True
        self.send(
            "failed",
            code=ending.code,
            error=ending.sentence[:TEXT_LIMIT],  # the beginning is the useful part
            traceback=ending.traceback[-TEXT_LIMIT:],
            is_verdict=ending.is_verdict,
        )

    def done(self, *, is_early: bool = False) -> None:
        """Report that this rank succeeded, unless it has failed.

        Args:
            is_early: it ends with code 0 without leaving the job, so the other ranks may still need it.
        """
        if not self._is_over:
            self._is_over = True
            self.send("exited" if is_early else "done")

    def _send_stacks(self) -> None:
        with contextlib.suppress(OSError):  # no file is left, not even to import
            from mpiddp.runtime.launcher.stacks import look  # few ranks need it

            self.send("stacks", step=self.step, **look())

    def _listen(self) -> None:
        with contextlib.suppress(LookupError, ValueError, TypeError):  # it is not the launcher
            for message in self.channel.news():
                if act := self._actions.get(message["type"]):
                    act(message)
        if not self._is_over and not self.channel.was_closed_here:
            world = self.world
            rank = f"rank {world.rank} on {world.hostname}"
            sentence = f"{rank}: lost the connection to the launcher; exiting.\n"
            with contextlib.suppress(OSError):
                os.write(2, sentence.encode())
            self._exit_now(LOST_LAUNCHER)


def _write_stack_on_urgent_byte(connection: socket.socket) -> None:
    """Write the main thread's stack to the connection whenever an urgent byte arrives there.

    It is the stack of a rank whose native code holds the interpreter's lock. A plain message is not enough:
    the thread that would read it waits for the lock (CPython 3.11, unless it is built without the lock).
    tests/integration/runtime/test_still_needed.py fails once that is no longer so.

    The launcher sends one urgent byte of TCP, for which the rank's kernel raises SIGURG; on its own host it
    sends the signal itself. faulthandler's handler runs no Python code. The signal goes to the main thread,
    which writes only its own stack. The stack of another thread may change while it is read, and the rank,
    which may only be slow to answer, would then crash.
    """
    if connection.family != socket.AF_UNIX:
        owner = struct.pack("ii", _F_OWNER_TID, threading.main_thread().native_id)
        fcntl.fcntl(connection, _F_SETOWN_EX, owner)
    faulthandler.register(signal.SIGURG, file=connection.fileno(), all_threads=False)


def _write_no_stack() -> None:
    """The connection's number may be another file's by now."""
    faulthandler.unregister(signal.SIGURG)


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
        "queued_s": round(queued_ns / 1e9, 3),
        "cpu_s": round(time.process_time(), 3),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 256)
    finally:
        os.close(file)
