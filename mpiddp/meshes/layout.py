"""Which ranks form the groups of a mesh. A pure function of the ranks' hosts; needs no torch.

    lay_out(["node1", "node2", "node1", "node2"], {"dp": 2, "tp": 2})  ->  ranks (0, 2, 1, 3)

Here mpirun has dealt the ranks out to two hosts in turn. Groups of consecutive ranks, (0, 1) and (2, 3),
would send every all-reduce of a layer over the network; (0, 2) and (1, 3) are inside a host.

**The rule.** The ranks stand in a line, host by host. The fastest dimension (tp) takes neighbours out of
this line: its groups lie inside a host. The next dimension takes neighbouring groups, and so on to the
slowest (pp). So a faster dimension gets the faster links, and a group crosses the network only where a
host does not hold a whole number of such groups.

**The order within a group.** torch sorts the ranks of a new group, while a rank's coordinate is its position
in the mesh. DTensor uses both, so the two have to agree along every dimension. Where ranks alternate
between hosts, several lines keep tp inside a host. The one taken keeps as many dimensions as possible host
by host, with ascending groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise


@dataclass(frozen=True)
class Layout:
    """The ranks of a mesh by their coordinates.

    sizes: the size of each dimension, slowest first.
    ranks: [world_size], every rank once, in the order of the coordinates: the last dimension varies fastest.
    hosts: [world_size], the host of each rank.
    """

    sizes: Mapping[str, int]
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """The groups along a dimension: ranks that differ in this coordinate alone, in its order."""
        size, stride = self.sizes[name], self._stride(name)
        starts = (
            block + offset
            for block in range(0, len(self.ranks), size * stride)
            for offset in range(stride)
        )
        return [self.ranks[start : start + size * stride : stride] for start in starts]

    def coordinates_at(self, index: int) -> tuple[int, ...]:
        """The position in each dimension of the rank `ranks[index]`."""
        return tuple(index // self._stride(name) % size for name, size in self.sizes.items())

    def hosts_of(self, group: Sequence[int]) -> list[str]:
        """The hosts of the ranks of a group, each once."""
        return list(dict.fromkeys(self.hosts[rank] for rank in group))

    @property
    def is_ascending(self) -> bool:
        """Whether each group along each dimension is in the order of its ranks, as torch's groups are."""
        return all(
            first < second
            for name in self.sizes
            for group in self.groups(name)
            for first, second in pairwise(group)
        )

    def _stride(self, name: str) -> int:
        names = list(self.sizes)
        return math.prod(self.sizes[faster] for faster in names[names.index(name) + 1 :])


def lay_out(
    hosts: Sequence[str], sizes: Mapping[str, int], *, tp_across_hosts: bool = False
) -> Layout:
    """The layout of a mesh on these hosts. Every rank computes the same one.

    If ranks are numbered host by host, as `mpiddp launch` and torchrun number them, the ranks of the layout
    are 0, 1, 2, … Only then is the order of the ranks of several dimensions together ascending as well.

    Args:
        hosts: the host of every rank: [world_size].
        sizes: as `mpiddp.meshes.dimensions.resolve` returns them: slowest first, tp last. Their product is
            world_size, and tp divides the number of ranks of each host.
        tp_across_hosts: tp need not divide these numbers.

    Returns:
        A layout in which no group of tp spans hosts, unless `tp_across_hosts`. It is ascending wherever
        mpirun places the ranks by itself; a rankfile can prevent this.
    """
    assert math.prod(sizes.values()) == len(hosts), "resolve() has checked this"
    layouts = _candidates(hosts, sizes, tp_across_hosts)
    most_local = next(layouts)
    if most_local.is_ascending:
        return most_local
    return next((each for each in layouts if each.is_ascending), most_local)


def _candidates(
    hosts: Sequence[str], sizes: Mapping[str, int], tp_across_hosts: bool
) -> Iterator[Layout]:
    """Layouts in which fewer and fewer dimensions take their groups host by host; tp always does."""
    least = 0 if tp_across_hosts or "tp" not in sizes else 1
    # The slowest dimension takes all that there is, so its order is always that of the ranks.
    for num_local in range(max(len(sizes) - 1, least), least - 1, -1):
        yield Layout(sizes, _arrange(hosts, list(sizes.values()), num_local), tuple(hosts))


def _arrange(hosts: Sequence[str], sizes: Sequence[int], num_local: int) -> tuple[int, ...]:
    """The ranks by coordinates. The `num_local` fastest dimensions take neighbours in the line of hosts.

    The others take neighbours in the order of the ranks.
    """
    ranks_of: dict[str, list[int]] = {}  # in the order of the hosts' lowest ranks
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    units: list[tuple[int, ...]] = [(rank,) for rank in chain.from_iterable(ranks_of.values())]
    for level, size in enumerate(reversed(sizes)):
        if level == num_local:
            units.sort()
        units = [
            tuple(chain.from_iterable(sorted(units[start : start + size])))
            for start in range(0, len(units), size)
        ]
    return units[0]
