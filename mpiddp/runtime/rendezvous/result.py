"""What the ranks know of each other once they have met: a record of each, and what follows for all."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpiddp.errors import UserError
from mpiddp.hosts.interfaces import Interface, interfaces, machine
from mpiddp.protocol import variables
from mpiddp.runtime.gpu import expected_hosts
from mpiddp.runtime.rendezvous.sockets import resolve
from mpiddp.text import align_columns, keys_by_value
from mpiddp.world import World

LOOPBACK = "127.0.0.1"


class RankInfo(NamedTuple):
    """The facts about one rank that all other ranks receive."""

    rank: int
    local_rank: int | None  # these two are None until they are counted, see `gathered`
    local_world_size: int | None
    hostname: str
    machine: str  # distinguishes two machines with the same name
    interfaces: Sequence[Interface]
    problem: str = ""  # why this rank cannot begin
    run_id: str = ""  # all ranks take that of rank 0, which is the same in all attempts of a job
    program: str = ""  # its script, or -m and its module; "" for a command, and by hand

    @classmethod
    def of_this_process(cls, world: World, problem: str = "", program: str = "") -> RankInfo:
        place = (
            world.rank,
            world.local_rank,
            world.local_world_size,
            world.hostname,
            machine("net"),
        )
        run_id = os.environ.get(variables.RUN_ID) or os.urandom(8).hex()
        return cls(*place, interfaces(), problem, run_id, program)

    @property
    def host(self) -> tuple[str, str]:
        return (self.hostname, self.machine)

    def interface_for(self, address: str, requested: str) -> str:
        """The name of this host's interface for traffic to `address`, "" if unknown.

        A requested interface that this host has takes precedence.
        """
        target, nics = ipaddress.ip_address(address), self.interfaces
        towards = [nic.name for nic in nics if target in ipaddress.ip_network(nic.network)]
        if not towards:
            family = socket.AF_INET6 if target.version == 6 else socket.AF_INET
            # Connecting asks the routing table, and sends nothing.
            with socket.socket(family, socket.SOCK_DGRAM) as route, contextlib.suppress(OSError):
                route.connect((address, 9))
                towards = [nic.name for nic in nics if nic.address == route.getsockname()[0]]
        named = [nic.name for nic in nics if nic.matches(requested)]
        first = (towards or [""])[0]
        return first if target.is_loopback or not named or first in named else named[0]

    def is_named_by_ipv6(self, interface: str) -> bool:
        """Whether gloo takes an IPv6 address by the host's own name, and an IPv4 one by the interface's."""
        names = [nic.address for nic in self.interfaces if nic.name == interface]
        with contextlib.suppress(OSError):
            # gloo asks the same, and takes the first address that it can bind.
            first, *_ = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            return first[0] == socket.AF_INET6 and first[4][0] in names and ":" not in names[0]
        return False


Infos = Sequence[RankInfo]  # the infos of all ranks, by rank
Files = Sequence[tuple[str, str]]  # the names and the SHA-256 of the files of a rank's script
Gather = Callable[[Any], list[Any]]  # every rank's value, by rank


def gathered(answers: Iterable[Sequence[Any]]) -> Infos:
    """The infos of all ranks, from their JSON. Local ranks that no launcher sets are counted by host."""
    infos = [RankInfo(*answer) for answer in answers]
    by_host = ranks_by_host(infos)
    for rank, info in enumerate(infos):
        ranks, local_rank, size = by_host[info.host], info.local_rank, info.local_world_size
        infos[rank] = info._replace(
            interfaces=[Interface(*nic) for nic in info.interfaces],
            local_rank=ranks.index(rank) if local_rank is None else local_rank,
            local_world_size=len(ranks) if size is None else size,
        )
    return infos


def ranks_by_host(infos: Infos) -> dict[tuple[str, str], list[int]]:
    """The ranks of each host. The hosts are in the order of their lowest ranks."""
    return keys_by_value({info.rank: info.host for info in infos})


def joined(world: World, infos: Infos, address: str, port: int) -> World:
    """The world of a rank that knows all others. torch's store is at `address`."""
    hosts, info = list(ranks_by_host(infos)), infos[world.rank]
    return world._replace(
        local_rank=info.local_rank,
        local_world_size=info.local_world_size,
        node_rank=hosts.index(info.host),
        num_nodes=len(hosts),
        master_addr=address,
        master_port=port,
    )


