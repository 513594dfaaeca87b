"""From the options of `mpiddp launch` to what is to be started where, with everything looked up."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mpiddp.errors import UserError
from mpiddp.hosts import allocation
from mpiddp.hosts.hostfile import Host, Hosts, parse_host_list, read_hostfile
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.nodes import Node, UnusableHosts, is_this_host, name_nodes, ranks_by_host
from mpiddp.hosts.slots import exclude, ranks_per_host
from mpiddp.launch.network import address_towards, link_to, requested_interfaces
from mpiddp.launch.remote.gpus import asked_backend, count_gpus, fit_to_gpus, usable
from mpiddp.launch.starters.command import Request
from mpiddp.launch.starters.detect import RankStarter, find_mpirun, find_srun, identify
from mpiddp.launch.starters.environment import forwarded, parse_exports

if TYPE_CHECKING:
    from mpiddp.launch.remote.preflight import HostInfo

Say = Callable[[str], None]


def make_request(
    options: argparse.Namespace,
    started_at: float,
    env: Mapping[str, str],
    say: Say,
    *,
    max_ranks: int | None = None,
) -> tuple[RankStarter, Request]:
    """The MPI to use and the request for it. `say` gets sentences for the user meanwhile.

    Args:
        started_at: when the user pressed enter, in seconds since 1970.
        max_ranks: start no more, whatever the options say.

    Raises:
        UserError: anything that makes no sense, or that this machine lacks.
    """
    exports = parse_exports(options.x, env)
    asked = options.interface
    wished = requested_interfaces(asked) if asked else ()
    if asked in [each.address for each in wished]:  # other hosts have others there
        asked = ",".join(each.network for each in wished)
    # Not resolved: a virtual environment is known by the path of its own python.
    python = Path(sys.executable).absolute()

    hosts, is_allocated = _hosts(options, env)
    uses_srun = is_allocated and options.mpirun is None
    starter = identify(
        find_srun(env) if uses_srun else find_mpirun(options.mpirun, python, env), env
    )
    if options.verbose:
        say(f"{starter.name}, {starter.program}")

    def look_at(hosts: Hosts) -> dict[Host, HostInfo]:
        return _look(options, starter, python, hosts, env, asked)

    fit, facts = _fit(options, hosts, look_at, say)
    fewer = len(fit.hosts) < len(hosts.hosts)
    fitted = _with_slots(options, fit, facts, say)
    nodes = _nodes(options, starter, fitted, max_ranks, fewer=fewer)
    if options.verbose or options.dry_run:  # --report shows what the ranks find
        for line in ranks_by_host(nodes):
            say(line)
    interface, networks = _network(nodes, wished, asked, facts.values())
    if options.verbose and interface:
        say(f"{interface.name} ({interface.address}) leads to the other hosts")

    control_address = _control_address(nodes, interface)
    if control_address is None and not options.dry_run:
        say(
            f"no address is known by which {nodes[-1].name} reaches this machine: the job's end is what "
            f"{starter.program.name} says of it, and a stop ends it without a save. Name an --interface."
        )

    settings = {name: value for name, value in exports.items() if value is not None}
    settings |= _settings(options, nodes, networks, asked, started_at)
    if starter.kind == "slurm" and len(nodes) > 1 and is_this_host(nodes[0].name) and interface:
        # srun carries no word of rank 0's address, and its host's name may lie in another network.
        settings.setdefault("MASTER_ADDR", env.get("MASTER_ADDR") or interface.address)
    # Beside its own python, mpi4py finds the library by itself.
    if starter.libmpi is not None and starter.program.parent != python.parent:
        named = None if options.mpirun else env.get("MPI4PY_LIBMPI")
        settings.setdefault("MPI4PY_LIBMPI", named or str(starter.libmpi))
    return starter, Request(
        nodes=nodes,
        job=_job(options, python),
        folder=_working_folder(env),
        exports=forwarded(env, [*exports, *settings]),
        settings=settings,
        env=env,
        bind=options.bind,
        interface=interface.name if interface else None,
        networks=networks,
        as_root=os.geteuid() == 0,
        control_address=control_address,
    )


_read_once = cache(read_hostfile)  # a pipe has its text once, and a restart wants it again


def _hosts(options: argparse.Namespace, env: Mapping[str, str]) -> tuple[Hosts, bool]:
    """The hosts, and whether they are those of a Slurm allocation."""
    allocated = None
    if options.hostfile is not None:
        # Names that differ only after their first dot are two hosts, and every MPI can be told so.
        read = read_hostfile if Path(options.hostfile).is_file() else _read_once
        hosts = read(options.hostfile, keep_fqdn=True)
    elif options.host_list is not None:
        hosts = parse_host_list(options.host_list, keep_fqdn=True)
    else:
        allocated = allocation.allocation(env)
        hosts = allocated or Hosts("this machine", (Host("localhost"),))
    if options.exclude is not None:
        hosts = exclude(hosts, options.exclude)
    return hosts, allocated is not None


def _look(
    options: argparse.Namespace,
    starter: RankStarter,
    python: Path,
    hosts: Hosts,
    env: Mapping[str, str],
    interface: str | None,
) -> dict[Host, HostInfo]:
    """What the hosts tell of themselves; {} where nobody is asked: Slurm has looked at its own.

    A host with slots=0 takes no rank, so it may be broken.
    """
    used = [host for host in hosts.hosts if host.slots != 0]
    local = [is_this_host(host.name) for host in used]
    if all(local) or starter.kind == "slurm" or options.dry_run or not options.check:
        return {}
    from mpiddp.launch.remote.preflight import (  # only jobs over several hosts pay for it
        HostRequirements,
        look,
    )

    wanted = HostRequirements(
        python=str(python),
        mpirun=str(starter.program),
        daemon=str(starter.daemon),
        folder=_working_folder(env),
        path=env.get("PATH", os.defpath),
        interface=interface,
    )
    return look(used, local, wanted)


def _fit(
    options: argparse.Namespace,
    hosts: Hosts,
    look_at: Callable[[Hosts], dict[Host, HostInfo]],
    say: Say,
) -> tuple[Hosts, dict[Host, HostInfo]]:
    """The hosts that can be used, as far as the user can do with fewer than all, and their facts."""
    usable = sum(host.slots != 0 for host in hosts.hosts)
    if usable < (options.min_hosts or 1):
        named = "host is" if usable == 1 else "hosts are"
        raise UserError(f"only {usable} {named} named, and --min-hosts is {options.min_hosts}.")
    try:
        return hosts, look_at(hosts)
    except UnusableHosts as unfit:
        fit = tuple(host for host in hosts.hosts if host not in unfit.complaints)
        left = sum(host.slots != 0 for host in fit)
        if not options.can_shrink or left < (options.min_hosts or 1):
            raise
        for complaint in unfit.complaints.values():
            say(f"left out: {complaint}")
    hosts = replace(hosts, hosts=fit)
    return hosts, look_at(hosts)


def _with_slots(
    options: argparse.Namespace, hosts: Hosts, facts: Mapping[Host, HostInfo], say: Say
) -> Hosts:
    """The hosts with known slot counts; what the user would not expect is said."""

    is_named = (options.hostfile, options.host_list) != (None, None)

    def count(host: Host) -> int:
        if not is_named and (options.n, options.npernode) != (None, None):
            return count_gpus(host) or len(os.sched_getaffinity(0))  # -n is how many are wished for
        if host in facts:
            return usable(facts[host].gpus, os.environ)
        if options.dry_run and not is_this_host(host.name):
            say(f"{host.name} has no slot count, and a dry run asks no host: taken as 1")
            return 1
        return count_gpus(host)

    hosts, notes = fit_to_gpus(hosts, asked_backend(options.command[1:]), count, facts.keys())
    if not is_named:
        say(f"no hosts named: {hosts.source}, slots={hosts.total_slots}")
    for note in notes:
        say(note)
    return hosts


def _nodes(
    options: argparse.Namespace,
    starter: RankStarter,
    hosts: Hosts,
    max_ranks: int | None,
    *,
    fewer: bool,
) -> tuple[Node, ...]:
    """Args: fewer: some hosts were left out, so that there may be less than `-n` ranks."""
    n = options.n
    if fewer and n is not None:
        n = min(n, sum(count for _, count in ranks_per_host(hosts, None, options.npernode)))
    placed = ranks_per_host(hosts, n, options.npernode)
    if max_ranks is not None:
        n = min(sum(count for _, count in placed), max_ranks)
        placed = ranks_per_host(hosts, n, options.npernode)
    if (n := sum(count for _, count in placed)) < (options.min_ranks or 1):
        ranks = "rank" if n == 1 else "ranks"
        raise UserError(f"only {n} {ranks} can be started, and --min-ranks is {options.min_ranks}.")
    if starter.kind == "slurm":
        return tuple(Node(host.name, ranks) for host, ranks in placed)
    own_name = socket.gethostname()
    if starter.kind == "openmpi" and starter.major < 5:  # which cuts its own name in any case
        own_name = own_name.partition(".")[0]
    return name_nodes(hosts, placed, own_name)


def _network(
    nodes: Sequence[Node],
    wished: Sequence[Interface],
    asked: str | None,
    facts: Collection[HostInfo],
) -> tuple[Interface | None, tuple[str, ...]]:
    """This machine's interface for the job, and what MPI has to keep to, if known, on all hosts.

    What the user has `asked` for is there on all of them; this machine's network of that name may not be.
    """
    if wished and asked:
        return wished[0], tuple(asked.split(","))
    link = link_to([node.name for node in nodes if not is_this_host(node.name)])
    if link is None:
        return None, ()
    if not link.is_direct:
        return link.interface, ()
    own = (link.interface.name, link.interface.network)
    found = [[(each.name, each.network) for each in host.interfaces] for host in facts]
    # Open MPI 5 warns of a network where a host has IPv6 as well, of a name it does not.
    is_everywhere = bool(found) and all(own in names for names in found)
    return link.interface, (own[0] if is_everywhere else own[1],)


def _control_address(nodes: Sequence[Node], interface: Interface | None) -> str | None:
    """The one address of this machine that all ranks can reach, and nobody else needs to."""
    others = [node.name for node in nodes if not is_this_host(node.name)]
    if not others:
        return "127.0.0.1"
    if interface:
        return interface.address
    return next((address for name in others if (address := address_towards(name))), None)


def _settings(
    options: argparse.Namespace,
    nodes: Sequence[Node],
    networks: Sequence[str],
    interface: str | None,
    started_at: float,
) -> dict[str, str]:
    """What the launcher tells the ranks, as environment variables."""
    told = {
        "MPIDDP_PLACEMENT": ",".join(f"{node.name}:{node.ranks}" for node in nodes),
        "MPIDDP_NETWORKS": ",".join(networks) or None,
        "MPIDDP_INTERFACE": interface,
        "MPIDDP_TIMEOUT": options.timeout,
        "MPIDDP_REPORT": 1 if options.report else None,
        "MPIDDP_VERBOSE": 1 if options.verbose else None,
        "MPIDDP_LAUNCHED_AT": None if options.dry_run else f"{started_at:.3f}",
        "MASTER_ADDR": options.master_addr,
    }
    return {name: str(value) for name, value in told.items() if value is not None}


def _job(options: argparse.Namespace, python: Path) -> tuple[str, ...]:
    """What every rank runs: our own verbs as they are, anything else through `mpiddp run`."""
    if options.is_module and options.command[:2] in (["mpiddp", "train"], ["mpiddp", "bench-rank"]):
        return (str(python), "-m", *options.command)
    module = ("-m",) if options.is_module else ()
    return (str(python), "-m", "mpiddp", "run", *module, *options.command)


def _working_folder(env: Mapping[str, str]) -> str:
    """This folder, by the name that the shell has for it: behind it may stand another on each host."""
    logical = Path(env.get("PWD", ""))
    if logical.is_absolute() and logical.is_dir() and logical.samefile(Path.cwd()):
        return str(logical)
    return str(Path.cwd())
