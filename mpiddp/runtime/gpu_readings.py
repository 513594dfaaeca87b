"""What the GPUs of a host do while its ranks train: the agent of its first rank reads it for the launcher.

In a thread, which starts the vendor's tool every ten seconds. The first failure ends it: a tool that is
missing, hangs, or tells nothing of the ranks' GPUs, is not asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpiddp.hosts.gpus import CHANGING, chosen_gpus, hides_all_gpus, read_gpus

EVERY_S, LIMIT_S = 10.0, 5.0


class GpuReadings(threading.Thread):
    """The readings for the `ranks` of this host, in their order. `send` sends the launcher a message."""

    def __init__(
        self, ranks: Sequence[int], env: Mapping[str, str], send: Callable[..., None]
    ) -> None:
        super().__init__(daemon=True)
        self._ranks, self._env, self._send = ranks, dict(env), send
        self._is_over = threading.Event()

    def run(self) -> None:
        hides_all = hides_all_gpus(self._env)
        while not hides_all and not self._is_over.wait(EVERY_S):
            rows = self._read()
            if all(row[name] is None for row in rows for name in CHANGING if name != "slowed"):
                return
            self._send("gpus", ranks=rows)

    def _read(self) -> list[dict[str, Any]]:
        """The facts of each rank whose GPU is known, see `process_group.device_of`."""
        gpus = read_gpus(self._env.get("PATH"), timeout_s=LIMIT_S) or []
        numbers = chosen_gpus(gpus, self._env)
        return [
            {"rank": rank, **{name: getattr(gpus[number], name) for name in CHANGING}}
            for rank, number in zip(self._ranks, numbers, strict=False)
            if number is not None
        ]

    def stop(self) -> None:
        """Return when no tool runs any more, so that it is not taken for a process of the script."""
        self._is_over.set()
        self.join(LIMIT_S)
