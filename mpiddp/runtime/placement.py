"""Compare the hosts and GPUs of the ranks with the placement that the launcher expects.

The launcher sets MPIDDP_PLACEMENT to the placement of the hostfile: "node1:4,node2:2" means ranks 0 to 3
on node1, and ranks 4 and 5 on node2.
"""

from __future__ import annotations

import functools
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mpiddp.hosts.gpus import VISIBLE
from mpiddp.hosts.hostfile import MAX_SLOTS
from mpiddp.protocol.variables import PLACEMENT
from mpiddp.runtime.master_address import RankInfo
from mpiddp.text import align_columns, parse_whole, shown


@dataclass(frozen=True)
class RankPlacement:
    """The host and device of a rank. `device` is torch's name of the device: "cuda:1", "cpu".

    `gpu` is the device's name on the whole host, "" if it is not known: "cuda:1" is a different GPU in
    each process that sees different GPUs.
    """

    info: RankInfo
    device: str
    gpu: str = ""

    @classmethod
    def of_this_process(
        cls, info: RankInfo, num_gpus: int, launcher: str, gpu_type: str = "cuda"
    ) -> RankPlacement:
        """The placement of this process, whose rank sees `num_gpus` GPUs and will use them.

        Args:
            gpu_type: torch's name for such devices: "cuda" (ROCm's too), "xpu".
        """
        local_rank = info.local_rank
        assert local_rank is not None
        if local_rank >= num_gpus:
            return cls(info, "cpu")
        if launcher == "slurm":  # its cgroups renumber the GPUs for each task
            return cls(info, f"{gpu_type}:{local_rank}")
        visible = next((os.environ[name] for name in VISIBLE if name in os.environ), "").split(",")
        named = visible[local_rank].strip() if local_rank < len(visible) else ""
        return cls(info, f"{gpu_type}:{local_rank}", named or str(local_rank))


def expected_hosts(placement: str) -> list[str]:
    """The host of each rank: [world_size]. IPv6 literals are in brackets: "[fd00::1]:2".

    Raises:
        ValueError: any other text, or more ranks than a hostfile may have slots.
    """
    hosts: list[str] = []
    for part in placement.split(","):
        name, _, count = part.rpartition(":")
        hosts += [name.strip("[]")] * parse_whole(count, 0, MAX_SLOTS + 1 - len(hosts))
    return hosts


def misplaced(placements: Sequence[RankPlacement], expected: str) -> str:
    """A sentence and a table if a rank is not where `expected` has it, else ""."""
    try:
        names = expected_hosts(expected)
    except ValueError:
        return (
            f'{PLACEMENT}="{shown(expected)}" is not a list of hosts such as node1:4,node2:2. '
            "Unset it; mpiddp launch sets it."
        )
    short_names = Counter(name.partition(".")[0] for name in set(names))
    pairs = {
        (name, placement.info.host) for name, placement in zip(names, placements, strict=False)
    }
    one_to_one = len(pairs) == len({name for name, _ in pairs}) == len({host for _, host in pairs})
    named_right = all(
        _is_on(placement.info, name, short_names[name.partition(".")[0]] > 1)
        for name, placement in zip(names, placements, strict=False)
    )
    if len(names) == len(placements) and one_to_one and named_right:
        return _shared_gpus(placements)
    return (
        f"the ranks are not placed as in the hostfile ({expected}). Check mpirun's own "
        f"settings (environment, mca-params.conf) and the host names:\n"
        f"{table(placements, names)}"
    )


def _shared_gpus(placements: Sequence[RankPlacement]) -> str:
    users: dict[tuple[tuple[str, str], str], list[RankPlacement]] = {}
    for placement in placements:
        users.setdefault((placement.info.host, placement.gpu), []).append(placement)
    for (_, gpu), sharing in users.items():
        if gpu and len(sharing) > 1:
            ranks = " and ".join(str(placement.info.rank) for placement in sharing)
            return (
                f"ranks {ranks} would share GPU {gpu} of {sharing[0].info.hostname}: they see its GPUs in "
                "different orders. Set CUDA_VISIBLE_DEVICES to the same value for all ranks of a "
                "host.\n"
                f"{table(placements)}"
            )
    return ""


def table(placements: Sequence[RankPlacement], expected: Sequence[str] = ()) -> str:
    """A line for each rank: its host, local rank and device, and the expected host if it is known."""
    rows = [("rank", "host", "local rank", "device", *(["expected host"] if expected else []))]
    for index, placement in enumerate(placements):
        info = placement.info
        device = placement.device
        if placement.gpu and device.partition(":")[2] != placement.gpu:
            device += f" (GPU {placement.gpu})"
        row = [str(info.rank), info.hostname, str(info.local_rank), device]
        if expected:
            row.append(expected[index] if index < len(expected) else "none")
        rows.append(tuple(row))
    return align_columns(rows)


def _is_on(info: RankInfo, name: str, is_ambiguous: bool) -> bool:
    """Whether the rank's host is `name` in the hostfile: a name, an alias or an address.

    `is_ambiguous`: the hostfile has a.x.org and a.y.org, so "a" alone does not identify a host.
    """
    if name in ("localhost", info.hostname):
        return True
    if not is_ambiguous and name.partition(".")[0] == info.hostname.partition(".")[0]:
        return True
    own = {*info.addresses, *(interface.address for interface in info.interfaces)}
    addresses = _addresses(name)
    # A name that rank 0 cannot resolve is no mismatch: mpirun has reached the host by that name.
    return not addresses or bool(addresses & own) or any(a.startswith("127.") for a in addresses)


@functools.cache
def _addresses(name: str) -> frozenset[str]:
    """The addresses of `name`. If DNS does not answer, the lookup takes 10 s."""
    try:
        return frozenset(str(info[4][0]) for info in socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):  # UnicodeError for an invalid name
        return frozenset()
