"""The ranks of a mesh by their coordinates: those of torch's `init_device_mesh`. Needs no torch.

    Layout({"dp": 2, "tp": 2}, ("node1", "node1", "node2", "node2")).groups("tp")  ->  [(0, 1), (2, 3)]

The ranks stand in a line, in the order of their numbers. The fastest dimension (tp) takes neighbours out of
this line, the next dimension neighbouring groups, and so on to the slowest (pp). So a faster dimension gets
the faster links where ranks are numbered host by host, as `mpiddp launch` and torchrun number them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpiddp.errors import UserError


@dataclass(frozen=True)
class Layout:
    """A mesh over the ranks.

    sizes: the size of each dimension, slowest first. Their product is world_size.
    hosts: [world_size], the host of each rank.
    """

    sizes: Mapping[str, int]
    hosts: tuple[str, ...]

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """The groups along a dimension: ranks that differ in this coordinate alone, in its order."""
        size, stride = self.sizes[name], self._stride(name)
        starts = (
            block + offset
            for block in range(0, len(self.hosts), size * stride)
            for offset in range(stride)
        )
        return [tuple(range(start, start + size * stride, stride)) for start in starts]

    def coordinates_of(self, rank: int) -> tuple[int, ...]:
        """The position of the rank in each dimension."""
        return tuple(rank // self._stride(name) % size for name, size in self.sizes.items())

    def hosts_of(self, group: Sequence[int]) -> list[str]:
        """The hosts of the ranks of a group, each once."""
        return list(dict.fromkeys(self.hosts[rank] for rank in group))

    def require_tp_inside_hosts(self) -> None:
        """Raise UserError if a group of tp spans hosts, because of the numbers of the ranks."""
        for group in self.groups("tp") if "tp" in self.sizes else ():
            if len(hosts := self.hosts_of(group)) > 1:
                ranks = ", ".join(map(str, group))
                raise UserError(
                    f"tp={self.sizes['tp']} would form a group of ranks {ranks}, which are on "
                    f"{' and '.join(hosts)}: the ranks are not numbered host by host. Start them with "
                    "mpiddp launch, or with mpirun --map-by slot."
                )

    def _stride(self, name: str) -> int:
        names = list(self.sizes)
        return math.prod(self.sizes[faster] for faster in names[names.index(name) + 1 :])
