"""The state of this process as a rank of its job: one object, which is passed to the code that needs it.

Public functions that take no argument, such as should_stop() and init(), use `script_session()`. Under
`mpiddp launch` and `mpiddp run` the script's process is the child of the rank's agent, and has a channel of
its own to the server of the job. By hand (mpirun, srun, torchrun) the process is the rank itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddp.protocol.channel import SCRIPT
from mpiddp.protocol.variables import CHANNEL, CHANNEL_SECRET, JOB, LOG_DIR
from mpiddp.runtime.job.channel import AnotherScript, JobChannel, Server
from mpiddp.runtime.job.ending import Ending, ending_of
from mpiddp.runtime.job.reporter import Reporter
from mpiddp.runtime.job.stop import StopRequest
from mpiddp.world import World, is_joined

if TYPE_CHECKING:
    from mpiddp.runtime.job.coordinator import Coordinator


class Session(Reporter):
    """The state of one process. A process belongs to one job, so it has one session.

    Attributes:
        coordinator: None until the ranks have joined. They join once: MPI cannot be initialized again.
        watch: set while this process is in the process group of its job.
        run: the `mpiddp.checkpoints.records.RunRecords` of this process's run.
        torch_store: the store that rank 0 serves as long as its process lives.
        error: what has ended the script, once its agent's program knows it.
        before_leaving: calls on every rank, the latest first, once its script has succeeded.
        savers: each waits until this rank has no save of one kind in flight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.coordinator: Coordinator | None = None
        self.watch: object = None
        self.run: Any = None
        self.torch_store: object = None
        self.error: BaseException | None = None
        self.has_printed = False  # the sentence of that error
        self.has_said_why = False  # to whoever reports this end
        self.stop = StopRequest(self)
        self._pid = os.getpid()
        self._saves = 0
        self._lock = threading.RLock()
        self.before_leaving: list[Callable[[], None]] = []
        self.savers: list[Callable[[], None]] = []

    def connect(self) -> None:
        """Connect this script to the server of its job, which its rank's variables name.

        Raises AnotherScript if this rank has a script already, JobFailed if the server cannot be reached.
        """
        env, world = os.environ, World.from_env()
        server = Server(env[CHANNEL], env.get(CHANNEL_SECRET, ""))
        self.channel = channel = JobChannel(server, world, SCRIPT)
        self.has_launcher = JOB in env
        channel.listen(self._obey, partial(self.stop.agree, channel))

    def _obey(self, facts: Mapping[str, Any]) -> None:
        """Act on a message of the launcher. The agent ends this process, so "end" is none of its."""
        match facts["type"]:
            case "stop":
                self.stop.request()
            case "stacks":
                self.send_stacks()

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, which is not a rank."""
        return os.getpid() == self._pid

    def log_to(self, folder: Path) -> None:
        """Write this rank's output, from its first line on, to files in `folder`, if its agent copies it.

        Not if the user has named another folder.
        """
        if self.control is not None and self.has_launcher and not os.environ.get(LOG_DIR):
            folder.mkdir(parents=True, exist_ok=True)  # here, where an error is the script's own
            self.tell_agent("log_to", folder=str(folder))

    def report(self, ending: Ending) -> None:
        """Say why this script has failed, to whoever reports its end.

        A later exit code without a sentence follows from an error that was reported.
        """
        if self.has_said_why and not ending.sentence:
            return
        self.has_said_why = bool(ending.sentence)
        if self.control is not None:
            self.tell_agent("error", **ending.facts)
        else:
            self.send("failed", **ending.facts)

    def finish(self) -> None:
        """Make the calls before leaving. Raises JobFailed if the script has not succeeded after all."""
        while self.before_leaving:
            self.before_leaving.pop()()

    def wait_for_saves(self) -> None:
        """Wait until this rank has no save in flight, whether the saves succeed or not. Not a collective."""
        for wait in self.savers:
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
        with self._lock:
            before, self._saves = self._saves, self._saves + difference
            if bool(before) != bool(self._saves):
                self.send("saving", active=bool(self._saves))

    def stop_is_saved(self) -> None:
        """This rank has saved what a stop requires, and now waits for the other ranks."""
        with self._lock:
            if not self._saves:
                self.send("saving", active=False)


_current = Session()


def current() -> Session:
    """The session of this process."""
    return _current


def script_session() -> Session:
    """The session of this process, which is connected first if it is the script of a rank's command.

    In a command of a rank (`mpiddp run -- COMMAND`), the first process that calls a function of mpiddp is the
    rank's script. The agent reports its start and its end; the script reports the rest, and its error. Raises
    JobFailed if the server of the job cannot be reached.
    """
    session = current()
    if session.channel is None and CHANNEL in os.environ and is_joined(os.environ):
        with contextlib.suppress(AnotherScript):
            session.connect()
            atexit.register(_report_end, session)
    return session


def _report_end(session: Session) -> None:
    """Tell the launcher why this script of a command ends. Python keeps only an error that it prints."""
    error = getattr(sys, "last_value", None)
    if session.channel is not None and not session.has_said_why:  # None in a forked child
        if error is None:
            session.send("done")
        else:
            session.channel.claim_first_failure()
            session.report(ending_of(error, has_stopped=session.stop.has_stopped))


def _forget() -> None:
    global _current
    _current.channel = _current.control = None  # for code that holds the session
    _current.has_launcher = False
    _current = Session()


os.register_at_fork(after_in_child=_forget)
