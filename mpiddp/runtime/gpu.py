"""The GPU of this rank: which GPUs its host's ranks use, and the cores near the rank's own.

Both before torch is imported. Binding follows torch's own (`torchrun --numa-binding=node`): the rank gets
the cores of the NUMA node to which the kernel says that its GPU is attached.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mpiddp.errors import print_line
from mpiddp.hosts.gpus import VISIBLE, gpu_addresses
from mpiddp.protocol.variables import BIND, GPUS, PLACEMENT, VERBOSE
from mpiddp.text import counted, parse_whole
from mpiddp.world import World

_SYSFS = Path("/sys")


def prepare(world: World) -> None:
    """Choose the GPUs, cores and threads of this rank, which torch reads when it is imported."""
    choose_gpus(world)
    bind_to_gpu(world)
    limit_threads(world)


def limit_threads(world: World) -> int | None:
    """Give each rank its share of this host's cores, unless OMP_NUM_THREADS is set.

    torch sizes its thread pools when it is imported. A rank that mpirun has bound to some cores uses at
    most that many threads. Returns None if the user decides, or until the local ranks are counted.
    """
    if world.local_world_size is None or "OMP_NUM_THREADS" in os.environ:
        return None
    share = (os.cpu_count() or 1) // world.local_world_size
    threads = max(1, min(share, len(os.sched_getaffinity(0))))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)
    return threads


def choose_gpus(world: World) -> None:
    """Set the variables that the launcher has for the ranks of this host."""
    if text := os.environ.get(GPUS):
        hosts = expected_hosts(os.environ.get(PLACEMENT, ""))
        of_hosts = json.loads(text)
        os.environ.update(of_hosts[list(dict.fromkeys(hosts)).index(hosts[world.rank])])


def expected_hosts(placement: str) -> list[str]:
    """The host of each rank: [world_size]. "node1:4,[fd00::1]:2" has ranks 4 and 5 on fd00::1."""
    hosts: list[str] = []
    for part in placement.split(","):
        name, _, count = part.rpartition(":")
        hosts += [name.strip("[]")] * int(count)
    return hosts


def bind_to_gpu(world: World, sysfs: Path = _SYSFS) -> None:
    """With `--bind gpu`, bind this process to the cores of its GPU's NUMA node.

    A rank whose GPU or node is not known stays where it is, and says so: this costs speed, not correctness.
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


def own_gpu(world: World, env: Mapping[str, str], default: str = "") -> str:
    """The entry of CUDA_VISIBLE_DEVICES and its kin, or of `default`, for this rank; "" if it has none."""
    visible = next((env[name] for name in VISIBLE if name in env), default).split(",")
    # Some launchers do not set the local rank, which is not counted before the ranks have joined.
    index = 0 if len(visible) == 1 and world.launcher.hides_gpus else world.local_rank
    return visible[index].strip() if index is not None and index < len(visible) else ""


def gpu_address(world: World, env: Mapping[str, str]) -> str:
    """The PCI address of this rank's GPU, which `process_group.device_of` chooses; "" if it is not known."""
    addresses = gpu_addresses(env.get("PATH"))
    every_gpu = ",".join(map(str, range(len(addresses))))
    with contextlib.suppress(ValueError, IndexError):  # a name, or a number that no tool lists
        return addresses[parse_whole(own_gpu(world, env, every_gpu))]
    return ""


def near_cores(address: str, sysfs: Path = _SYSFS) -> set[int]:
    """The cores of the NUMA node of a PCI device; empty if the kernel knows none."""
    cores: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        node = (sysfs / "bus/pci/devices" / address / "numa_node").read_text().strip()
        # "-1" on a machine, or a virtual one, that does not say. Else "0-3,8-11".
        text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text()
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            cores |= {*range(int(first), int(last or first) + 1)}
    return cores
