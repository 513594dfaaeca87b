"""`mpiddp.mesh`: a DeviceMesh whose tensor-parallel groups lie inside hosts, under any launcher.

resolve({"tp": 8, "pp": 2}, ["node1"] * 8 + ["node2"] * 8)  ->  {"pp": 2, "dp": 1, "tp": 8}
"""

from __future__ import annotations

import math
import operator
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mpiddp.errors import BAD_INPUT, UserError, print_error
from mpiddp.hosts.interfaces import machine
from mpiddp.runtime.torch.divergence import of_all_ranks
from mpiddp.text import counted, did_you_mean, listed, shown

# From the slowest to the fastest links: neighbouring ranks differ in the last dimension. Megatron-LM orders
# its groups like this (tp-cp-ep-dp-pp, fastest first), and so does torchtitan.
DIMENSIONS = ("pp", "dp_replicate", "dp", "dp_shard", "ep", "cp", "tp")
REMAINING = -1  # the size of the one dimension that takes all remaining ranks
_DATA_PARALLEL = ("dp", "dp_shard", "dp_replicate")


def mesh(
    *, tp_across_hosts: bool = False, device_type: str | None = None, **sizes: int
) -> DeviceMesh:
    """The ranks of the job as a DeviceMesh, with tensor-parallel groups inside hosts.

    All ranks must call this with the same arguments, after `mpiddp.init()` or `init_process_group`.

        mesh = mpiddp.mesh(dp=4, tp=2)
        parallelize_module(model, mesh["tp"], plan)
        mesh.mesh_dim_names          # ("dp", "tp"): the slowest first, in whatever order they are named
        mesh["tp"].get_group()       # the process group of this rank's tensor-parallel ranks
        mesh.get_local_rank("dp")    # this rank's coordinate, which is its rank in that group

    Args:
        tp_across_hosts: let groups of tp span hosts, as where NVLink connects several.
        device_type: "cuda", "cpu", …; by default that of the process group.
        sizes: pp, dp_replicate, dp, dp_shard, ep, cp, tp. The mesh has the dimensions that are named, in
            this order. The product of the sizes is the number of ranks. One size may be -1: all
            remaining ranks. If no data-parallel dimension is named, dp takes them.

    Raises:
        SystemExit: code 2, on every rank, after rank 0 has printed the reason: an unknown name, sizes that do
            not fill the ranks or the hosts, ranks not numbered host by host, arguments that differ between them.
        UserError: there is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        sentence = "mpiddp.mesh needs a process group."
        raise UserError(
            sentence, fix="call mpiddp.init() or torch.distributed.init_process_group before it"
        )
    is_gloo, hostname = dist.get_backend() == "gloo", socket.gethostname()
    gpu = torch.accelerator.current_accelerator(check_available=True)
    default = "cpu" if gpu is None or is_gloo else gpu.type
    type_ = str(default if device_type is None else device_type).partition(":")[0]
    arguments = sorted({**sizes, "device_type": type_, "tp_across_hosts": tp_across_hosts}.items())
    call = f"mesh({', '.join(f'{name}={value!r}' for name, value in arguments)})"
    # Beside NCCL's group: a script may not have chosen its GPU yet.
    group = None if is_gloo else dist.new_group(backend="gloo")
    answers = of_all_ranks((call, hostname, f"{hostname} {machine('net')}"), group)
    calls, names, machines = zip(*answers, strict=True)
    try:  # every rank has the same answers, so it comes to the same result
        if other := next((rank for rank, call in enumerate(calls) if call != calls[0]), 0):
            sentence = f"the calls differ: {calls[0]} on rank 0, {calls[other]} on rank {other}."
            raise UserError(sentence, fix="call it with the same arguments on all ranks")
        # Several machines, such as containers, may have one name.
        hosts = names if len(set(names)) == len(set(machines)) else machines
        resolved = resolve(check_sizes(sizes), hosts, tp_across_hosts=tp_across_hosts)
        try:
            torch.device(type_)
        except RuntimeError:
            raise UserError(f"device_type={device_type!r}: expected cuda, cpu, …") from None
    except UserError as error:
        if dist.get_rank() == 0:
            print_error(f"mpiddp.mesh: {error}")
        dist.barrier(group)  # the first rank that exits makes its launcher end the others
        raise SystemExit(BAD_INPUT) from None
    return init_device_mesh(type_, tuple(resolved.values()), mesh_dim_names=tuple(resolved))


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


def resolve(
    requested: Mapping[str, int], hosts: Sequence[str], *, tp_across_hosts: bool = False
) -> dict[str, int]:
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
