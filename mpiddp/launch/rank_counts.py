"""The number of ranks on each host, from its slots, its GPUs and the options of the launch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.nodes import Node, is_this_host, name_nodes
from mpiddp.hosts.slots import ranks_per_host
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.launch import log
from mpiddp.launch.gpu_choice import variables_of_ranks
from mpiddp.launch.options import Where
from mpiddp.launch.remote.gpus import count_gpus, fit_to_gpus, usable
from mpiddp.launch.starters.detect import RankStarter
from mpiddp.launch.usable_hosts import THIS_MACHINE, UsableHosts
from mpiddp.text import counted


def with_slots(
    where: Where,
    found: UsableHosts,
    backend: str | None,
    exports: Mapping[str, str | None],
    *,
    dry_run: bool,
    transport: Transport = SSH,
) -> Hosts:
    """The hosts with known slot counts. Logs the counts that the user may not expect.

    Args:
        exports: the variables that the user names for the ranks; None is the launcher's own value.

    Raises:
        UserError: a host with fewer GPUs than slots, or without a GPU that the hostfile names.
    """

    is_default = not where.names_hosts and found.hosts.hosts == THIS_MACHINE.hosts

    def count(host: Host) -> int:
        env = variables_of_ranks(host.name, os.environ, exports)
        if is_default and where.names_ranks:  # the user requests a number
            return count_gpus(host, env) or len(os.sched_getaffinity(0))
        if host in found.info:
            return usable(host, found.info[host].gpus, env)
        if dry_run and not is_this_host(host.name):
            log.info(
                f"{host.name} has no slot count, and a dry run contacts no host: assuming slots=1"
            )
            return 1
        return count_gpus(host, env, transport)

    for host in found.hosts.hosts:
        if host.gpus is not None and (host in found.info or is_this_host(host.name)):
            count(host)  # raises for a GPU that the host does not have
    backend = "gloo" if where.share_gpus else backend
    are_granted = not (where.names_hosts or where.local or is_default)
    hosts, notes = fit_to_gpus(
        found.hosts, backend, count, found.info.keys(), are_granted=are_granted
    )
    if not where.names_hosts and not where.local:
        log.info(f"no hosts given: using {hosts.source}, slots={hosts.total_slots}")
    for note in notes:
        log.info(note)
    return hosts


def place_ranks(
    where: Where,
    hosts: Hosts,
    starter: RankStarter,
    *,
    max_ranks: int | None,
    some_left_out: bool,
) -> tuple[Node, ...]:
    """The nodes in the order of their ranks.

    Args:
        hosts: with known slot counts.
        max_ranks: an upper bound on the number of ranks, beside the options.
        some_left_out: some hosts are left out, so fewer ranks than `-n` may start.

    Raises:
        UserError: more ranks than slots, or fewer than the user accepts.
    """
    n = where.n
    if some_left_out and n is not None:
        n = min(n, _total(ranks_per_host(hosts, None, where.npernode)))
    placed = ranks_per_host(hosts, n, where.npernode)
    if max_ranks is not None and _total(placed) > max_ranks:
        placed = ranks_per_host(hosts, max_ranks, where.npernode)
    if (total := _total(placed)) < (where.min_ranks or 1):
        raise UserError(
            f"only {counted(total, 'rank')} can start, but --min-ranks is {where.min_ranks}."
        )
    if starter.kind == "slurm":
        return tuple(Node(host.name, ranks) for host, ranks in placed)
    own_name = socket.gethostname()
    if starter.kind == "openmpi" and starter.major < 5:  # it always cuts its own name
        own_name = own_name.partition(".")[0]
    return name_nodes(hosts, placed, own_name)


def _total(placed: list[tuple[Host, int]]) -> int:
    return sum(ranks for _, ranks in placed)
