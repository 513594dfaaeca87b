"""`mpiddp.mesh`: a DeviceMesh whose tensor-parallel groups lie inside hosts, under any launcher.

    mpiddp.init()                                   # or the script's own init_process_group
    mesh = mpiddp.mesh(dp=4, tp=2)
    parallelize_module(model, mesh["tp"], plan)

The ranks tell each other their hosts. If their numbers would put a tensor-parallel group on several hosts,
all of them refuse with one sentence.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mpiddp.errors import BAD_INPUT, UserError, print_error
from mpiddp.meshes.dimensions import check_sizes, resolve
from mpiddp.meshes.layout import Layout
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import current
from mpiddp.runtime.rendezvous.result import machine_id
from mpiddp.world import is_joined

_GATHER_TIMEOUT_S = 600.0  # a rank may still read its data


def mesh(
    *, tp_across_hosts: bool = False, device_type: str | None = None, **sizes: int
) -> DeviceMesh:
    """The ranks of the job as a DeviceMesh, with tensor-parallel groups inside hosts.

    All ranks must call this with the same arguments, after `mpiddp.init()` or `init_process_group`.

        mesh = mpiddp.mesh(dp=4, tp=2)
        mesh.mesh_dim_names          # ("dp", "tp"): the slowest first, in whatever order they are named
        mesh["tp"].get_group()       # the process group of this rank's tensor-parallel ranks
        mesh.get_local_rank("dp")    # this rank's coordinate, which is its rank in that group

    Args:
        tp_across_hosts: let groups of tp span hosts, as where NVLink connects several.
        device_type: "cuda", "cpu", …; by default that of the process group.
        sizes: pp, dp_replicate, dp, dp_shard, ep, cp, tp. The mesh has the dimensions that are named, in
            this order. The product of the sizes is the number of ranks. One size may be -1: it takes the
            ranks that the others leave. If no data-parallel dimension is named, dp does this.

    Raises:
        SystemExit: code 2, on every rank, after rank 0 has printed the reason: an unknown name, sizes that do
            not fill the ranks or the hosts, ranks that are not numbered host by host, different arguments on
            some rank.
        UserError: there is no process group.
        JobFailed: a rank has not called this within 10 minutes.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "mpiddp.mesh needs a process group. Call mpiddp.init() or "
            "torch.distributed.init_process_group before it."
        )
    own: dict[str, Any] = {"host": _own_host(), "hostname": socket.gethostname(), "problem": ""}
    try:
        own |= {
            "sizes": check_sizes(sizes),
            "tp_across_hosts": bool(tp_across_hosts),
            "device_type": _device_type(device_type),
        }
    except UserError as error:
        own["problem"] = str(error)
    ranks = _ranks()
    answers = ranks.gather(own)
    try:  # of the same answers, so every rank comes to the same result
        sizes_of_mesh = _sizes(answers)
    except UserError as error:
        ranks.refuse(f"mpiddp.mesh: {error}")
    return init_device_mesh(
        own["device_type"],
        tuple(sizes_of_mesh.values()),
        mesh_dim_names=tuple(sizes_of_mesh),
    )


class _Joined:
    """The ranks of a job that has joined: they agree over its store."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """The values of all ranks, by rank. All ranks must call this."""
        return self._coordinator.all_gather_json(value, timeout_s=_GATHER_TIMEOUT_S)

    def refuse(self, sentence: str) -> NoReturn:
        """End all ranks with code 2 after rank 0 has printed the sentence. All ranks must call this."""
        with self._coordinator.all_or_none():
            raise UserError(sentence)
        raise SystemExit(BAD_INPUT)  # not reached: all_or_none has raised one


class _Grouped:
    """The ranks of a script's own process group, which has not joined. They agree over gloo."""

    def __init__(self) -> None:
        # Beside NCCL's group: a script may not have chosen its GPU yet.
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """As `_Joined.gather`."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self._group)
        return found

    def refuse(self, sentence: str) -> NoReturn:
        """As `_Joined.refuse`."""
        if dist.get_rank() == 0:
            print_error(sentence)
        dist.barrier(self._group)  # the first rank that exits makes its launcher end the others
        raise SystemExit(BAD_INPUT)


def _ranks() -> _Joined | _Grouped:
    session = current()
    if session.coordinator is None or session.watch is None:
        return _Grouped()
    world = session.coordinator.world
    is_same = (world.rank, world.world_size) == (dist.get_rank(), dist.get_world_size())
    return _Joined(session.coordinator) if is_same else _Grouped()


def _sizes(answers: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The sizes that all ranks agree on. Raises UserError if they do not, or if nothing fits."""
    problems = [answer["problem"] for answer in answers]
    if any(problems):
        rank = next(rank for rank, problem in enumerate(problems) if problem)
        raise UserError(problems[rank] if all(problems) else f"rank {rank}: {problems[rank]}")
    calls = [_call(answer) for answer in answers]
    if len(set(calls)) > 1:
        other = next(rank for rank, call in enumerate(calls) if call != calls[0])
        raise UserError(
            f"the calls differ: {calls[0]} on rank 0, {calls[other]} on rank {other}. Call it with the same "
            "arguments on all ranks."
        )
    hosts = _labels([(answer["host"], answer["hostname"]) for answer in answers])
    across = answers[0]["tp_across_hosts"]
    sizes = resolve(answers[0]["sizes"], hosts, unit="rank", tp_across_hosts=across)
    if not across:
        Layout(sizes, tuple(hosts)).require_tp_inside_hosts()
    return sizes


def _call(answer: dict[str, Any]) -> str:
    """ "mesh(dp=2, tp=2, device_type='cuda')"."""
    arguments = [f"{name}={size}" for name, size in sorted(answer["sizes"].items())]
    if answer["tp_across_hosts"]:
        arguments.append("tp_across_hosts=True")
    arguments.append(f"device_type={answer['device_type']!r}")
    return f"mesh({', '.join(arguments)})"


def _labels(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """A name for the host of each rank, from the host's key and its hostname: [world_size].

    Two hosts with one name, such as containers, are "name" and "name (2)".
    """
    labels: dict[str, str] = {}
    for key, hostname in hosts:
        if key not in labels:
            alike = sum(label.partition(" ")[0] == hostname for label in labels.values())
            labels[key] = f"{hostname} ({alike + 1})" if alike else hostname
    return [labels[key] for key, _ in hosts]


def _own_host() -> str:
    """What the ranks of one host share. In a job that has joined, the number that the ranks have counted."""
    if is_joined(os.environ) and "GROUP_RANK" in os.environ:
        return os.environ["GROUP_RANK"]
    return f"{socket.gethostname()} {machine_id()}"


def _device_type(requested: str | None) -> str:
    """torch's name for the devices of the mesh: `requested`, else that of the default group."""
    if requested is not None:
        try:
            return torch.device(requested).type
        except (RuntimeError, TypeError):
            raise UserError(
                f"device_type={requested!r}: expected a type of device such as cuda or cpu."
            ) from None
    gpu = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if gpu is None or dist.get_backend() == "gloo" else gpu.type
