"""What `mpiddp mesh` prints: the hosts with their coordinates, the groups, the traffic of each link.

Groups of ranks take few characters, so 512 GPUs fit on a screen: compact([0, 8, 16, 24])  ->  "0-24:8"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from mpiddp.meshes.dimensions import cluster_text, size_text
from mpiddp.meshes.layout import Layout
from mpiddp.meshes.traffic import Traffic, Training
from mpiddp.text import align_columns, counted

_MOST_PARTS = 6
_SHOWN = 3  # of a long list, and its last entry


def text(
    layout: Layout, traffic: Sequence[Traffic], training: Training, *, all_groups: bool = False
) -> str:
    """The report. `all_groups` lists every host and every group."""
    head = f"{cluster_text(Counter(layout.hosts))} ranks: {size_text(layout.sizes)}"
    parts = [head, _hosts(layout, traffic, all_hosts=all_groups), _groups(layout, all_groups)]
    if traffic:
        parts.append(_traffic(layout, traffic, training))
    return "\n\n".join(part for part in parts if part)


def record(layout: Layout, traffic: Sequence[Traffic]) -> dict[str, Any]:
    """The same as JSON. A dimension without a figure has no bytes. GPUs are in the order of the ranks."""
    inside = _inside_by_rank(traffic)
    ranks_of: dict[str, int] = {}
    for host in layout.hosts:
        ranks_of[host] = ranks_of.get(host, 0) + 1
    dimensions: dict[str, dict[str, Any]] = {
        name: {"size": size, "groups": layout.groups(name)} for name, size in layout.sizes.items()
    }
    for each in traffic:
        dimensions[each.dimension]["operation"] = each.operation
        if not each.missing:
            dimensions[each.dimension] |= {
                "inside_bytes_per_gpu": each.most_inside,
                "network_bytes_per_host": each.most_network,
            }
    return {
        "hosts": ranks_of,
        "mesh": dict(layout.sizes),
        "dimensions": dimensions,
        "inside_bytes_by_gpu": [inside.get(rank, 0.0) for rank in range(len(layout.hosts))],
        "network_bytes_by_host": _network_by_host(traffic),
    }


def bytes_text(number: float) -> str:
    """Bytes in decimal units, with three digits: "1.70 GB", "540 MB", "0"."""
    if number == 0:
        return "0"
    unit = 0
    while number >= 999.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    digits = 0 if unit == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:,.{digits}f} {_UNITS[unit]}"


_SENT = ("NVLink, per GPU", "network, per host")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def _hosts(layout: Layout, traffic: Sequence[Traffic], *, all_hosts: bool) -> str:
    """A line for each host: its ranks and their coordinates; with `all_hosts` its traffic too."""
    names = list(layout.sizes)
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(layout.hosts):
        ranks_of.setdefault(host, []).append(rank)
    hosts = shortened(list(ranks_of), all_entries=all_hosts)
    wanted = {rank for host in hosts for rank in ranks_of.get(host, ())}
    coordinates = {
        rank: layout.coordinates_of(rank) for rank in range(len(layout.hosts)) if rank in wanted
    }
    shows_traffic = all_hosts and any(not each.missing for each in traffic)
    inside, network = _inside_by_rank(traffic), _network_by_host(traffic)
    rows = [("host", "ranks", *names, *(_SENT if shows_traffic else ()))]
    for host in hosts:
        if host not in ranks_of:  # "…" stands for the others
            rows.append((host, *[""] * (len(names) + 1)))
            continue
        ranks = ranks_of[host]
        columns = zip(*(coordinates[rank] for rank in ranks), strict=True)
        row = [host, compact(ranks), *(compact(sorted(set(each))) for each in columns)]
        if shows_traffic:
            sent = sorted({inside.get(rank, 0.0) for rank in ranks})
            row += [_range(sent[0], sent[-1]), bytes_text(network.get(host, 0.0))]
        rows.append(tuple(row))
    return align_columns(rows)


def _range(least: float, most: float) -> str:
    texts = [bytes_text(least), bytes_text(most)]
    return " to ".join(dict.fromkeys(texts))


def _groups(layout: Layout, all_groups: bool) -> str:
    """For each dimension of more than one rank: how many groups, over how many hosts, which ranks."""
    lines = []
    for name in reversed(list(layout.sizes)):
        size = layout.sizes[name]
        if size == 1:
            continue
        groups = layout.groups(name)
        spans = [len(layout.hosts_of(group)) for group in groups]
        hosts = counted(max(spans), "host")
        if min(spans) < max(spans):
            hosts = f"{min(spans)} to {hosts}"
        where = "inside 1 host" if max(spans) == 1 else f"over {hosts}"
        each = ", each" if len(groups) > 1 else ""
        lines.append(f"{name}: {counted(len(groups), 'group')} of {size} ranks{each} {where}")
        shown = shortened([compact(group) for group in groups], all_entries=all_groups)
        lines += [f"  {group}" for group in shown] if all_groups else [f"  {'  '.join(shown)}"]
    return "\n".join(lines)


def _traffic(layout: Layout, traffic: Sequence[Traffic], training: Training) -> str:
    rows = [("sent in one step", *_SENT, "")]
    for each in traffic:
        if each.missing == "no estimate":
            rows.append((each.dimension, "no estimate", "no estimate", each.operation))
        elif each.missing:
            rows.append((each.dimension, "?", "?", f"{each.operation}: add {each.missing}"))
        else:
            inside, network = bytes_text(each.most_inside), bytes_text(each.most_network)
            rows.append((each.dimension, inside, network, each.operation))
    inside = bytes_text(max(_inside_by_rank(traffic).values(), default=0.0))
    by_host = _network_by_host(traffic)
    busiest = max(by_host, key=lambda host: by_host[host], default="")
    network = bytes_text(by_host.get(busiest, 0.0))
    label = "known" if any(each.missing for each in traffic) else "all"
    rows.append((label, inside, network, _busiest(busiest, by_host, layout)))
    return f"{align_columns(rows, right=[1, 2])}\n{_assumptions(training)}"


def _busiest(busiest: str, by_host: Mapping[str, float], layout: Layout) -> str:
    if not by_host:
        return ""
    most = by_host[busiest]
    as_busy = sum(sent > most * (1 - 1e-9) for sent in by_host.values())
    if as_busy == len(set(layout.hosts)):
        return "every host"
    return f"the busiest, {busiest}" + (f" and {as_busy - 1} more" if as_busy > 1 else "")


def _assumptions(training: Training) -> str:
    """What the figures hold for."""
    number = training.micro_batches
    step = (
        f"{number} micro-batch{'es' * (number != 1)} of {counted(training.micro_batch, 'sample')}"
    )
    if training.seq:
        step += f" of {training.seq:,} tokens"
    model = f"; {training.params:,.0f} parameters" if training.params else ""
    return (
        f"One step is {step}{model}; {training.value_bytes * 8} bits per value.\n"
        "Where GPUs or hosts differ, a figure is the largest. NVLink stands for whatever connects the "
        "GPUs of a host.\ndocs/parallelism.md has the formulas."
    )


def _inside_by_rank(traffic: Sequence[Traffic]) -> dict[int, float]:
    by_rank: dict[int, float] = {}
    for each in traffic:
        for rank, sent in each.inside.items():
            by_rank[rank] = by_rank.get(rank, 0) + sent
    return by_rank


def _network_by_host(traffic: Sequence[Traffic]) -> dict[str, float]:
    by_host: dict[str, float] = {}
    for each in traffic:
        for host, sent in each.network.items():
            by_host[host] = by_host.get(host, 0) + sent
    return by_host


def compact(numbers: Sequence[int]) -> str:
    """Ranks or coordinates as Slurm writes them: "0-7", "0-248:8" (every eighth), "0-3,8-11", "5"."""
    if len(numbers) > 2:
        step = numbers[1] - numbers[0]
        if step > 0 and all(second - first == step for first, second in pairwise(numbers)):
            return f"{numbers[0]}-{numbers[-1]}" + (f":{step}" if step > 1 else "")
    parts = [
        str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ','}{run[-1]}"
        for run in _runs(numbers)
    ]
    if len(parts) > _MOST_PARTS:
        return f"{','.join(parts[:_SHOWN])},…,{parts[-1]} ({counted(len(numbers), 'rank')})"
    return ",".join(parts)


def shortened(entries: Sequence[str], *, all_entries: bool = False) -> list[str]:
    """The first entries and the last one of a long list, with "…" between them."""
    if all_entries or len(entries) <= _SHOWN + 2:
        return list(entries)
    return [*entries[:_SHOWN], "…", entries[-1]]


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """The numbers in parts of consecutive ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
