"""What the saving threads of the ranks tell each other while the training continues, through the job's store.

A thread has a connection of its own, because the others wait for theirs. Its waits end when a rank fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.signed_store import SignedStore

_SLICE_S = 2.0  # between two looks whether a rank has failed


class NoExchange(Exception):
    """A rank did not answer, or the job ends. The message is a phrase for a sentence."""


class Exchange:
    """The values of one save. Each rank sets its own; a key is set once."""

    def __init__(
        self, values: SignedStore, coordinator: Coordinator, prefix: str, timeout_s: float
    ) -> None:
        """
        Args:
            values: the store, over a connection of this thread.
            prefix: of the keys of this save, the same on every rank.
        """
        self._values = values
        self._coordinator = coordinator
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._own: list[str] = []

    def set(self, name: str, value: Any) -> None:
        """Set a value of JSON."""
        key = f"{self._prefix}/{name}"
        self._own.append(key)
        try:
            self._values.set(key, json.dumps(value))
        except RuntimeError:
            raise NoExchange("the job has ended") from None

    def get(self, name: str) -> Any:
        """The value, once it is set. Raises NoExchange."""
        return self.get_all([name])[0]

    def get_all(self, names: Sequence[str]) -> list[Any]:
        """The values, once all are set. Raises NoExchange."""
        keys = [f"{self._prefix}/{name}" for name in names]
        deadline = time.monotonic() + self._timeout_s
        try:
            while True:
                left_s = deadline - time.monotonic()
                found = self._values.wait(keys, min(_SLICE_S, max(left_s, 0.0)))
                # Of two hosts, each is the other's receiver and sender: a key may stand there twice.
                if len(found) == len(set(keys)):
                    return [json.loads(found[key]) for key in keys]
                if self._coordinator.has_failed(self._values):
                    raise NoExchange("another rank has failed")
                if left_s <= 0:
                    missing = next(
                        name for name, key in zip(names, keys, strict=True) if key not in found
                    )
                    raise NoExchange(f"no answer in {self._timeout_s:g} s: {missing}")
        except RuntimeError:  # rank 0 serves the store
            raise NoExchange("the job has ended") from None

    def forget(self) -> None:
        """Delete the values of this rank, once every rank has read them: a long run would fill the store."""
        for key in self._own:
            try:
                self._values.delete(key)
            except RuntimeError:
                return
        self._own = []
