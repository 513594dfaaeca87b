"""How a job, or one attempt at it, has ended: the exit code, the sentence, the rank that failed first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpiddp.errors import DONE, STOPPED
from mpiddp.launch import log
from mpiddp.launch.judge.events import Announcement, Stop
from mpiddp.text import signal_name


class MpirunEnd(NamedTuple):
    """How mpirun ended."""

    name: str  # its program
    code: int  # its exit code; -N if signal N killed it
    # Its code 128 + N says that signal N has killed a rank, and another code that none has.
    proves_signals: bool = False
    was_ended: bool = False  # by this launcher

    @property
    def rank_signal(self) -> str:
        """The signal that killed a rank, "" if the code does not tell."""
        number = self.code - 128  # its own error codes would be real-time signals
        return signal_name(number) if self.proves_signals and 0 < number < 32 else ""


class Outcome(NamedTuple):
    """The launcher's exit code, the sentence that explains it, and what the job's next attempt needs."""

    code: int
    sentence: str = ""
    rank: int | None = None  # that is known to have failed first
    host: str | None = None  # its own name of it
    is_complete: bool = True  # mpirun's own message about the end adds nothing
    # The host that has ended the attempt, by its name in the request; "" for none, or if it may be another.
    # A script's own error is no fault of its host.
    host_at_fault: str = ""
    known_cause: str = ""  # a sentence to print below `sentence`
    hint: str = ""  # to print below both
    stop: Stop = Stop.NONE
    announcement: Announcement = Announcement()
    made_steps: bool = False
    gpus: Sequence[Mapping[str, Any]] = ()  # what each rank's has done, where it is known

    def log(self) -> None:
        """Print the verdict, and the known cause below it."""
        for sentence in filter(None, (self.sentence, self.known_cause)):
            (log.info if self.code in (DONE, STOPPED) else log.error)(sentence)
        if self.hint:
            log.info(self.hint)
