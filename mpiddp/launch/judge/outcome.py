"""How a job, or one attempt at it, has ended: the exit code, the sentence, the rank that failed first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpiddp.launch.judge.events import Announcement, Stop
from mpiddp.text import signal_name


class MpirunEnd(NamedTuple):
    """How mpirun ended."""

    name: str  # its program
    code: int  # its exit code; -N if signal N killed it
    # Whether the code 128 + N proves that signal N has killed a rank, and any other code that no signal has.
    proves_signals: bool = False
    was_ended: bool = False  # whether this launcher has ended it

    @property
    def rank_signal(self) -> str:
        """The signal that killed a rank, "" if the code does not tell."""
        number = self.code - 128  # a number above 31 belongs to an error of mpirun itself
        return signal_name(number) if self.proves_signals and 0 < number < 32 else ""


class Outcome(NamedTuple):
    """The launcher's exit code, the sentence that explains it, and the facts for the next attempt."""

    code: int
    sentence: str = ""
    rank: int | None = None  # the rank that failed first, if it is known
    host: str | None = None  # its host, by the host's own name
    is_complete: bool = True  # whether mpirun's own message about the end adds nothing
    # The host at fault, by its name in the request, or "" if it is unknown or if the script itself failed.
    host_at_fault: str = ""
    names_event: bool = False  # `sentence` names the event that precedes every error
    known_cause: str = ""  # a sentence to print below `sentence`
    stop: Stop = Stop.NONE
    announcement: Announcement = Announcement()
    made_steps: bool = False
    gpus: Sequence[Mapping[str, Any]] = ()  # the use of each rank's GPU, where it is known
