"""The dimensions of a mesh: their names and order, and the sizes that fill a cluster.

    resolve({"tp": 8, "pp": 2}, ["node1"] * 8 + ["node2"] * 8)  ->  {"pp": 2, "dp": 1, "tp": 8}

Any text or number of a user comes through here, so this module has the sentences for what does not fit.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mpiddp.errors import UserError
from mpiddp.text import counted, did_you_mean, listed, shown

# From the slowest to the fastest: neighbouring ranks differ in the last one. Megatron-LM orders its groups
# like this (tp-cp-ep-dp-pp, fastest first), and torchtitan too (pp, dp_replicate, dp_shard, cp, tp).
DIMENSIONS = {
    "pp": "pipeline stages, each with a part of the layers",
    "dp_replicate": "replicas of the groups of dp_shard (hybrid sharding)",
    "dp": "data-parallel replicas of the model",
    "dp_shard": "data-parallel ranks that share the parameters in shards (FSDP)",
    "ep": "ranks that share the experts of a layer",
    "cp": "ranks that share a sequence",
    "tp": "ranks that share the matrices of a layer, inside a host",
}
REMAINING = -1  # the size of the one dimension that takes all remaining ranks
_DATA_PARALLEL = ("dp", "dp_shard", "dp_replicate")


def parse_sizes(texts: Iterable[str]) -> dict[str, int]:
    """The sizes in "dp=32 tp=8 pp=2", in the order of the text. Commas separate them too.

    Raises:
        UserError: another form, an unknown name, a name twice, a size below 1 that is not -1.
    """
    sizes: dict[str, object] = {}
    for text in (part.strip() for each in texts for part in each.split(",") if part.strip()):
        name, _, value = (part.strip() for part in text.lower().partition("="))
        if name in sizes:
            raise UserError(f"{name} is given twice: {name}={sizes[name]} and {shown(text)}.")
        sizes[name] = int(value) if re.fullmatch("-?[0-9]{1,9}", value, re.ASCII) else value
    return check_sizes(sizes)


def check_sizes(sizes: Mapping[str, object]) -> dict[str, int]:
    """The sizes that a script gives, as `parse_sizes` returns them. Raises UserError too."""
    checked = {}
    for name, size in sizes.items():
        if name not in DIMENSIONS:
            raise UserError(
                f'"{shown(name)}" is not a dimension.{did_you_mean(name, DIMENSIONS)} '
                f"Expected one of: {', '.join(DIMENSIONS)}. Example: dp=32 tp=8 pp=2"
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


def resolve(
    requested: Mapping[str, int],
    hosts: Sequence[str],
    *,
    unit: str = "GPU",
    tp_across_hosts: bool = False,
    layers: int = 0,
) -> dict[str, int]:
    """The size of every dimension, slowest first. Their product is the number of ranks.

    The dimensions are those of `requested`. One of them may be -1: it takes the ranks that the others
    leave. Without -1 and without any data-parallel dimension, dp does this. No other dimension is
    ever inferred: a script that does not ask for stages does not exchange anything between them.

    Args:
        requested: valid sizes, see `parse_sizes`.
        hosts: the host of every rank: [world_size].
        unit: the noun for a rank in errors, "GPU" or "rank".
        tp_across_hosts: groups of tp may span hosts, as where NVLink connects several.
        layers: of the model: there are no more stages. 0 if it is not known.

    Raises:
        UserError: the sizes do not fill the hosts, a group of tp does not fit into one, or a stage has no
            layer.
    """
    sizes = dict(requested)
    free = [name for name, size in sizes.items() if size == REMAINING]
    if len(free) > 1:
        raise UserError(f"only one dimension may be {REMAINING}, not {' and '.join(free)}.")
    if not free and not any(name in sizes for name in _DATA_PARALLEL):
        free, sizes["dp"] = ["dp"], REMAINING
    known = [(name, size) for name, size in sizes.items() if size != REMAINING]
    product, counts = math.prod(size for _, size in known), Counter(hosts)
    if len(hosts) % product or (not free and product != len(hosts)):
        names = " × ".join(name for name, size in known if size > 1)
        verb = "does not divide" if free else "is not"
        raise UserError(f"{names} = {product} {verb} {cluster_text(counts, unit)}.")
    if free:
        sizes[free[0]] = len(hosts) // product
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    unfit = [] if tp_across_hosts else [host for host in counts if counts[host] % tp]
    if unfit:
        raise UserError(
            f"tp={tp} does not fit into {unfit[0]}, which has {counted(counts[unfit[0]], unit)}: the groups "
            "of tp lie inside hosts."
        )
    if layers and pp > layers:
        raise UserError(f"pp={pp} is more than {layers} layers: some stages would have no layer.")
    return {name: sizes[name] for name in DIMENSIONS if name in sizes}


def size_text(sizes: Mapping[str, int]) -> str:
    """ "dp=32 tp=8 pp=2", in the order of the mapping."""
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def cluster_text(counts: Counter[str], unit: str = "GPU") -> str:
    """ "512 GPUs (64 hosts × 8)", or "6 GPUs (node1 4, node2 2)". `counts`: how many each host has."""
    hosts = listed([f"{host} {count}" for host, count in counts.items()], 4)
    if len(set(counts.values())) == 1:
        hosts = f"{counted(len(counts), 'host')} × {next(iter(counts.values()))}"
    return f"{counted(counts.total(), unit)} ({hosts})"
