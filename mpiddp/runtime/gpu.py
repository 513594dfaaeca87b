"""The GPU of this rank: which GPUs its host's ranks use, and the cores near the rank's own.

Both before torch is imported. Binding follows torch's own (`torchrun --numa-binding=node`): the rank gets
the cores of the NUMA node to which the kernel says that its GPU is attached.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpiddp.errors import print_line
from mpiddp.hosts.gpus import Gpu, chosen_gpus, read_gpus
from mpiddp.hosts.processes import cores_of_group, group_of
from mpiddp.protocol.variables import BIND, GPUS, PLACEMENT, VERBOSE
from mpiddp.text import counted
from mpiddp.world import World


def prepare(world: World) -> None:
    """Choose the GPUs, cores and threads of this rank, which torch reads when it is imported."""
    if text := os.environ.get(GPUS):  # the variables that the launcher has for each host
        hosts, of_hosts = expected_hosts(os.environ.get(PLACEMENT, "")), json.loads(text)
        os.environ.update(of_hosts[list(dict.fromkeys(hosts)).index(hosts[world.rank])])
    bind_to_gpu(world)
    limit_threads(world)


def limit_threads(world: World) -> int | None:
    """Give each rank its share of this host's cores, unless OMP_NUM_THREADS is set.

    torch sizes its thread pools when it is imported. A rank that mpirun has bound to some cores uses at
    most that many threads, and a container has the cores of its quota. Returns None if the user decides, or
    until the local ranks are counted.
    """
    if world.local_world_size is None or "OMP_NUM_THREADS" in os.environ:
        return None
    share = int(cores_of_group(group_of(of="cpu"))) // world.local_world_size
    threads = max(1, min(share, len(os.sched_getaffinity(0))))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)
    return threads


def expected_hosts(placement: str) -> list[str]:
    """The host of each rank: [world_size]. "node1:4,[fd00::1]:2" has ranks 4 and 5 on fd00::1."""
    hosts: list[str] = []
    for part in placement.split(","):
        name, _, count = part.rpartition(":")
        hosts += [name.strip("[]")] * int(count)
    return hosts


def bind_to_gpu(world: World, sysfs: Path = Path("/sys")) -> None:
    """With `--bind gpu`, bind this process to the cores of its GPU's NUMA node.

    A rank whose GPU is not known stays where it is, and says so: this costs speed, not correctness.
    """
    if os.environ.get(BIND) != "gpu":
        return
    # nvidia-smi numbers GPUs by PCI address, CUDA by speed unless this is set.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    address = gpu_address(world, os.environ)
    sentence = "is not bound: no core near its GPU is known, or allowed to it"
    if cores := near_cores(address, sysfs) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)
        sentence = f"is bound to {counted(len(cores), 'core')} near GPU {address}"
    if os.environ.get(VERBOSE) or not cores:
        # The output is not redirected yet, and stdout may be the results of a script.
        print_line(f"rank {world.rank} on {world.hostname} {sentence}", sys.stderr)


def gpu_address(world: World, env: Mapping[str, str]) -> str:
    """The PCI address of this rank's GPU, "" if it is not known."""
    gpus = read_gpus(env.get("PATH")) or []
    number = gpu_of(world, world.local_rank, gpus, env)
    return "" if number is None else gpus[number].address


def gpu_of(
    world: World, local_rank: int | None, gpus: Sequence[Gpu], env: Mapping[str, str]
) -> int | None:
    """The number of a local rank's GPU, which `process_group.device_of` chooses; None if it is not known.

    Some launchers do not set the local rank, which is not counted before the ranks have joined.
    """
    chosen = chosen_gpus(gpus, env)
    at = 0 if len(chosen) == 1 and world.launcher.hides_gpus else local_rank
    return chosen[at] if at is not None and at < len(chosen) else None


def near_cores(address: str, sysfs: Path = Path("/sys")) -> set[int]:
    """The cores of the NUMA node of a PCI device; empty if there is no such device."""
    cores: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        text = (sysfs / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="utf-8")
        for part in text.strip().split(","):  # "0-3,8-11"; all cores where the kernel knows no node
            first, _, last = part.partition("-")
            cores |= {*range(int(first), int(last or first) + 1)}
    return cores
