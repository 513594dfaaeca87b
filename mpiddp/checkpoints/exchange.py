"""The values that the ranks' saving threads exchange through the job's store, beside the training.

A thread has a connection of its own, because the others wait for theirs. Its waits end when a rank fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.signed_store import SignedStore

_SLICE_S = 2.0  # between two looks whether a rank has failed
_WAITS_FOR = "waits-for"  # a value: the name and the ranks of the values that a rank waits for


class NoExchange(Exception):
    """The job ends. The message is a phrase for a sentence."""


class Exchange:
    """The values of one save. Each rank sets its own, each once, except what it waits for."""

    def __init__(
        self, values: SignedStore, coordinator: Coordinator, prefix: str, timeout_s: float
    ) -> None:
        """
        Args:
            values: the store, over a connection of this thread.
            prefix: of the keys of this save, the same on every rank.
            timeout_s: how long this rank waits for the others, all waits of the save together.
        """
        self._values = values
        self._coordinator = coordinator
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._waited_s = 0.0
        self._own: set[str] = set()

    def set(self, name: str, value: Any) -> None:
        """Set a value of JSON. Raises NoExchange."""
        key = self._key(name, self._coordinator.world.rank)
        self._own.add(key)
        try:
            self._values.set(key, json.dumps(value))
        except RuntimeError:
            raise NoExchange("the job has ended") from None

    def get(self, name: str, rank: int) -> Any:
        """The value of a rank, once it is set. Raises as `get_all`."""
        return self.get_all(name, [rank])[0]

    def get_all(self, name: str, ranks: Sequence[int]) -> list[Any]:
        """The values of these ranks, once all are set.

        Raises:
            NoAnswer: the time for all waits of this save has passed.
            NoExchange: the job ends.
        """
        keys = {rank: self._key(name, rank) for rank in ranks}
        self.set(_WAITS_FOR, [name, list(keys)])
        since = time.monotonic()
        try:
            while True:
                left_s = self._timeout_s - self._waited_s - (time.monotonic() - since)
                found = self._values.wait(list(keys.values()), min(_SLICE_S, max(left_s, 0.0)))
                if len(found) == len(keys):
                    return [json.loads(found[keys[rank]]) for rank in ranks]
                if self._coordinator.has_failed(self._values):
                    raise NoExchange("another rank has failed")
                if left_s <= 0:
                    silent = self._silent([rank for rank in keys if keys[rank] not in found])
                    raise self._coordinator.no_answer(silent, self._timeout_s)
        except RuntimeError:  # rank 0 serves the store
            raise NoExchange("the job has ended") from None
        finally:
            self.count(time.monotonic() - since)

    def count(self, seconds: float) -> None:
        """Count a wait for other ranks that happened elsewhere."""
        self._waited_s += seconds

    def forget(self) -> None:
        """Delete the values of this rank, once every rank has read them: a long run would fill the store."""
        for key in self._own:
            try:
                self._values.delete(key)
            except RuntimeError:
                return
        self._own = set()

    def _silent(self, missing: Sequence[int]) -> list[int]:
        """The ranks that are the cause: if a missing rank waits itself, those that it waits for."""
        silent: set[int] = set()
        seen: set[int] = set()
        todo = list(missing)
        while todo:
            rank = todo.pop()
            if rank in seen:
                continue
            seen.add(rank)
            wait = self._values.get(self._key(_WAITS_FOR, rank))
            name, ranks = json.loads(wait) if wait else ("", [])
            causes = [each for each in ranks if self._values.get(self._key(name, each)) is None]
            todo += causes
            if not causes:
                silent.add(rank)
        return sorted(silent or missing)

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"
