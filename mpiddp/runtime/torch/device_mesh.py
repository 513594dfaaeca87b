"""`mpiddp.mesh`: a DeviceMesh whose tensor-parallel groups lie inside hosts, under any launcher."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mpiddp.errors import BAD_INPUT, UserError, print_error
from mpiddp.hosts.interfaces import machine
from mpiddp.runtime.torch.mesh_sizes import check_sizes, resolve


def mesh(*, tp_across_hosts: bool = False, device_type: str | None = None, **sizes: int) -> DeviceMesh:
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
            not fill the ranks or the hosts, ranks that are not numbered host by host, different arguments on
            some rank.
        UserError: there is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "mpiddp.mesh needs a process group.",
            fix="call mpiddp.init() or torch.distributed.init_process_group before it",
        )
    is_gloo, hostname = dist.get_backend() == "gloo", socket.gethostname()
    gpu = torch.accelerator.current_accelerator(check_available=True)
    default = "cpu" if gpu is None or is_gloo else gpu.type
    type_ = str(default if device_type is None else device_type).partition(":")[0]
    arguments = sorted({**sizes, "device_type": type_, "tp_across_hosts": tp_across_hosts}.items())
    call = f"mesh({', '.join(f'{name}={value!r}' for name, value in arguments)})"
    # Beside NCCL's group: a script may not have chosen its GPU yet.
    group = None if is_gloo else dist.new_group(backend="gloo")
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (call, hostname, f"{hostname} {machine('net')}"), group=group)
    calls, names, machines = zip(*answers, strict=True)
    try:  # every rank has the same answers, so it comes to the same result
        if other := next((rank for rank, call in enumerate(calls) if call != calls[0]), 0):
            raise UserError(
                f"the calls differ: {calls[0]} on rank 0, {calls[other]} on rank {other}.",
                fix="call it with the same arguments on all ranks",
            )
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
