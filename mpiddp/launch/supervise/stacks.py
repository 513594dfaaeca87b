"""Requests for the stacks of all ranks: who waits for them, and for how long."""

from __future__ import annotations

from mpiddp.launch.supervise.control import ControlServer
from mpiddp.launch.supervise.phases import Event
from mpiddp.launch.supervise.ranks import Ranks

STACKS_S, INTERRUPTED_S = 4.0, 1.0  # ranks to send their stacks, also after an interrupt


class StackRequests:
    """The events that wait for stacks: until every rank has sent them, or the time is over."""

    def __init__(self, ranks: Ranks, server: ControlServer) -> None:
        self._ranks = ranks
        self._server = server
        self._waiting: list[Event] = []

    def request(self, event: Event) -> None:
        """Let the event wait for new stacks. One that waits already goes on waiting."""
        if event in self._waiting:
            return
        self._ranks.forget_stacks()
        self._server.request_stacks()
        self._waiting.append(event)
        self._server.selector.after(STACKS_S, Event.STACKS_LATE)
        self._server.selector.after(STACKS_S + INTERRUPTED_S, Event.STACKS_OVER)

    def interrupt(self, *, but_for: set[Event]) -> None:
        """Interrupt the system calls of ranks that have not answered, unless only these events wait."""
        if set(self._waiting) - but_for:
            for rank in self._missing:
                self._server.interrupt(rank)

    @property
    def are_complete(self) -> bool:
        """Whether an event waits, and no stack is missing."""
        return bool(self._waiting) and not self._missing

    def take(self) -> list[Event]:
        """The events, whose wait is over."""
        self._server.selector.cancel(Event.STACKS_LATE, Event.STACKS_OVER)
        events, self._waiting = self._waiting, []
        return events

    @property
    def _missing(self) -> set[int]:
        """The ranks that are connected and have not sent their stacks."""
        return self._server.connected - self._ranks.stacks.keys() - self._ranks.done
