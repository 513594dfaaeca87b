"""The dimensions of a mesh: their names and order, and the sizes that fill a cluster.

    resolve({"tp": 8, "pp": 2}, ["node1"] * 8 + ["node2"] * 8)  ->  {"pp": 2, "dp": 1, "tp": 8}

Any text or number of a user comes through here, so this module has the sentences for what does not fit.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mpiddp.errors import UserError
from mpiddp.text import counted, did_you_mean, listed, parse_whole, shown

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
REMAINING = -1  # the size of the one dimension that takes what the others leave
_BELOW = 10**9  # as parse_whole
_EXPECTED = f"1 to {_BELOW - 1}, or {REMAINING} for what the others leave"
_EXAMPLE = "Example: dp=32 tp=8 pp=2"
_DATA_PARALLEL = ("dp", "dp_shard", "dp_replicate")


def parse_sizes(texts: Iterable[str]) -> dict[str, int]:
    """The sizes in "dp=32 tp=8 pp=2", in the order of the text. Commas separate them too.

    Raises:
        UserError: another form, an unknown name, a name twice, a size below 1 that is not -1.
    """
    sizes: dict[str, int] = {}
    for text in (part for each in texts for part in each.split(",") if part.strip()):
        name, equals, value = (part.strip() for part in text.partition("="))
        name = name.lower()
        if not equals or not name:
            raise UserError(f'"{shown(text)}" is not a dimension and its size. {_EXAMPLE}')
        _check_name(name)
        if name in sizes:
            raise UserError(f"{name} is given twice: {name}={sizes[name]} and {shown(text)}.")
        try:
            sizes[name] = REMAINING if value == str(REMAINING) else parse_whole(value, 1)
        except ValueError as error:
            raise UserError(
                f"{shown(text)}: expected {error}, or {REMAINING} for what the others leave."
            ) from None
    return sizes


def check_sizes(sizes: Mapping[str, object]) -> dict[str, int]:
    """The sizes that a script gives, as `parse_sizes` returns them. Raises UserError too."""
    checked = {}
    for name, size in sizes.items():
        _check_name(name)
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise UserError(f"{name}={shown(repr(size))}: expected a whole number, {_EXPECTED}.")
        number = operator.index(size)  # numpy's integers too
        if number != REMAINING and not 1 <= number < _BELOW:
            raise UserError(f"{name}={_number(number)}: expected {_EXPECTED}.")
        checked[name] = number
    return checked


def _check_name(name: str) -> None:
    if name not in DIMENSIONS:
        raise UserError(
            f'"{shown(name)}" is not a dimension.{did_you_mean(name, DIMENSIONS)} '
            f"Expected one of: {', '.join(DIMENSIONS)}."
        )


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
            layer. The sentence names the nearest sizes that do fit.
    """
    sizes = dict(requested)
    unknown = [name for name, size in sizes.items() if size == REMAINING]
    if len(unknown) > 1:
        raise UserError(f"only one dimension may be {REMAINING}, not {' and '.join(unknown)}.")
    if not unknown and not any(name in sizes for name in _DATA_PARALLEL):
        sizes["dp"] = REMAINING
    known = math.prod(size for size in sizes.values() if size != REMAINING)
    counts = Counter(hosts)
    per_host = 0 if tp_across_hosts else math.gcd(*counts.values())
    fits = f"{size_text(_nearest(sizes, len(hosts), per_host, layers))} fits."
    if per_host and per_host % max(sizes.get("tp", 1), 1):
        raise UserError(f"{_where_tp_does_not_fit(sizes['tp'], counts, unit)}; {fits}")
    free = next((name for name, size in sizes.items() if size == REMAINING), None)
    if len(hosts) % known or (free is None and known != len(hosts)):
        needs = "" if free is None else "a multiple of "
        raise UserError(
            f"{size_text(requested)} needs {needs}{_number(known)} {unit}{'s' * (known != 1)}, but "
            f"{cluster_text(counts, unit)}; {fits}"
        )
    if free is not None:
        sizes[free] = len(hosts) // known
    if free == "tp" and per_host and per_host % sizes["tp"]:
        raise UserError(
            f"{size_text(requested)} leaves tp={sizes['tp']}, which does not fit into a host: "
            f"{cluster_text(counts, unit)}; {fits}"
        )
    if layers and sizes.get("pp", 1) > layers:
        is_more = f"pp={sizes['pp']} is"
        if free == "pp":
            is_more = f"{size_text(requested)} leaves pp={sizes['pp']}, which is"
        raise UserError(
            f"{is_more} more than --layers {layers}: some stages would have no layer; {fits}"
        )
    return {name: sizes[name] for name in DIMENSIONS if name in sizes}


