"""What `mpiddp mesh` prints: the hosts with their coordinates, the groups, the traffic of a step.

Groups of ranks take few characters, so 512 GPUs fit on a screen: compact([0, 8, 16, 24])  ->  "0-24:8"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from mpiddp.meshes.dimensions import cluster_text, size_text
from mpiddp.meshes.layout import Layout
from mpiddp.meshes.traffic import Traffic, Training
from mpiddp.text import align_columns, counted
from mpiddp.text import size_text as bytes_text

_SHOWN = 3  # of a long list, and its last entry


def text(layout: Layout, traffic: Sequence[Traffic], training: Training) -> str:
    """The report, with the first and the last entries of a long list."""
    head = f"{cluster_text(Counter(layout.hosts))}: {size_text(layout.sizes)}"
    parts = [head, _hosts(layout), _groups(layout)]
    return "\n\n".join([*filter(None, parts), *([_traffic(traffic, training)] if traffic else [])])


def _hosts(layout: Layout) -> str:
    """A line for each host: its ranks and their coordinates."""
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(layout.hosts):
        ranks_of.setdefault(host, []).append(rank)
    rows = [("host", "ranks", *layout.sizes)]
    for host in _shortened(list(ranks_of)):
        ranks = ranks_of.get(host, [])  # none of the "…" that stands for the others
        columns = zip(*map(layout.coordinates_of, ranks), strict=True)
        cells = [compact(sorted(set(each))) for each in columns] or [""] * len(layout.sizes)
        rows.append((host, compact(ranks), *cells))
    return align_columns(rows)


def _groups(layout: Layout) -> str:
    """For each dimension of more than one rank: how many groups, over how many hosts, which ranks."""
    lines = []
    for name in (name for name in reversed(list(layout.sizes)) if layout.sizes[name] > 1):
        groups = layout.groups(name)
        most = max(len(layout.hosts_of(group)) for group in groups)
        where = "inside 1 host" if most == 1 else f"over {most} hosts"
        number = counted(len(groups), "group")
        lines.append(f"{name}: {number} of {layout.sizes[name]} ranks, each {where}")
        lines.append(f"  {'  '.join(_shortened([compact(group) for group in groups]))}")
    return "\n".join(lines)


def _traffic(traffic: Sequence[Traffic], training: Training) -> str:
    rows = [("sent in one step", "NVLink, per GPU", "network, per host", "")]
    for each in traffic:
        inside, network = bytes_text(each.inside), bytes_text(each.network)
        rows.append((each.dimension, inside, network, each.operation))
    total = [sum(each.inside for each in traffic), sum(each.network for each in traffic)]
    rows.append(("all of these", bytes_text(total[0]), bytes_text(total[1]), ""))
    step = f"{training.micro_batches} × {counted(training.micro_batch, 'sample')}"
    if training.seq:
        step += f" of {training.seq:,} tokens"
    model = f"; {training.params:,.0f} parameters" if training.params else ""
    return (
        f"{align_columns(rows, right=[1, 2])}\n"
        f"One step is {step}{model}; {training.value_bytes * 8} bits per value.\n"
        "A figure is that of the busiest GPU or host. NVLink means whatever connects the GPUs of a host."
    )


def compact(numbers: Sequence[int]) -> str:
    """Ranks or coordinates as Slurm writes them: "0-7", "0-248:8" (every eighth), "5", else "0,3,4"."""
    if len(numbers) > 2:
        step = numbers[1] - numbers[0]
        if step > 0 and all(second - first == step for first, second in pairwise(numbers)):
            return f"{numbers[0]}-{numbers[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, numbers))


def _shortened(entries: Sequence[str]) -> list[str]:
    """The first entries and the last one of a long list, with "…" between them."""
    if len(entries) <= _SHOWN + 2:
        return list(entries)
    return [*entries[:_SHOWN], "…", entries[-1]]
