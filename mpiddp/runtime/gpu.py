"""The GPU of this rank: which GPUs its host's ranks use, and the cores near the rank's own.

Both before torch is imported. Binding follows torch's own (`torchrun --numa-binding=node`): the rank gets
the cores of the NUMA node to which the kernel says that its GPU is attached.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpiddp.errors import UserError, print_line
from mpiddp.hosts.gpus import VISIBLE, gpu_addresses, read
from mpiddp.protocol.variables import BIND, GPUS, PLACEMENT, VERBOSE
from mpiddp.text import counted, parse_whole, shown
from mpiddp.world import World

_SYSFS = Path("/sys")
_MOST_CORES = 1 << 16


def prepare(world: World) -> None:
    """Choose the GPUs, cores and threads of this rank, which torch reads when it is imported.

    A variable of OpenMP that the user has set takes precedence.
    """
    if {GPUS, BIND} & os.environ.keys():
        choose_gpus(world)
        bind_to_gpu(world)
    limit_threads(world)


def limit_threads(world: World) -> int | None:
    """Give each rank its share of this host's cores, unless OMP_NUM_THREADS is set.

    torch sizes its thread pools when it is imported. A rank that mpirun has bound to some cores uses at
    most that many threads.

    Returns:
        The number of threads; None if the user decides, or as long as the local ranks are not counted.
    """
    if world.local_world_size is None or "OMP_NUM_THREADS" in os.environ:
        return None
    share = (os.cpu_count() or 1) // world.local_world_size
    bound_to = len(os.sched_getaffinity(0))
    threads = max(1, min(share, bound_to))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def choose_gpus(world: World) -> None:
    """Set the variables that the launcher has for the ranks of this host."""
    text = os.environ.get(GPUS)
    if not text:
        return
    try:
        os.environ.update(read(text, _host_number(os.environ.get(PLACEMENT, ""), world.rank)))
    except (ValueError, IndexError):
        raise UserError(
            f'{GPUS}="{shown(text)}" does not fit {PLACEMENT}. Unset it; mpiddp launch sets it.'
        ) from None


def _host_number(placement: str, rank: int) -> int:
    """The position in `placement` of the host of this rank."""
    from mpiddp.runtime.rendezvous.placement import expected_hosts  # few ranks need it

    hosts = expected_hosts(placement)
    return list(dict.fromkeys(hosts)).index(hosts[rank])


class GpuUnknown(Exception):
    """Why the GPU of a rank is not known, as the end of a sentence."""


def bind_to_gpu(world: World, sysfs: Path = _SYSFS) -> None:
    """With `--bind gpu`, bind this process to the cores of its GPU's NUMA node.

    A rank whose GPU or node is not known stays where it is, and says so: this costs speed, not correctness.
    """
    if os.environ.get(BIND) != "gpu":
        return
    # nvidia-smi numbers GPUs by PCI address, CUDA by speed unless this is set.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    cores: set[int] = set()
    try:
        address = gpu_address(world, os.environ)
        near = near_cores(address, sysfs)
        cores = near & os.sched_getaffinity(0)
        if cores:
            os.sched_setaffinity(0, cores)
            sentence = f"is bound to {counted(len(cores), 'core')} near GPU {address}"
        elif near:
            sentence = f"is not bound: it may use no core near GPU {address}"
        else:
            sentence = f"is not bound: the kernel names no NUMA node of GPU {address}"
    except GpuUnknown as reason:
        sentence = f"is not bound: {reason}"
    if os.environ.get(VERBOSE) or not cores:
        # The output is not redirected yet, and stdout may be the results of a script.
        print_line(f"rank {world.rank} on {world.hostname} {sentence}", sys.stderr)


def gpu_address(world: World, env: Mapping[str, str]) -> str:
    """The PCI address of this rank's GPU: of the visible ones, the one with its local rank."""
    addresses = gpu_addresses(env.get("PATH"))
    name = next((name for name in VISIBLE if name in env), None)
    if name is None:
        return _own(addresses, world, "its GPU is not known")
    value = f"{name}={shown(env[name])}"
    entry = _own(env[name].split(","), world, f"{value} has no GPU for it").strip()
    try:
        return addresses[parse_whole(entry, high=len(addresses))]
    except ValueError:
        raise GpuUnknown("its GPU is not known") from None


def _own(visible: Sequence[str], world: World, otherwise: str) -> str:
    """The rank's own of the visible GPUs, the one that `process_group.device_of` chooses."""
    if len(visible) == 1 and world.launcher.hides_gpus:
        return visible[0]
    # Some launchers do not set the local rank, which is not counted before the ranks have joined.
    if world.local_rank is None or world.local_rank >= len(visible):
        raise GpuUnknown(otherwise)
    return visible[world.local_rank]


def near_cores(address: str, sysfs: Path = _SYSFS) -> set[int]:
    """The cores of the NUMA node of a PCI device; empty if the kernel knows none."""
    try:
        node = (sysfs / "bus/pci/devices" / address / "numa_node").read_text().strip()
        if node.startswith("-"):  # a machine, or a virtual one, that does not say
            return set()
        return parse_cores((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return set()


def parse_cores(text: str) -> set[int]:
    """The cores in the kernel's "0-3,8-11".

    Raises:
        ValueError: any other text.
    """
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(parse_whole(first), parse_whole(last or first, high=_MOST_CORES) + 1))
    return cores
