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
from collections.abc import Mapping
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
    fsdp: dp shards the parameters too, as dp_shard does.
    """

    params: float = 0
    value_bytes: int = 2
    layers: int = 0
    hidden: int = 0
    seq: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    fsdp: bool = False


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


def all_reduce_bytes(size: float, ranks: int) -> float:
    """What each of `ranks` ranks sends in a ring all-reduce of `size` bytes: 2 (n - 1) / n · size."""
    return 2 * gather_bytes(size, ranks)


def gather_bytes(size: float, ranks: int) -> float:
    """What each rank sends in a ring all-gather, or reduce-scatter, of `size` bytes: (n - 1) / n · size."""
    return (ranks - 1) / ranks * size


def parameter_bytes(training: Training, sizes: Mapping[str, int]) -> float:
    """The bytes of the parameters, and of the gradients, that one rank of tp and pp computes with."""
    return training.params * training.value_bytes / (sizes.get("tp", 1) * sizes.get("pp", 1))


def activation_bytes(training: Training, sizes: Mapping[str, int]) -> float:
    """The bytes of the activations between two layers, for one micro-batch: b · s · h values.

    cp gives each of its ranks a part of every sequence.
    """
    values = training.micro_batch * training.seq * training.hidden / sizes.get("cp", 1)
    return values * training.value_bytes


def sharded_bytes(training: Training, sizes: Mapping[str, int], ranks: int) -> float:
    """What a rank sends for FSDP: 3 (n - 1) / n · bytes for every micro-batch.

    All-gather the parameters for the forward pass and again for the backward pass, then reduce-scatter the
    gradients: 1.5 times the all-reduce of DDP (Rajbhandari et al., "ZeRO", 2020, section 7). FSDP2 does this
    for every micro-batch unless a script calls `set_requires_gradient_sync(False)`.
    """
    return 3 * gather_bytes(parameter_bytes(training, sizes), ranks) * training.micro_batches


def replica_bytes(training: Training, sizes: Mapping[str, int], ranks: int) -> float:
    """What a rank sends between replicas of dp_shard: an all-reduce of its shard for every micro-batch.

    The gradients have been scattered over dp_shard before (Zhao et al., "PyTorch FSDP", 2023, section 3.2.2).
    """
    shard = parameter_bytes(training, sizes) / sizes["dp_shard"]
    return all_reduce_bytes(shard, ranks) * training.micro_batches


def tensor_bytes(training: Training, sizes: Mapping[str, int]) -> float:
    """What a rank sends for tp: 4 all-reduces of the activations for each layer and micro-batch.

    Two in the forward pass, after the attention and after the MLP, and two in the backward pass (Shoeybi et
    al., "Megatron-LM", 2019, section 3). Sequence parallelism replaces each by a reduce-scatter and an
    all-gather of the same volume (Korthikanti et al., 2022). The layers are those of the largest stage.
    """
    layers = -(-training.layers // sizes.get("pp", 1))
    one = all_reduce_bytes(activation_bytes(training, sizes), sizes["tp"])
    return 4 * one * layers * training.micro_batches


def stage_bytes(training: Training, sizes: Mapping[str, int]) -> float:
    """What a rank sends to the next stage, and the next stage back to it: b · s · h values per micro-batch.

    Activations forward and their gradients backward, from each rank of tp to its own peer (Narayanan et al.,
    "Efficient large-scale language model training on GPU clusters", 2021, section 3.2, without the
    scatter/gather optimization). Interleaved stages send this once for each chunk.
    """
    return activation_bytes(training, sizes) * training.micro_batches


_GRADIENTS = "all-reduce of gradients"
_SHARDED = "all-gather of parameters, reduce-scatter of gradients"


def _of_dimension(layout: Layout, name: str, training: Training) -> Traffic | None:
    sizes, ranks = layout.sizes, layout.sizes[name]
    if name == "pp" and training.hidden:
        moved = "activations and their gradients"
        return Traffic(name, moved, *_busiest(layout, name, stage_bytes(training, sizes), False))
    if name == "tp" and training.hidden:
        operation, volume = "all-reduce of activations", tensor_bytes(training, sizes)
    elif name in ("tp", "pp", "ep", "cp") or not training.params:
        return None
    elif name == "dp_shard" or (name == "dp" and training.fsdp):
        operation, volume = _SHARDED, sharded_bytes(training, sizes, ranks)
    elif sizes.get("dp_shard", 1) > 1:
        operation, volume = _GRADIENTS, replica_bytes(training, sizes, ranks)
    else:
        operation = _GRADIENTS
        volume = all_reduce_bytes(parameter_bytes(training, sizes), ranks)
    return Traffic(name, operation, *_busiest(layout, name, volume, True))


def _busiest(layout: Layout, name: str, volume: float, is_ring: bool) -> tuple[float, float]:
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
