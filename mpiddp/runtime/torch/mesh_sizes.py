"""The sizes of a mesh, and the check that its tensor-parallel groups lie inside hosts. Needs no torch.

resolve({"tp": 8, "pp": 2}, ["node1"] * 8 + ["node2"] * 8)  ->  {"pp": 2, "dp": 1, "tp": 8}
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence

from mpiddp.errors import UserError
from mpiddp.text import counted, did_you_mean, listed, shown

# From the slowest to the fastest links: neighbouring ranks differ in the last dimension. Megatron-LM orders
# its groups like this (tp-cp-ep-dp-pp, fastest first), and so does torchtitan.
DIMENSIONS = ("pp", "dp_replicate", "dp", "dp_shard", "ep", "cp", "tp")
REMAINING = -1  # the size of the one dimension that takes all remaining ranks
_DATA_PARALLEL = ("dp", "dp_shard", "dp_replicate")


def check_sizes(sizes: Mapping[str, object]) -> dict[str, int]:
    """The sizes that a script asks for, as whole numbers, or UserError."""
    checked = {}
    for name, size in sizes.items():
        if name not in DIMENSIONS:
            raise UserError(
                f'"{shown(name)}" is not a dimension.{did_you_mean(name, DIMENSIONS)} '
                f"Expected one of: {', '.join(DIMENSIONS)}.",
                fix="for example dp=32, tp=8, pp=2",
            )
        try:
            number = operator.index(size)  # type: ignore[arg-type]  # numpy's integers too
        except TypeError:
            number = 0
        if number < 1 and number != REMAINING:
            raise UserError(
                f"{name}={shown(repr(size))}: expected a whole number, 1 or more, or {REMAINING} for all "
                "remaining ranks."
            )
        checked[name] = number
    return checked


def resolve(requested: Mapping[str, int], hosts: Sequence[str], *, tp_across_hosts: bool = False) -> dict[str, int]:
    """The size of every dimension, slowest first. Their product is the number of ranks.

    The dimensions are those of `requested`. One of them may be -1: it takes the ranks that the others
    leave. Without -1 and without any data-parallel dimension, dp does this. No other dimension is
    ever inferred: a script that does not ask for stages does not exchange anything between them.

    `requested` is what `check_sizes` returns, and `hosts` has the host of every rank: [world_size]. Raises
    UserError if the sizes do not fill the hosts, or a group of tp is not inside one host.
    """
    sizes = dict(requested)
    free = [name for name, size in sizes.items() if size == REMAINING]
    if len(free) > 1:
        raise UserError(f"only one dimension may be {REMAINING}, not {' and '.join(free)}.")
    if not free and not any(name in sizes for name in _DATA_PARALLEL):
        free, sizes["dp"] = ["dp"], REMAINING
    fixed = [(name, size) for name, size in sizes.items() if size != REMAINING]
    product = math.prod(size for _, size in fixed)
    if len(hosts) % product or (not free and product != len(hosts)):
        names = " × ".join(name for name, size in fixed if size > 1)
        verb = "does not divide" if free else "is not"
        raise UserError(f"{names} = {product} {verb} {_ranks_text(Counter(hosts))}.")
    if free:
        sizes[free[0]] = len(hosts) // product
    if not tp_across_hosts:
        _require_inside_hosts(sizes.get("tp", 1), hosts)
    return {name: sizes[name] for name in DIMENSIONS if name in sizes}


def _require_inside_hosts(tp: int, hosts: Sequence[str]) -> None:
    """Raise UserError if a group of tp spans hosts. tp is the fastest dimension: neighbours form a group."""
    for host, count in Counter(hosts).items():
        if count % tp:
            raise UserError(
                f"tp={tp} does not fit into {host}, which has {counted(count, 'rank')}: the groups of tp lie "
                "inside hosts."
            )
    for first in range(0, len(hosts), tp):
        group = range(first, first + tp)
        if len(names := dict.fromkeys(hosts[rank] for rank in group)) > 1:
            raise UserError(
                f"tp={tp} would form a group of ranks {', '.join(map(str, group))}, which are on "
                f"{' and '.join(names)}: the ranks are not numbered host by host.",
                fix="mpiddp launch, or mpirun --map-by slot",
            )


def _ranks_text(counts: Counter[str]) -> str:
    """ "16 ranks (2 hosts × 8)", or "6 ranks (node1 4, node2 2)". `counts`: the ranks of each host."""
    hosts = listed([f"{host} {count}" for host, count in counts.items()], 4)
    if len(set(counts.values())) == 1:
        hosts = f"{counted(len(counts), 'host')} × {next(iter(counts.values()))}"
    return f"{counted(counts.total(), 'rank')} ({hosts})"