def size_text(sizes: Mapping[str, int]) -> str:
    """ "dp=32 tp=8 pp=2", in the order of the mapping."""
    return " ".join(f"{name}={_number(size)}" for name, size in sizes.items())


def cluster_text(counts: Counter[str], unit: str = "GPU") -> str:
    """ "64 hosts × 8 GPUs = 512", or "2 hosts (node1 4, node2 2) = 6".

    Args:
        counts: how many each host has.
    """
    number, total = counted(len(counts), "host"), counts.total()
    if len(set(counts.values())) == 1:
        return f"{number} × {counted(next(iter(counts.values())), unit)} = {total}"
    return (
        f"{number} ({listed([f'{host} {count}' for host, count in counts.items()], 4)}) = {total}"
    )


def _where_tp_does_not_fit(tp: int, counts: Counter[str], unit: str) -> str:
    """ "tp=6 does not fit into hosts of 8 GPUs"."""
    unfit = {host: count for host, count in counts.items() if count % tp}
    if len(set(counts.values())) == 1:
        where = f"hosts of {counted(next(iter(counts.values())), unit)}"
    else:
        host, count = next(iter(unfit.items()))
        more = f" ({counted(len(unfit), 'host')} like this)" if len(unfit) > 1 else ""
        where = f"{host}, which has {counted(count, unit)}{more}"
    return f"tp={_number(tp)} does not fit into {where}"


def _nearest(sizes: Mapping[str, int], total: int, per_host: int, layers: int) -> dict[str, int]:
    """Sizes that fill `total` ranks, near to `sizes` in the ratio of each size.

    What is left goes to the dimension that is -1, else to the data-parallel one.

    Args:
        per_host: groups of tp fill hosts if tp divides this; 0 if they may span hosts.
        layers: the most stages; 0 for any number.
    """
    found = dict(sizes)
    for name, most in (("tp", per_host), ("pp", layers)):
        if found.get(name) == REMAINING and most:
            found[name] = most  # it cannot take what is left: data parallelism does
            if not any(each in found for each in _DATA_PARALLEL):
                found["dp"] = 1
    free = next((name for name, size in found.items() if size == REMAINING), None)
    free = free or next((name for name in _DATA_PARALLEL if name in found), next(iter(found)))
    left = total
    for name in [name for name in reversed(DIMENSIONS) if name in found and name != free]:
        limit = math.gcd(left, per_host) if name == "tp" and per_host else left
        most = layers if name == "pp" and layers else limit
        found[name] = _nearest_divisor(limit, found[name], most)
        left //= found[name]
    found[free] = left
    return found


def _nearest_divisor(number: int, wanted: int, most: int) -> int:
    """The divisor of `number`, at most `most`, that is nearest to `wanted` in ratio."""
    distance = {
        each: abs(math.log(each) - math.log(wanted)) for each in _divisors(number) if each <= most
    }
    return min(distance, key=lambda each: (distance[each], each))


def _divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _number(number: int) -> str:
    """The number, or its magnitude if it is longer than a line: Python refuses to print 10**5000."""
    digits = int(abs(number).bit_length() * math.log10(2))
    return str(number) if digits < 30 else f"{'-' * (number < 0)}10^{digits}"
