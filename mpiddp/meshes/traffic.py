"""What the links of a cluster carry in one step of a hybrid-parallel training, by formulas.

All figures are bytes *sent*, in one optimizer step. A collective is a ring over the ranks of its group, and a
ring enters and leaves each host once: of a group that spans hosts, one rank of each host sends over the
network, and the others send inside their host. NCCL's rings are built like this; its trees and NVLink SHARP
send less inside a host.

    all-reduce      2 (n - 1) / n · bytes    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
                                             clusters of workstations", 2009; nccl-tests, PERFORMANCE.md
    all-gather,       (n - 1) / n · bytes    the two halves of that all-reduce
    reduce-scatter

Not in these figures: embeddings and the loss, whose volume depends on their sharding; the exchanges of ep and
cp, which depend on the routing of tokens and on the attention; and the gradients' reduction over cp.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from mpiddp.meshes.layout import Layout

VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Training:
    """The sizes of a model and of a step; 0 for a size that is not given.

    params: parameters of the whole model, spread evenly over tp and pp.
    value_bytes: of one parameter, gradient or activation when it is sent.
    hidden: width of the activations between two layers; seq: tokens of a sample.
    micro_batch: samples of one forward pass; micro_batches: forward passes of one replica in a step.
    """

    params: float = 0
    value_bytes: int = 2
    layers: int = 0
    hidden: int = 0
    seq: int = 0
    micro_batch: int = 1
    micro_batches: int = 1


@dataclass(frozen=True)
class Traffic:
    """The bytes that one dimension sends in a step: of the busiest GPU inside its host, of the busiest host.

    All groups of a dimension are alike on equal hosts.
    """

    dimension: str
    operation: str
    inside: float
    network: float


def traffic(layout: Layout, training: Training) -> list[Traffic]:
    """The traffic of every dimension with more than one rank, fastest first; none of what is not known."""
    names = [name for name in reversed(list(layout.sizes)) if layout.sizes[name] > 1]
    found = (_of_dimension(layout, name, training) for name in names)
    return [each for each in found if each is not None]


_GRADIENTS = "all-reduce of gradients"
_SHARDED = "all-gather of parameters, reduce-scatter of gradients"


def _of_dimension(layout: Layout, name: str, training: Training) -> Traffic | None:
    """What each rank sends in a step, by the formulas of docs/parallelism.md; None if it is not known."""
    sizes, ranks, passes = layout.sizes, layout.sizes[name], training.micro_batches
    gather = (ranks - 1) / ranks  # of the bytes, for each rank of a ring
    # A rank's parameters, or gradients; cp gives each of its ranks a part of every sequence.
    own = training.params * training.value_bytes / (sizes.get("tp", 1) * sizes.get("pp", 1))
    values = training.micro_batch * training.seq * training.hidden / sizes.get("cp", 1)
    activations = values * training.value_bytes
    if name == "pp" and activations:
        # Forward, and their gradients backward, from each rank of tp to its own peer (Narayanan et al.,
        # "Efficient large-scale language model training on GPU clusters", 2021, section 3.2).
        operation, volume = "activations and their gradients", activations * passes
    elif name == "tp" and activations:
        # Two all-reduces in the forward pass of a layer and two in the backward pass (Shoeybi et al.,
        # "Megatron-LM", 2019, section 3); with sequence parallelism as much (Korthikanti et al., 2022).
        layers = -(-training.layers // sizes.get("pp", 1))  # of the largest stage
        operation = "all-reduce of activations"
        volume = 4 * 2 * gather * activations * layers * passes
    elif name in ("tp", "pp", "ep", "cp") or not training.params:
        return None
    elif name == "dp_shard":
        # Gather the parameters for each pass, scatter the gradients (Rajbhandari et al., "ZeRO", 2020,
        # section 7). FSDP2 does so for every micro-batch.
        operation, volume = _SHARDED, 3 * gather * own * passes
    elif sizes.get("dp_shard", 1) > 1:
        # The gradients have been scattered before (Zhao et al., "PyTorch FSDP", 2023, section 3.2.2).
        operation, volume = _GRADIENTS, 2 * gather * own / sizes["dp_shard"] * passes
    else:
        operation, volume = _GRADIENTS, 2 * gather * own
    return Traffic(name, operation, *_busiest(layout, name, volume, is_ring=name != "pp"))


def _busiest(layout: Layout, name: str, volume: float, *, is_ring: bool) -> tuple[float, float]:
    """What the busiest GPU sends inside its host, and the busiest host to others.

    Each rank sends `volume` to the next of its ring, which visits each host once; else it exchanges it with
    the next stage, in both directions.
    """
    inside: Counter[int] = Counter()
    network: Counter[str] = Counter()
    for group in layout.groups(name):
        pairs = list(pairwise([*group, group[0]] if is_ring else group))
        both = pairs if is_ring else [*pairs, *((b, a) for a, b in pairs)]
        for source, target in both:
            if layout.hosts[source] == layout.hosts[target]:
                inside[source] += 1
            else:
                network[layout.hosts[source]] += 1
    most = (max(counts.values(), default=0) for counts in (inside, network))
    return next(most) * volume, next(most) * volume
