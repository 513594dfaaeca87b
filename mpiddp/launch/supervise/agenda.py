"""What a launcher does at certain times of its clock."""

from __future__ import annotations

from collections.abc import Callable

from mpiddp.launch.supervise.awake_clock import AwakeClock

Action = Callable[[], None]


class Agenda:
    """Actions in the order of their times."""

    def __init__(self, clock: AwakeClock) -> None:
        self.clock = clock
        self._entries: list[tuple[float, Action]] = []

    def add(self, seconds: float, action: Action) -> None:
        """Call `action` in so many seconds."""
        self._entries.append((self.clock.now() + seconds, action))
        self._entries.sort(key=lambda entry: entry[0])

    def remove(self, action: Action) -> None:
        """Do not call `action` any more."""
        self._entries = [entry for entry in self._entries if entry[1] != action]

    def clear(self) -> None:
        self._entries.clear()

    @property
    def next_in_s(self) -> float:
        """Seconds until the next action is due, infinity without one."""
        return self._entries[0][0] - self.clock.now() if self._entries else float("inf")

    def act(self) -> None:
        """Call what is due."""
        while self._entries and self._entries[0][0] <= self.clock.now():
            self._entries.pop(0)[1]()
