"""After the ranks have met: compare their hosts and GPUs with the placement that the launcher expects.

The launcher sets MPIDDP_PLACEMENT to the placement of the hostfile: "node1:4,node2:2" means ranks 0 to 3
on node1, and ranks 4 and 5 on node2.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpiddp.errors import UserError, print_line
from mpiddp.protocol.variables import PLACEMENT, REPORT, VERBOSE
from mpiddp.runtime.job.coordinator import AGREE_TIMEOUT_S, Coordinator
from mpiddp.runtime.log import log
from mpiddp.runtime.rendezvous.result import RankInfo, RendezvousResult
from mpiddp.text import align_columns, parse_whole, shown

_MOST_RANKS = 999_999  # that a hostfile may have


class RankPlacement(NamedTuple):
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
        from mpiddp.hosts.gpus import VISIBLE  # only a rank with GPUs needs it

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
        hosts += [name.strip("[]")] * parse_whole(count, 0, _MOST_RANKS + 1 - len(hosts))
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
    hosts = _hosts_by_name([placement.info for placement in placements], names)
    pairs = {
        (name, placement.info.host) for name, placement in zip(names, placements, strict=False)
    }
    one_to_one = len(pairs) == len({name for name, _ in pairs}) == len({host for _, host in pairs})
    # mpirun has reached a host by a name that no host has itself: an alias.
    named_right = all(
        name == "localhost" or host in hosts.get(name, {host}) for name, host in pairs
    )
    if len(names) == len(placements) and one_to_one and named_right:
        return _shared_gpus(placements)
    return (
        f"the ranks are not placed as in the hostfile ({expected}). Check mpirun's own "
        f"settings (environment, mca-params.conf) and the host names.\n"
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


def _hosts_by_name(
    infos: Sequence[RankInfo], names: Sequence[str]
) -> Mapping[str, set[tuple[str, str]]]:
    """The hosts that each of the names names: their own names, short or long, and their addresses."""
    hosts = {info.host: info for info in infos}
    own: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for host, info in hosts.items():
        short = info.hostname.partition(".")[0]
        interfaces = (interface.address for interface in info.interfaces)
        for name in {info.hostname, short, *info.addresses, *interfaces}:
            own[name].add(host)
    short_names = Counter(name.partition(".")[0] for name in set(names))
    found = {}
    for name in set(names):
        short = name.partition(".")[0]
        # With a.x.org and a.y.org in the hostfile, "a" alone does not identify a host.
        if of_name := own.get(name) or (own.get(short) if short_names[short] == 1 else None):
            found[name] = of_name
    return found


def check_placement(
    coordinator: Coordinator, result: RendezvousResult, *, uses_gpus: bool = True
) -> None:
    """Compare the ranks' placement with the hostfile, and print what the launcher's options request.

    Args:
        uses_gpus: whether this process uses the GPUs that it sees, and not its command.
    """
    env = os.environ
    expected = env.get(PLACEMENT)
    if expected or env.get(REPORT):
        info = result.infos[coordinator.world.rank]
        gpu_type, num_gpus = _gpus() if uses_gpus else ("cpu", 0)
        launcher = coordinator.world.launcher.name
        own = RankPlacement.of_this_process(info, num_gpus, launcher, gpu_type)
        devices = coordinator.all_gather_json([own.device, own.gpu], timeout_s=AGREE_TIMEOUT_S)
        placements = [
            RankPlacement(info, device, gpu)
            for info, (device, gpu) in zip(result.infos, devices, strict=True)
        ]
        problem = coordinator.broadcast_json(
            misplaced(placements, expected) if expected and coordinator.world.rank == 0 else ""
        )
        with coordinator.all_or_none():
            if problem:
                raise UserError(problem)
        if env.get(REPORT) and coordinator.world.rank == 0:
            log.info(table(placements))
    if env.get(VERBOSE):
        world = coordinator.world
        if world.rank == 0:
            address = f"{world.master_addr} port {world.master_port}"
            log.info(f"master address {address}: {result.reason}")
        # Not with `log`, which prints on rank 0 only.
        print_line(f"rank {world.rank} on {world.hostname} uses {result.interface}", sys.stdout)


def _gpus() -> tuple[str, int]:
    """torch's name for this host's GPUs, and their number."""
    import torch  # a rank that only starts a command does without

    # Whether one is available is not asked: CUDA would start, and children could not be forked.
    gpu = torch.accelerator.current_accelerator()
    return gpu.type if gpu else "cpu", torch.accelerator.device_count()
