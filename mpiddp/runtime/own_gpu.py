"""The GPU of this rank: which GPUs its host's ranks use, and the cores near the rank's own.

Both before torch is imported. Binding follows torch's own (`torchrun --numa-binding=node`): the rank gets
the cores of the NUMA node to which the kernel says that its GPU is attached.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.hosts.gpu_tools import gpu_addresses
from mpiddp.hosts.gpu_variables import VISIBLE, read
from mpiddp.protocol import BIND, GPUS, PLACEMENT, VERBOSE
from mpiddp.runtime.placement import expected_hosts
from mpiddp.text import counted, parse_whole, shown
from mpiddp.world import World

_SYSFS = Path("/sys")
_MOST_CORES = 1 << 16


def choose_gpus(world: World) -> None:
    """Set the variables that the launcher has for the ranks of this host.

    Raises:
        UserError: MPIDDP_GPUS is not the launcher's.
    """
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
    hosts = expected_hosts(placement)
    return list(dict.fromkeys(hosts)).index(hosts[rank])


def bind_to_gpu(world: World, sysfs: Path = _SYSFS) -> None:
    """With `--bind gpu`, bind this process to the cores of its GPU's NUMA node.

    A rank whose GPU or node is not known stays where it is, and says so: this costs speed, not correctness.
    """
    if os.environ.get(BIND) != "gpu":
        return
    # nvidia-smi numbers GPUs by PCI address, CUDA by speed unless this is set.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    address = None
    if world.local_rank is not None:  # some launchers do not say it before the ranks have joined
        address = gpu_address(gpu_addresses(), os.environ, world.local_rank)
    cores = near_cores(address, sysfs) & os.sched_getaffinity(0) if address else set()
    if cores:
        os.sched_setaffinity(0, cores)
        sentence = f"is bound to {counted(len(cores), 'core')} near GPU {address}"
    elif address:
        sentence = f"is not bound: the kernel names no NUMA node of GPU {address}"
    else:
        sentence = "is not bound: its GPU is not known"
    if os.environ.get(VERBOSE) or not cores:
        print(f"rank {world.rank} on {world.hostname} {sentence}", flush=True)


def gpu_address(addresses: list[str], env: Mapping[str, str], local_rank: int) -> str | None:
    """The PCI address of the GPU with this number among the visible ones; None if it is not known.

    Args:
        addresses: of all GPUs of the host, in the order of their numbers.
    """
    chosen = next((env[name] for name in VISIBLE if name in env), None)
    visible = [str(n) for n in range(len(addresses))] if chosen is None else chosen.split(",")
    if local_rank >= len(visible):
        return None
    number = visible[local_rank].strip()
    # A UUID, or a part of a GPU, has no number here.
    return addresses[int(number)] if number.isdecimal() and int(number) < len(addresses) else None


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
