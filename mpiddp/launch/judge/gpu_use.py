"""The use of the GPUs of an attempt, which the agents read every ten seconds.

A rank that waits in NCCL keeps its GPU in use. So if one GPU idles and the others do not, the other ranks
wait for the rank of the idle GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

IDLE = 10.0  # percent of use, in all of the latest readings
_LATEST = 3  # readings


class GpuUse:
    """The GPU of one rank."""

    def __init__(self) -> None:
        self.facts: Mapping[str, Any] = {}  # of the latest reading, see CHANGING in hosts/gpus.py
        self._uses = deque[float](maxlen=_LATEST)
        self._count, self._sum = 0, 0.0
        self._most = {"memory": 0, "temperature": 0}
        self._slowed: dict[str, None] = {}  # the different reasons why it was slow

    def add(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        if facts["use"] is not None:
            self._uses.append(facts["use"])
            self._count, self._sum = self._count + 1, self._sum + facts["use"]
        self._most = {name: max(most, facts[name] or 0) for name, most in self._most.items()}
        self._slowed |= {facts["slowed"]: None} if facts["slowed"] else {}

    @property
    def recent(self) -> float | None:
        """The highest use of the latest readings, in percent; None before there are enough."""
        return max(self._uses) if len(self._uses) == _LATEST else None

    @property
    def summary(self) -> dict[str, Any]:
        """Mean use, most memory, highest temperature and reasons of slowness, over the whole attempt."""
        use = round(self._sum / self._count, 1) if self._count else None
        most = {name: value or None for name, value in self._most.items()}
        total = self.facts.get("memory_total")
        return {"use": use, **most, "memory_total": total, "slowed": [*self._slowed]}


def find_idle(gpus: Mapping[int, GpuUse], ranks: Sequence[int]) -> tuple[list[int], str]:
    """The ranks whose GPU idles, and a clause about the GPUs of the others; "" if all idle."""
    recent = {rank: gpus[rank].recent for rank in ranks if rank in gpus}
    uses = {rank: use for rank, use in recent.items() if use is not None}
    idle = [rank for rank, use in uses.items() if use < IDLE]
    others = [use for rank, use in uses.items() if rank not in idle]
    if not others:
        return idle, ""
    mean = sum(others) / len(others)  # statistics would take 4 ms of each start
    return idle, f", and those of the others are in use ({mean:.0f}%)"
