"""The state of this process as a rank of its job: one object, which is passed to the code that needs it.

Public functions that take no argument, such as should_stop() and init(), use `current()`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Ending
from mpiddp.runtime.job.failure_watch import FailureWatch
from mpiddp.runtime.job.stop import StopRequest, handle_sigterm


class Launcher(Protocol):
    """The launcher, as a rank talks to it: `mpiddp.runtime.launcher.client.LauncherClient`."""

    stopping: threading.Event
    step: int

    def send(self, kind: str, **fields: object) -> None: ...
    def progress(self, step: int) -> None: ...
    def show(self, values: Mapping[str, Any]) -> None: ...
    def tell_phases(self, steps: int, seconds: Mapping[str, float]) -> None: ...
    def failed(self, ending: Ending) -> None: ...
    def done(self, *, is_early: bool = False) -> None: ...


class Output(Protocol):
    """The rank's output process: `mpiddp.runtime.launcher.output.RankOutput`."""

    @property
    def log_dir(self) -> Path | None: ...
    def log_to(self, folder: Path) -> Path: ...
    def drain(self) -> None: ...


class RunFiles(Protocol):
    """The folder of a run, and its records."""

    is_closed: bool  # then another run of this process may take its place

    @property
    def path(self) -> Path: ...

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl, on the ranks that write there."""


class Session:
    """The state of one process. A process belongs to one job, so it has one session.

    `launcher` and `output` are None without a launcher that listens. `channel` is this process's connection
    to its job: from the start under a launcher, else from the join on. `coordinator` is None until the ranks
    have joined. They join once, because MPI cannot be initialized again after it is finalized. `watch` is
    set from then until they leave.
    """

    def __init__(self) -> None:
        self.launcher: Launcher | None = None
        self.channel: JobChannel | None = None
        self.output: Output | None = None
        self.stop = StopRequest(send=self.send, progress=self._progress, declared=self._declared)
        self._is_told_steps = False  # the script counts its steps itself
        self._saves = 0
        self._saves_lock = threading.Lock()
        self.coordinator: Coordinator | None = None
        self.watch: FailureWatch | None = None
        self.earlier_watch: FailureWatch | None = None
        self.run: RunFiles | None = None  # the folder of this process's run
        self._before_leaving: list[Callable[[], None]] = []
        self._savers: list[Callable[[], None]] = []
        self.torch_store: object = None  # which rank 0 serves as long as its process lives
        self.is_unjoined_script = False
        self._before_exit: list[Callable[[], None]] = []
        self._is_ending = threading.Event()
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, which is not a rank."""
        return os.getpid() == self._pid

    def send(self, kind: str, **fields: object) -> None:
        """Send the launcher a message, if there is a launcher."""
        if self.launcher is not None:
            self.launcher.send(kind, **fields)

    def report(self, ending: Ending) -> None:
        """Report to the launcher how this rank failed, if it has. A normal end is reported later."""
        if self.launcher is not None and ending.is_failure:
            self.launcher.failed(ending)

    def claim_first_failure(self) -> None:
        """Tell the launcher at once that this rank fails: it may take time to report how."""
        if self.launcher is not None and self.coordinator is not None:
            self.coordinator.claim_first_failure()

    def exit_now(self, code: int) -> None:
        """End this process, because the job has ended. Any thread may."""
        self._is_ending.set()
        for end in self._before_exit:
            end()
        os._exit(code)

    def exit_early(self, ending: Ending) -> None:
        """Leave the job by `os._exit`. After a normal end the other ranks may go on. Any thread may."""
        if self._is_ending.is_set():
            return
        if ending.is_failure:
            self.report(ending)
            return
        self.wait_for_saves()
        has_left = self.coordinator is not None and self.watch is None
        if self.launcher is not None:
            self.launcher.done(is_early=not has_left)
        if self.coordinator is not None and not has_left:
            if self.channel is not None:
                self.stop.propose_step(self.channel, 0)
            self.coordinator.leave_early()

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Within the body, another program takes this process's place: the same rank, without reports."""
        self.wait_for_saves()
        with self.channel.kept_by_exec() if self.channel is not None else contextlib.nullcontext():
            self.send("replaced", active=True)
            try:
                yield
            finally:
                self.send("replaced", active=False)

    def before_exit(self, end: Callable[[], None]) -> None:
        """Let `exit_now` call `end`, which ends what this process has started."""
        self._before_exit.append(end)

    def wait_if_ending(self) -> None:
        """Do not return if another thread ends this process."""
        if self._is_ending.is_set():
            threading.Event().wait()

    def before_leaving(self, finish: Callable[[], None]) -> None:
        """Call `finish` on every rank once its script has succeeded, before the ranks leave the job."""
        self._before_leaving.append(finish)

    def finish(self) -> None:
        """Make these calls, the latest first. Raises JobFailed if the script has not succeeded after all."""
        while self._before_leaving:
            self._before_leaving.pop()()

    def add_saver(self, wait: Callable[[], None]) -> None:
        """Let `wait_for_saves` call `wait`, which returns once this rank has no save in flight."""
        self._savers.append(wait)

    def wait_for_saves(self) -> None:
        """Wait until this rank has no save in flight, whether the saves succeed or not. Not a collective."""
        for wait in self._savers:
            wait()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """See `mpiddp.saving`."""
        self._count_saves(1)
        try:
            yield
        finally:
            self._count_saves(-1)

    def _count_saves(self, difference: int) -> None:
        with self._saves_lock:
            before, self._saves = self._saves, self._saves + difference
            if bool(before) != bool(self._saves):
                self.send("saving", active=bool(self._saves))

    def stop_is_saved(self) -> None:
        """This rank has saved what a stop requires, and now waits for the other ranks."""
        with self._saves_lock:
            if not self._saves:
                self.send("saving", active=False)

    def _declared(self) -> None:
        """The script supports a stop: SIGTERM requests one too, while there is a launcher."""
        if self.launcher is not None:
            handle_sigterm(self.stop)

    def show(self, values: Mapping[str, Any]) -> None:
        """Let the launcher show these values of the training, by name: numbers and short texts."""
        if self.launcher is not None:
            self.launcher.show(values)

    def tell_phases(self, steps: int, seconds: Mapping[str, float]) -> None:
        """Tell the launcher the seconds that all steps so far have spent in each of their phases."""
        if self.launcher is not None:
            self.launcher.tell_phases(steps, seconds)

    def progress(self, step: int) -> None:
        """The script has made this step, by its own count."""
        self._is_told_steps = True
        if self.launcher is not None:
            self.launcher.progress(step)

    def _progress(self, step: int) -> None:
        if self.launcher is not None and not self._is_told_steps:
            self.launcher.progress(step)

    def optimizer_stepped(self, steps: int) -> None:
        """An optimizer of the script has made so many steps. `should_stop` counts better, if it is called."""
        is_counted = self.stop.supports_stop or self._is_told_steps
        if self.launcher is not None and not is_counted and steps > self.launcher.step:
            self.launcher.progress(steps)


_current = Session()


def current() -> Session:
    """The session of this process."""
    return _current


def _forget() -> None:
    global _current
    _current.launcher = _current.channel = _current.output = None  # for code that holds the session
    _current = Session()


os.register_at_fork(after_in_child=_forget)
