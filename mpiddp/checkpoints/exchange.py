"""The values that the ranks' saving threads exchange over the job's channel, beside the training.

Their waits end when a rank fails.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mpiddp.runtime.job.channel import AnotherFailed, ChannelLost, Silent
from mpiddp.runtime.job.coordinator import Coordinator


class NoExchange(Exception):
    """The job ends. The message is a phrase for a sentence."""


class Exchange:
    """The values of one save. Each rank sets its own, each once."""

    def __init__(self, coordinator: Coordinator, prefix: str, timeout_s: float) -> None:
        """
        Args:
            prefix: of the keys of this save, the same on every rank.
            timeout_s: how long this rank waits for the others, all waits of the save together.
        """
        self._coordinator = coordinator
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._waited_s = 0.0

    def set(self, name: str, value: Any) -> None:
        """Set a value of JSON."""
        self._coordinator.put(f"{self._prefix}/{name}", value)

    def get(self, name: str, rank: int) -> Any:
        """The value of a rank, once it is set. Raises as `get_all`."""
        return self.get_all(name, [rank])[0]

    def get_all(self, name: str, ranks: Sequence[int]) -> list[Any]:
        """The values of these ranks, once all are set.

        Raises:
            NoAnswer: the time for all waits of this save has passed.
            NoExchange: the job ends.
        """
        left_s = max(0.0, self._timeout_s - self._waited_s)
        since = time.monotonic()
        try:
            return self._coordinator.collect(f"{self._prefix}/{name}", ranks, timeout_s=left_s)
        except Silent as silent:
            raise self._coordinator.no_answer(silent.ranks, self._timeout_s) from None
        except AnotherFailed:
            raise NoExchange("another rank has failed") from None
        except ChannelLost:
            raise NoExchange("the job has ended") from None
        finally:
            self.count(time.monotonic() - since)

    def count(self, seconds: float) -> None:
        """Count a wait for other ranks that happened elsewhere."""
        self._waited_s += seconds

    def forget(self) -> None:
        """Delete the values of this rank, once every rank has read them: a long run would fill the server."""
        self._coordinator.forget(f"{self._prefix}/")
