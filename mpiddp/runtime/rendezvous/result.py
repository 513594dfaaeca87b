"""What the ranks know of each other once they have met: a record of each, and what follows for all."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.hosts.gpus import VISIBLE
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.protocol.variables import (
    CHANNEL,
    CHANNEL_SECRET,
    ERROR_FILE,
    MAX_RESTARTS,
    RESTART_COUNT,
    RUN_ID,
)
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.world import World


class RankInfo(NamedTuple):
    """The facts about one rank that all other ranks receive.

    local_rank, local_world_size: None until they are counted, see `gathered`. machine: distinguishes two
    machines with the same name. problem: why this rank cannot begin. program: the files of its script, with
    their SHA-256. gpu: the GPU that it uses, of those that its variables name.
    """

    rank: int
    local_rank: int | None
    local_world_size: int | None
    hostname: str
    machine: str
    interfaces: Sequence[Interface]
    problem: str = ""
    program: Sequence[tuple[str, str]] = ()
    gpu: str = ""

    @classmethod
    def of_this_process(
        cls, world: World, problem: str = "", program: Sequence[tuple[str, str]] = ()
    ) -> RankInfo:
        local = (world.local_rank, world.local_world_size)
        here, gpu = (world.hostname, machine_id()), own_gpu(world, os.environ)
        return cls(world.rank, *local, *here, interfaces(), problem, program, gpu)

    @property
    def host(self) -> tuple[str, str]:
        return (self.hostname, self.machine)

    def as_json(self) -> list[Any]:
        """See `gathered`."""
        plain = [astuple(each) for each in self.interfaces]
        return [plain if value is self.interfaces else value for value in self]

    def interface_for(self, address: str, requested: str) -> str:
        """The name of this host's interface for traffic to `address`, "" if unknown.

        A requested interface that this host has takes precedence.
        """
        towards = self._interface_towards(address)
        is_local = ipaddress.ip_address(address).is_loopback
        named = [each.name for each in self.interfaces if requested and each.matches(requested)]
        return towards if is_local or not named or towards in named else named[0]

    def _interface_towards(self, address: str) -> str:
        target = ipaddress.ip_address(address)
        for interface in self.interfaces:
            if target in ipaddress.ip_network(interface.network):
                return interface.name
        family = socket.AF_INET6 if target.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            try:
                route.connect((address, 9))  # asks the routing table; sends nothing
            except OSError:
                return ""
            source = route.getsockname()[0]
        return next((i.name for i in self.interfaces if i.address == source), "")


class RendezvousResult(NamedTuple):
    """The result that all ranks share.

    reason: why rank 0 is at the master address. listener: of rank 0, on which torch's store is served, bound
    before it is announced. run_id: the same in all attempts of a job.
    """

    world: World
    infos: tuple[RankInfo, ...]
    interface: str
    reason: str
    listener: socket.socket | None
    run_id: str

    @property
    def hostnames(self) -> tuple[str, ...]:
        return tuple(info.hostname for info in self.infos)

    def variables(self, channel: JobChannel | None) -> dict[str, str]:
        """The variables of a rank that has met the others: torchrun's, and the network.

        https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
        TORCHELASTIC_USE_AGENT_STORE stays unset: with it, `init_method="tcp://…"` on another port would wait
        for a store that nobody serves.

        Args:
            channel: for a script, which may use it to join.
        """
        world, folder = self.world, os.environ.get("TMPDIR") or "/tmp"
        env = {
            "RANK": str(world.rank),
            "LOCAL_RANK": str(world.local_rank),
            "WORLD_SIZE": str(world.world_size),
            "LOCAL_WORLD_SIZE": str(world.local_world_size),
            "GROUP_RANK": str(world.node_rank),
            "MASTER_ADDR": str(world.master_addr),
            "MASTER_PORT": str(world.master_port),
        }
        if channel is not None:
            server = channel.server.for_children()
            env |= {CHANNEL: server.address, CHANNEL_SECRET: server.key}
        if world.launcher.name != "torchrun":
            env |= {
                RUN_ID: self.run_id,
                "TORCHELASTIC_RUN_ID": self.run_id,
                "TORCHELASTIC_RESTART_COUNT": os.environ.get(RESTART_COUNT, "0"),
                "TORCHELASTIC_MAX_RESTARTS": os.environ.get(MAX_RESTARTS, "0"),
                "GROUP_WORLD_SIZE": str(world.num_nodes),
                "ROLE_NAME": "default",
                "ROLE_RANK": str(world.rank),
                "ROLE_WORLD_SIZE": str(world.world_size),
                # No other user of the host can guess the name, and so create the file before.
                ERROR_FILE: f"{folder}/mpiddp-{secrets.token_hex(16)}-{world.rank}-error.json",
            }
        if self.interface:
            # gloo uses the address of the host's own name, which Debian maps to 127.0.1.1; NCCL uses the
            # first interface that it finds suitable. With "=", NCCL matches the whole name, not a prefix.
            for name, own in (("GLOO", self.interface), ("NCCL", f"={self.interface}")):
                env[f"{name}_SOCKET_IFNAME"] = os.environ.get(f"{name}_SOCKET_IFNAME", own)
        return env


def gathered(answers: Iterable[Sequence[Any]]) -> tuple[RankInfo, ...]:
    """The infos of all ranks, by rank, from the JSON of each.

    The local ranks that no launcher has set are counted on each host, in the order of the ranks.
    """
    infos = [RankInfo(*answer) for answer in answers]
    by_host = ranks_by_host(infos)
    found = []
    for info in infos:
        ranks = by_host[info.host]
        local_rank, size = info.local_rank, info.local_world_size
        counted = info._replace(
            interfaces=[Interface(*each) for each in info.interfaces],  # type: ignore[misc]
            local_rank=ranks.index(info.rank) if local_rank is None else local_rank,
            local_world_size=len(ranks) if size is None else size,
        )
        found.append(counted)
    return tuple(found)


def ranks_by_host(infos: Sequence[RankInfo]) -> dict[tuple[str, str], list[int]]:
    """The ranks of each host. The hosts are in the order of their lowest ranks."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for info in infos:
        ranks.setdefault(info.host, []).append(info.rank)
    return ranks


def world_with(world: World, infos: Sequence[RankInfo], address: str, port: int) -> World:
    """`world` with all that its rank learns from the others, and the master address."""
    hosts, own = list(ranks_by_host(infos)), infos[world.rank]
    return replace(
        world,
        local_rank=own.local_rank,
        local_world_size=own.local_world_size,
        node_rank=hosts.index(own.host),
        num_nodes=len(hosts),
        master_addr=address,
        master_port=port,
    )


def machine_id() -> str:
    """What distinguishes this machine from another one with the same name; "" where nothing does."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else ""


def own_gpu(world: World, env: Mapping[str, str]) -> str:
    """The entry of CUDA_VISIBLE_DEVICES and its kin for this rank; "" if they name none for it."""
    if world.launcher.name == "slurm" or world.local_rank is None:
        return ""  # Slurm's cgroups renumber the GPUs for each task
    visible = next((env[name] for name in VISIBLE if name in env), "").split(",")
    return visible[world.local_rank].strip() if world.local_rank < len(visible) else ""
