"""Stop a job that could have more ranks, so that it restarts with them: `--grow 10m`.

Another process looks for hosts (`mpiddp.launch.growth`). This one asks it now and then, waits for its answer
like for any other message, and stops the ranks as a user would. A job that cannot resume is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mpiddp.launch.supervise.agenda import Agenda
from mpiddp.launch.supervise.job_state import NOTHING_ANNOUNCED, JobState


@dataclass(frozen=True)
class Look:
    """What a look for hosts has found: nothing, more ranks than the job has, or a problem.

    reason: "node1 is back". size: "on 3 hosts". problem: a sentence.
    """

    reason: str = ""
    size: str = ""
    problem: str = ""


class HostWatch(Protocol):
    """A process that looks for hosts. Its file descriptor is readable when it has answered or ended."""

    def fileno(self) -> int: ...

    def ask(self, max_ranks: int | None) -> None:
        """Ask whether more ranks could start now, at most `max_ranks`. Does not wait."""

    def receive(self) -> list[Look]:
        """The answers that have arrived. Raises EOFError if the process has ended."""


class Growing:
    """The growth of one job, looked for every `every_s` seconds once all ranks have joined.

    Args:
        log: prints a sentence.
        stop: requests a stop of all ranks.
        may_stop: whether this is no moment to stop for another reason.
    """

    def __init__(
        self,
        watch: HostWatch,
        every_s: float,
        state: JobState,
        agenda: Agenda,
        *,
        log: Callable[[str], None],
        stop: Callable[[], None],
        may_stop: Callable[[], bool],
    ) -> None:
        self.watch = watch
        self._every_s = every_s
        self._state = state
        self._agenda = agenda
        self._log = log
        self._stop = stop
        self._may_stop = may_stop
        self._has_begun = False
        self._problem = ""  # the latest that has been printed
        self._says_why_not = False

    def on_message(self) -> None:
        """React to any message that the state has noted."""
        if not self._has_begun and len(self._state.joining) == self._state.world_size:
            self._has_begun = True
            self._agenda.add(self._every_s, self._look)

    def _look(self) -> None:
        if self._may_stop():
            self.watch.ask(self._state.announcement.max_ranks)
        else:
            self._agenda.add(self._every_s, self._look)

    def receive(self) -> bool:
        """React to the answers. Whether there may be more of them."""
        try:
            looks = self.watch.receive()
        except EOFError:
            if self._may_stop():
                self._log("the process of --grow has ended: hosts join only at a restart.")
            return False
        for look in looks:
            self._agenda.add(self._every_s, self._look)
            self._report(look.problem)
            if look.reason and self._may_stop():
                self._grow(look)
        return True

    def _report(self, problem: str) -> None:
        """Print a problem once, until it has been solved."""
        if problem and problem != self._problem:
            self._log(problem)
        self._problem = problem

    def _grow(self, look: Look) -> None:
        if why_not := self._why_not():
            if not self._says_why_not:
                self._says_why_not = True
                self._log(f"{look.reason}, but {why_not}, so the job continues without a restart.")
            return
        self._log(f"{look.reason}: stopping to restart {look.size}.")
        self._stop()

    def _why_not(self) -> str:
        """The reason why the job would lose work by a stop; "" if it would lose none."""
        state = self._state
        if len(state.supports_stop) < state.world_size:
            return "not every rank has called mpiddp.should_stop()"
        if state.announcement == NOTHING_ANNOUNCED:
            return "the script has announced nothing that resumes it (mpiddp.announce)"
        return ""
