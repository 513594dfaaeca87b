"""The number of ranks on each host: its slots, within the limits of -n, --npernode and --exclude."""

from __future__ import annotations

from dataclasses import replace

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Hosts, slots_of
from mpiddp.text import counted, listed, shown


def exclude(hosts: Hosts, names: str) -> Hosts:
    """The hosts without those of `--exclude node1,node2`.

    Raises:
        UserError: a name is not in `hosts`, or no slot remains.
    """
    keys = [name.strip().lower() for name in names.split(",")]
    known_keys = {host.key for host in hosts.hosts}
    for key in keys:
        if key not in known_keys:
            known = listed([host.name for host in hosts.hosts])
            raise UserError(
                f'--exclude: "{shown(key)}" is not in {hosts.source}, which has {known}.'
            )
    left = tuple(host for host in hosts.hosts if host.key not in set(keys))
    if all(host.slots == 0 for host in left):
        raise UserError(f"--exclude {names} leaves no slots in {hosts.source}.")
    return replace(hosts, hosts=left)


def check_ranks(hosts: Hosts, n: int | None, npernode: int | None = None) -> None:
    """Raise UserError if the hosts have too few slots for `n` ranks, or for `npernode` on each host."""
    usable = [host for host in hosts.hosts if slots_of(hosts, host) > 0]
    if npernode is not None:
        for host in usable:
            if npernode > slots_of(hosts, host):
                raise UserError(
                    f"--npernode {npernode} is more than the {host.slots} slots of {host.name} "
                    f"({hosts.where(host)})."
                )
        if n is not None and n > npernode * len(usable):
            raise UserError(
                f"-n {n} is more than --npernode {npernode} allows on the "
                f"{counted(len(usable), 'host')} of {hosts.source}: "
                f"{counted(npernode * len(usable), 'rank')}."
            )
    if n is not None and n > hosts.total_slots:
        raise UserError(
            f"-n {n} is more than the {hosts.total_slots} slots of {hosts.source} "
            f"({listed([f'{host.name}={host.slots}' for host in hosts.hosts])})."
        )


def ranks_per_host(hosts: Hosts, n: int | None = None, npernode: int | None = None) -> Hosts:
    """The hosts with their numbers of ranks: `n` ranks fill the slots (or `npernode`) in order.

    Hosts without a rank are left out. Raises UserError as `check_ranks`.
    """
    check_ranks(hosts, n, npernode)
    left = hosts.total_slots if n is None else n
    placed = []
    for host in hosts.hosts:
        room = slots_of(hosts, host)
        ranks = min(left, room if npernode is None else min(npernode, room))
        if ranks:
            placed.append(replace(host, ranks=ranks))
        left -= ranks
    return replace(hosts, hosts=tuple(placed))
