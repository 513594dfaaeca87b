"""The plan of a job: from the options of `mpiddp launch` to the request for one command.

options -> read_hosts -> preflight -> keep_usable -> place -> find_network -> Request -> compose
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts, parse_host_list, read_hostfile
from mpiddp.hosts.names import is_this_host, resolve_all
from mpiddp.hosts.schedulers import find_allocation
from mpiddp.hosts.slots import exclude
from mpiddp.launch import log, remembered
from mpiddp.launch.network import find_network, requested_networks
from mpiddp.launch.options import LaunchOptions, Where
from mpiddp.launch.place import place, ranks_by_host
from mpiddp.launch.starters.command import JobNetwork, RankStarter, Request
from mpiddp.launch.starters.environment import parse_exports
from mpiddp.launch.starters.table import check_mpi_args, find_starter
from mpiddp.launch.variables import Exports, check_gpu_choice, variables_of_ranks
from mpiddp.paths import cause_of, check_program
from mpiddp.text import counted

if TYPE_CHECKING:
    from mpiddp.launch.preflight import HostInfo

THIS_MACHINE = Hosts("this machine", (Host("localhost"),))

_read_once = cache(read_hostfile)  # a pipe can be read only once, but a restart needs it again


@dataclass(frozen=True)
class Plan:
    """One attempt at a job: the starter, and the request for it.

    named: the hosts that were to choose from. hosts: those that were chosen, before their ranks were placed.
    infos: what the preflight has found on them. left_out: the names of those that failed it.
    enough: the number of hosts of the job's first attempt. avoided: those that the job does without where it
    can.
    """

    starter: RankStarter
    request: Request
    named: Hosts
    hosts: Hosts
    infos: Mapping[Host, HostInfo]
    left_out: tuple[str, ...]
    enough: int
    avoided: remembered.Doubts


def make_plan(
    options: LaunchOptions,
    env: Mapping[str, str],
    *,
    max_ranks: int | None = None,
    named: Hosts | None = None,
    earlier: Plan | None = None,
    known: Mapping[Host, HostInfo] | None = None,
) -> Plan:
    """Find the hosts, the starter and the network, and log the choices that the user should know.

    Args:
        max_ranks: an upper bound on the number of ranks, beside the options.
        named: the hosts to choose from, by default those of the options.
        earlier: the plan of the attempt before this one, whose hosts have run the job.
        known: the preflight's results of hosts that need no new one.

    Raises:
        UserError: bad input, or something that this machine lacks.
        JobFailed: a machine failed.
    """
    # Not resolved: the path of its python identifies a virtual environment.
    python = Path(sys.executable).absolute()
    exports = parse_exports(options.how.all_exports, env)
    named = read_hosts(options.where, env) if named is None else named
    starter = find_starter(named.starter, options.how.mpirun, python, env)
    _check(options, named, starter, exports)
    resolve_all([host.name for host in named.hosts])
    if options.verbose:
        log.info(f"{starter.name}, {starter.program}")
        if len(named.hosts) > 1 and not starter.kind.has_scheduler:
            log.info(f"{named.transport.name} reaches the other hosts")
    wanted = _wanted(options.where, named)
    enough = earlier.enough if earlier else wanted

    doubts = {} if earlier else remembered.doubts(options.where, named)
    avoided = earlier.avoided if earlier else doubts if options.where.avoid_flaky else {}

    found, complaints = run_preflight(options, named, starter, env, earlier, known or {})
    silent = {host: why for host, why in complaints.items() if host not in found}
    remembered.note_silent(options.where, named, silent)
    infos = {host: info for host, info in found.items() if host not in complaints}
    in_order = remembered.placed_last(named, avoided)
    hosts = keep_usable(in_order, complaints, options.where, min(wanted, enough), avoided)
    remembered.say(avoided or doubts, hosts, avoids=bool(avoided))
    _check_versions(infos, starter)
    placed = place(
        hosts,
        infos,
        options,
        starter.kind,
        exports,
        max_ranks=max_ranks,
        may_be_fewer=len(hosts.usable) < max(wanted, enough),
    )
    network = find_network(placed, infos.values(), options.how.interface, dry_run=options.dry_run)
    _explain(options, placed, network)
    request = Request(
        hosts=placed,
        job=options.job.rank_command(python),
        folder=working_folder(env),
        variables=variables_of_ranks(options, starter, placed, network, env),
        env=env,
        network=network,
        bind="none" if options.how.bind == "gpu" else options.how.bind,  # the ranks do it
        mpi_args=options.how.mpi_args,
        is_command=options.job.is_command,
    )
    left_out = tuple(host.name for host in complaints)
    enough = earlier.enough if earlier else len(hosts.usable)
    infos = {host: infos[host] for host in hosts.hosts if host in infos}
    return Plan(starter, request, named, hosts, infos, left_out, enough, avoided)


def read_hosts(where: Where, env: Mapping[str, str]) -> Hosts:
    """The hosts that the user names, else those of an allocation, else this machine.

    Raises:
        UserError: an invalid hostfile, list or allocation.
    """
    hosts = THIS_MACHINE
    if where.hostfile is not None:
        # Names that differ only after their first dot are two hosts. Every MPI has an option for that.
        is_file = os.path.isfile(where.hostfile)  # noqa: PTH113 - False for any error
        read = read_hostfile if is_file else _read_once
        hosts = read(where.hostfile, keep_fqdn=True)
    elif where.host_list is not None:
        hosts = parse_host_list(where.host_list, keep_fqdn=True)
    elif not where.local and (granted := find_allocation(env)):
        hosts = granted
    return hosts if where.exclude is None else exclude(hosts, where.exclude)


def keep_usable(
    hosts: Hosts,
    complaints: Mapping[Host, str],
    where: Where,
    least: int,
    avoided: remembered.Doubts = MappingProxyType({}),
) -> Hosts:
    """The hosts without those that failed the preflight, and without the spares that the job does not need.

    The last `--spares` hosts are spares. One takes the place of each unusable host; without enough of
    them, unusable hosts are left out, within --min-hosts and --min-ranks.

    Args:
        complaints: why each unusable host is one.
        least: the number of hosts that have to remain unless the options allow fewer.
        avoided: usable hosts that are left out as far as this is allowed.

    Raises:
        UserError: too few hosts remain.
    """
    wanted = _wanted(where, hosts)
    least = (where.min_hosts or 1) if where.can_shrink else least
    left = replace(hosts, hosts=tuple(host for host in hosts.hosts if host not in complaints))
    if complaints and len(left.usable) < least:
        raise UserError("\n".join(complaints.values()))
    more = remembered.left_out(left.usable, avoided, where, least)
    left = replace(left, hosts=tuple(host for host in left.hosts if host not in more))
    for complaint in (*complaints.values(), *more.values()):
        log.info(f"leaving out a host: {complaint}")
    spares = left.usable[wanted:]
    if spares:
        log.info(f"kept in reserve: {', '.join(host.name for host in spares)}")
    return replace(left, hosts=tuple(host for host in left.hosts if host not in spares))


def _wanted(where: Where, hosts: Hosts) -> int:
    """The number of hosts that the job has if enough of them can be used."""
    usable = len(hosts.usable)
    wanted = usable - where.spares
    if wanted < 1:
        raise UserError(
            f"--spares {where.spares} leaves no host for the ranks: {hosts.source} has "
            f"{counted(usable, 'host')}."
        )
    if wanted < (where.min_hosts or 1):
        beside = f" beside {counted(where.spares, 'spare')}" if where.spares else ""
        raise UserError(
            f"only {counted(wanted, 'host')} given{beside}, but --min-hosts is {where.min_hosts}."
        )
    return wanted


def _check(options: LaunchOptions, hosts: Hosts, starter: RankStarter, exports: Exports) -> None:
    """Raise UserError for options that contradict each other, or that have no effect here."""
    check_mpi_args(starter.kind, options.how.mpi_args)
    check_gpu_choice(hosts, exports)
    where = options.where
    needs_preflight = {
        "--spares": where.spares,
        "--grow": options.when.grow_s,
        "--min-hosts": where.min_hosts,
        "--min-ranks": where.min_ranks,
        "--avoid-flaky": where.avoid_flaky,
    }
    for option, is_given in needs_preflight.items():
        if starter.kind.has_scheduler and is_given:
            raise UserError(
                f"{option}: inside a Slurm job, srun starts the ranks and mpiddp checks no host. Start them "
                "over ssh instead: --mpirun PATH"
            )
    if options.when.grow_s is not None and not hosts.scheduler and not where.names_hosts:
        raise UserError("--grow: no hosts are named, so none can join. Name them: --hostfile FILE")


def run_preflight(
    options: LaunchOptions,
    named: Hosts,
    starter: RankStarter,
    env: Mapping[str, str],
    earlier: Plan | None,
    known: Mapping[Host, HostInfo],
) -> tuple[Mapping[Host, HostInfo], Mapping[Host, str]]:
    """What each host that answers has, and why some cannot be used; nothing if no preflight runs.

    Hosts with slots=0 take no rank and are not checked. The first attempt may wait for hosts; a restart has
    pauses of its own.
    """
    is_local = all(is_this_host(host.name) for host in named.usable)
    program = options.job.command[0] if options.job.is_command else None
    if is_local and program is not None and not options.dry_run:
        check_program(program, env.get("PATH"))
    if is_local or starter.kind.has_scheduler or options.dry_run or not options.where.check:
        return {}, {}
    from mpiddp.launch import preflight  # only jobs over several hosts pay for it

    interface = options.how.interface
    needs = preflight.Needs(
        python=str(Path(sys.executable).absolute()),
        mpirun=str(starter.program),
        daemon=str(starter.daemon),
        folder=working_folder(env),
        path=env.get("PATH", os.defpath),
        interface=",".join(requested_networks(interface)) if interface else None,
        program=program,
    )
    wait_s = 0.0 if earlier else options.where.wait_s or 0.0
    asked = [host for host in named.usable if host not in known]
    found, complaints = preflight.preflight(asked, needs, named.transport, wait_s=wait_s)
    infos = {**known, **found}
    infos = {host: infos[host] for host in named.usable if host in infos}
    proven = earlier.hosts.hosts if earlier else ()
    own = {host: info for host, info in infos.items() if host not in complaints}
    return infos, complaints | preflight.strangers(own, proven, needs.mpirun)


def _check_versions(infos: Mapping[Host, HostInfo], starter: RankStarter) -> None:
    """Raise UserError if the versions of the hosts differ."""
    if not infos:
        return
    from mpiddp.launch.preflight import disagreements

    if found := disagreements(infos.values(), str(starter.program)):
        raise UserError("\n".join(found))


def _explain(options: LaunchOptions, placed: Hosts, network: JobNetwork) -> None:
    """Log the choices, if the options request it."""
    if options.verbose or options.dry_run:  # --report prints what the ranks find
        for line in ranks_by_host(placed):
            log.info(line)
    if options.verbose and network.interface:
        interface = network.interface
        log.info(f"{interface.name} ({interface.address}) leads to the other hosts")


def working_folder(env: Mapping[str, str]) -> str:
    """This folder by the shell's name for it, a link that may lead to a different folder on each host."""
    try:
        here = Path.cwd()
    except OSError as error:  # at a restart it may be gone, or its file server
        raise cause_of(error)(f"the working folder cannot be used: {error.strerror}.") from None
    logical = Path(env.get("PWD", ""))
    with contextlib.suppress(OSError, ValueError):
        if logical.is_absolute() and logical.is_dir() and logical.samefile(here):
            return str(logical)
    return str(here)