def variables_of(world: World, info: RankInfo, interface: str, run_id: str) -> dict[str, str]:
    """The variables of a rank that has met the others: torchrun's, and the network.

    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    TORCHELASTIC_USE_AGENT_STORE stays unset: with it, `init_method="tcp://…"` on another port would wait
    for a store that nobody serves.
    """
    env = {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.local_rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "GROUP_RANK": str(world.node_rank),
        "MASTER_ADDR": str(world.master_addr),
        "MASTER_PORT": str(world.master_port),
    }
    if world.launcher.name != "torchrun":
        env |= {
            variables.RUN_ID: run_id,
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": os.environ.get(variables.RESTART_COUNT, "0"),
            "TORCHELASTIC_MAX_RESTARTS": os.environ.get(variables.MAX_RESTARTS, "0"),
            "GROUP_WORLD_SIZE": str(world.num_nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(world.rank),
            "ROLE_WORLD_SIZE": str(world.world_size),
        }
    if interface and world.num_nodes != 1:  # groups of the script's own may reach other hosts
        # NCCL uses the first interface that it finds suitable. With "=", it matches the whole name, not a
        # prefix. gloo uses the address of the host's own name, which Debian maps to 127.0.1.1.
        family = "AF_INET6" if ":" in str(world.master_addr) else "AF_INET"
        chosen = {"NCCL_SOCKET_IFNAME": f"={interface}", "NCCL_SOCKET_FAMILY": family}
        if family == "AF_INET" or not info.is_named_by_ipv6(interface):
            chosen |= dict.fromkeys(["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"], interface)
        env |= {name: os.environ.get(name, value) for name, value in chosen.items()}
    return env


def requested_interface(env: Mapping[str, str]) -> str:
    """The interface or networks that the user, or else the launcher, requests. See `Interface.matches`."""
    return env.get(variables.INTERFACE) or env.get(variables.NETWORKS) or ""


def choose(infos: Infos, env: Mapping[str, str]) -> list[str]:
    """The addresses on which rank 0 can listen, best first.

    MASTER_ADDR and the requested networks are honoured. On a single host the store listens on the loopback,
    so that no other host can reach it. Over several hosts no candidate is a loopback, a bridge of containers,
    or an address that another host has as well.
    """
    by_host = ranks_by_host(infos)
    for ranks in by_host.values():
        first, local_ranks = infos[ranks[0]], [infos[rank].local_rank or 0 for rank in ranks]
        size = first.local_world_size or 0
        if sorted(local_ranks) != list(range(size)):
            raise UserError(
                f"{first.hostname} runs {len(local_ranks)} ranks with local ranks "
                f"{', '.join(map(str, local_ranks))}; expected 0 to {size - 1}.",
                fix="list each machine once, if the hostfile has one under two names",
            )
    name = env.get("MASTER_ADDR") if len(infos) > 1 else ""
    address = resolve(name) if name else LOOPBACK
    if len(by_host) == 1 or not ipaddress.ip_address(address).is_loopback:
        return [address]
    requested = requested_interface(env)
    master, *others = [infos[ranks[0]] for ranks in by_host.values()]
    elsewhere = {nic.address for info in others for nic in info.interfaces}
    networks = [{nic.network for nic in info.interfaces} for info in others]
    usable = [nic for nic in master.interfaces if not nic.is_loopback]
    if requested:
        usable = [nic for nic in usable if nic.matches(requested)]
    else:
        usable = [nic for nic in usable if not (nic.is_virtual or nic.address in elsewhere)]
    if not usable:
        raise UserError(
            f"{master.hostname}, where rank 0 runs, has no address that other hosts can reach: "
            f"only {', '.join(f'{i.name} {i.address}' for i in master.interfaces) or 'none'}.",
            fix="--master-addr ADDR",
        )
    # Networks that all other hosts share come first, then IPv4.
    usable.sort(key=lambda i: (-sum(i.network in nic for nic in networks), ":" in i.address))
    return [nic.address for nic in usable]


def check_alike(infos: Infos, programs: Sequence[Files], env: Mapping[str, str]) -> None:
    """Raise a UserError unless all ranks run the same files, and are where they are expected.

    `programs` has the files of the first rank of each host.
    """
    scripts = {info.program: info for info in reversed(infos) if info.program}
    if len(scripts) > 1:  # by mpirun … run a.py : … run b.py
        one, another = sorted(scripts.values(), key=lambda info: info.rank)[:2]
        raise UserError(
            f"rank {one.rank} on {one.hostname} runs {one.program}, and rank {another.rank} on "
            f"{another.hostname} runs {another.program}; all ranks of a job run the same script.",
            fix="start a job for each, or one script that chooses by RANK",
        )
    firsts = {ranks[0] for ranks in ranks_by_host(infos).values()}
    for info, program in zip(infos, programs, strict=True):
        if info.rank in firsts and program != programs[0]:
            ours, theirs = dict(programs[0]), dict(program)
            name = next(n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n))
            here, there = infos[0].hostname, info.hostname
            if name not in ours:  # for example after a change of the branch
                raise UserError(
                    f"{name} is on {there}, and not on {here}.",
                    fix="remove it there; mpiddp hosts push does, if an earlier push has sent it",
                )
            digest, other = (files.get(name, "")[:8] or "none" for files in (ours, theirs))
            sentence = f"{name} differs on {there} (sha256 {other} instead of {digest} on {here})."
            raise UserError(sentence, fix="mpiddp hosts push HOSTFILE")
    if placement := env.get(variables.PLACEMENT):
        names = expected_hosts(placement)
        if not _is_placed(infos, names):
            raise UserError(
                f"the ranks are not placed as in the hostfile ({placement}).\n{table(infos, names)}",
                fix="check the names of the hosts, and mpirun's own settings (environment, mca-params.conf)",
            )
    requested, is_on_one_host = env.get(variables.INTERFACE, ""), len(ranks_by_host(infos)) == 1
    for info in infos if requested and not is_on_one_host else ():
        if not any(interface.matches(requested) for interface in info.interfaces):
            present = " and ".join(dict.fromkeys(nic.name for nic in info.interfaces))
            where = f"{info.hostname}, which has {present or 'none'}"
            raise UserError(
                f'interface "{requested}" is not on {where}.', fix="name one of these, or none"
            )


def _is_placed(infos: Infos, names: Sequence[str]) -> bool:
    """Whether each name stands for one host, and none of them is the name of another host."""
    own_names = {
        info.host: {info.hostname.partition(".")[0], *(nic.address for nic in info.interfaces)}
        for info in infos
    }
    pairs = {(name, info.host) for name, info in zip(names, infos, strict=False)}
    one_to_one = len(pairs) == len({name for name, _ in pairs}) == len({host for _, host in pairs})
    every = set().union(*own_names.values())
    # Any other name is an alias, by which mpirun has reached the host.
    fits = [{name, name.partition(".")[0]} & every <= own_names[host] for name, host in pairs]
    return len(names) == len(infos) and one_to_one and all(fits)


def table(infos: Infos, expected: Sequence[str]) -> str:
    """A line for each rank: its host, local rank, and the expected host."""
    names = zip(infos, [*expected, *["none"] * len(infos)], strict=False)
    rows = [(str(info.rank), info.hostname, str(info.local_rank), name) for info, name in names]
    return align_columns([("rank", "host", "local rank", "expected host"), *rows])
