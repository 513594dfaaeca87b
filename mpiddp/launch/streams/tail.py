"""The end of one stream of a job: what its ranks and mpirun have printed last."""

from __future__ import annotations

import time
from collections import deque

_BYTES = 1 << 16  # of all ranks
_LATEST = 256  # bytes of each rank


class Tail:
    """The last 64 KiB of a stream, and the last chunk of each rank. mpirun is rank -1.

    One thread adds. `latest` may be read meanwhile, `by_rank` after its end.
    """

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, bytes]] = deque()
        self._size = 0
        # By rank: when it was printed, and its end.
        self.latest: dict[int, tuple[float, bytes]] = {}

    def add(self, rank: int, text: bytes) -> None:
        """A rank has printed a text."""
        text = text[-_BYTES:]
        self.latest[rank] = (time.monotonic(), text[-_LATEST:])
        self._chunks.append((rank, text))
        self._size += len(text)
        while self._size > _BYTES:
            self._size -= len(self._chunks.popleft()[1])

    def by_rank(self) -> dict[int, list[str]]:
        """The lines of each rank, and those of mpirun."""
        texts: dict[int, bytes] = {}
        for rank, text in self._chunks.copy():
            texts[rank] = texts.get(rank, b"") + text
        return {rank: text.decode("utf-8", "replace").splitlines() for rank, text in texts.items()}
