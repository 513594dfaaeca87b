"""The plan of a job: from the options of `mpiddp launch` to the request for one command.

options -> read_hosts -> run_preflight -> choose -> with_slots -> place -> find_network -> Request
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.allocations import find_allocation
from mpiddp.hosts.gpus import hides_all_gpus
from mpiddp.hosts.hostfile import Host, Hosts, parse_host_list, read_hostfile
from mpiddp.hosts.names import forget_addresses, is_this_host, resolve_all
from mpiddp.launch import log
from mpiddp.launch.network import find_network, requested_networks
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.place import (
    Past,
    check_log_ranks,
    choose,
    memory_of,
    of_earlier_jobs,
    place,
    ranks_by_host,
    remember,
    wanted_hosts,
    with_slots,
)
from mpiddp.launch.preflight import Checked, Needs, preflight
from mpiddp.launch.starters.command import JobNetwork, RankStarter, Request
from mpiddp.launch.starters.table import find_starter
from mpiddp.launch.variables import check_gpu_choice, variables_of_ranks
from mpiddp.paths import cause_of, check_program
from mpiddp.text import all_of, listed, shown

_LONGEST = 1 << 16  # bytes of a sentence about hosts that can join
THIS_MACHINE = Hosts("this machine", (Host("localhost"),))

_read_once = cache(read_hostfile)  # a pipe can be read only once, but a restart needs it again


class Plan(NamedTuple):
    """One attempt at a job: the starter, and the request for it.

    named: the hosts that were to choose from. hosts: those that were chosen, before their ranks were placed.
    memory: the history of the named hosts; None for this one.
    """

    starter: RankStarter
    request: Request
    named: Hosts
    hosts: Hosts
    memory: Path | None


def make_plan(
    options: LaunchOptions,
    env: Mapping[str, str],
    named: Hosts | None = None,
    past: Past | None = None,
) -> Plan:
    """Find the hosts, the starter and the network, and log the choices that the user should know.

    named: the hosts to choose from, by default those of the options. past: what the attempts before this one
    have taught; None for the first, which knows of earlier jobs.

    Raises:
        UserError: bad input, or something that this machine lacks.
        JobFailed: a machine failed.
    """
    named = read_hosts(options, env) if named is None else named
    starter = find_starter(named.starter, options.mpirun, _python(), env)
    kind, is_first = starter.kind, past is None
    check_gpu_choice(named, options.variables)
    # srun waits for hosts by itself. Without a preflight, --min-hosts still counts at a restart.
    needing = options.min_hosts if kind.has_scheduler else options.wait_s
    needing = needing or options.spares or options.grow_s
    if needing and (kind.has_scheduler or not options.check):
        raise UserError(
            "--spares, --min-hosts, --wait-for-hosts and --grow need the preflight, which finds the hosts "
            "that answer. Leave out --no-check, or start the ranks over ssh instead of srun: --mpirun PATH"
        )
    wanted, least = wanted_hosts(named, options.spares, options.min_hosts, past and past.enough)
    resolve_all([host.name for host in named.hosts])
    is_local = all(is_this_host(host.name) for host in named.usable)
    memory = None if is_local else memory_of(options.hostfile)
    past = past or (of_earlier_jobs(memory, named) if memory else Past())
    # The first attempt may wait for hosts; a restart has pauses of its own.
    wait_s = options.wait_s or 0.0 if is_first else 0.0
    checked = run_preflight(options, named, starter, env, wait_s=wait_s)
    if memory and checked.silent:
        remember(memory, failed={host.key: why for host, why in checked.silent.items()})
    chosen = choose(named, checked.complaints, wanted, least, past)
    infos = {host: checked.infos[host] for host in chosen.hosts if host in checked.infos}
    is_default = options.host_list == "localhost" or not (options.names_hosts or named.scheduler)
    with_counts = with_slots(
        chosen,
        infos,
        options.variables,
        options.backend,
        by_number=is_default and (options.n, options.npernode) != (None, None),
        dry_run=options.dry_run,
    )
    if not options.names_hosts:
        log.info(f"no hosts given: using {named.source}, slots={with_counts.total_slots}")
    placed = place(
        with_counts,
        kind,
        options.n,
        options.npernode,
        may_be_fewer=len(chosen.usable) < max(wanted, past.enough or 0),
        max_ranks=past.max_ranks,
    )
    if is_first:
        check_log_ranks(options.log_ranks, placed.world_size)
    network = find_network(placed, infos.values(), options.interface, dry_run=options.dry_run)
    _explain(options, starter, placed, network)
    settings = options.settings(network.networks)
    request = Request(
        hosts=placed,
        job=options.job.rank_command(_python()),
        folder=working_folder(env),
        variables=variables_of_ranks(options.variables, settings, starter, placed, network, env),
        env=env,
        network=network,
        bind="none" if options.bind == "gpu" else options.bind,  # the ranks do it
        mpi_args=options.mpi_args,
        is_command=options.job.is_command,
    )
    return Plan(starter, request, named, chosen, memory)


def read_hosts(options: LaunchOptions, env: Mapping[str, str], *, is_first: bool = True) -> Hosts:
    """The hosts that the user names, else those of an allocation, else this machine.

    Once the job has begun (not `is_first`), a host of --exclude may be gone from an edited hostfile.
    """
    if options.hostfile is not None:
        # Names that differ only after their first dot are two hosts. Every MPI has an option for that.
        is_file = os.path.isfile(options.hostfile)  # noqa: PTH113 - False for any error
        hosts = (read_hostfile if is_file else _read_once)(options.hostfile)
    elif options.host_list is not None:
        hosts = parse_host_list(options.host_list)
    else:
        hosts = find_allocation(env) or THIS_MACHINE
    if options.exclude is None:
        return hosts
    return exclude(hosts, options.exclude, may_be_gone=not is_first)


def exclude(hosts: Hosts, names: str, *, may_be_gone: bool = False) -> Hosts:
    """The hosts without those of `--exclude node1,node2`."""
    excluded = {name.strip().lower() for name in names.split(",")}
    unknown = sorted(excluded - {host.key for host in hosts.hosts})
    if unknown and not may_be_gone:
        known = listed([host.name for host in hosts.hosts])
        raise UserError(
            f'--exclude: "{shown(unknown[0])}" is not in {hosts.source}, which has {known}.'
        )
    left = tuple(host for host in hosts.hosts if host.key not in excluded)
    if all(host.slots == 0 for host in left):
        raise UserError(f"--exclude {names} leaves no slots in {hosts.source}.")
    return replace(hosts, hosts=left)


def run_preflight(
    options: LaunchOptions,
    named: Hosts,
    starter: RankStarter,
    env: Mapping[str, str],
    *,
    wait_s: float = 0.0,
) -> Checked:
    """What each host that answers has, and why some cannot be used; nothing if no preflight runs.

    Hosts with slots=0 take no rank and are not checked.
    """
    is_local = all(is_this_host(host.name) for host in named.usable)
    program = options.job.command[0] if options.job.is_command else None
    if is_local and program is not None and not options.dry_run:
        check_program(program, env.get("PATH"))
    if is_local or starter.kind.has_scheduler or options.dry_run or not options.check:
        return Checked()
    interface = options.interface
    needs = Needs(
        python=str(_python()),
        mpirun=str(starter.program),
        daemon=str(starter.daemon),
        folder=working_folder(env),
        path=env.get("PATH", os.defpath),
        interface=",".join(requested_networks(interface)) if interface else None,
        program=program,
        uses_gpus=not hides_all_gpus({**env, **options.variables}),
    )
    return preflight(named.usable, needs, named.transport, wait_s=wait_s)


def _explain(
    options: LaunchOptions, starter: RankStarter, placed: Hosts, network: JobNetwork
) -> None:
    """Log what --verbose or a dry run shows of a plan."""
    if options.verbose:
        log.info(f"{starter.name}, {starter.program}")
        if len(placed.hosts) > 1 and not starter.kind.has_scheduler:
            log.info(f"{placed.transport.name} reaches the other hosts")
        if network.interface:
            own = f"{network.interface.name} ({network.interface.address})"
            log.info(f"{own} leads to the other hosts")
    if options.verbose or options.dry_run:  # the ranks of --verbose print what they find
        for line in ranks_by_host(placed):
            log.info(line)


def _python() -> Path:
    """This Python. Links are not resolved: its path identifies a virtual environment."""
    return Path(sys.executable).absolute()


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


# --- hosts that can join a running job ---


class HostSearch:
    """The looks of `--grow 10m` during one attempt. Its file descriptor is readable when `found` has news.

    A look reads files, resolves names and logs in to hosts, any of which may hang. So a thread looks. It
    contacts hosts that could add ranks, and the first of the job, whose versions they must have.
    """

    def __init__(self, options: LaunchOptions, plan: Plan, avoided: Collection[str]) -> None:
        self._options = options
        self._plan = plan
        self._avoided = avoided
        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._is_over = threading.Event()

    def fileno(self) -> int:
        return self._receiver.fileno()

    def begin(self) -> None:
        """Look from now on, every `--grow`."""
        threading.Thread(target=self._search, daemon=True).start()

    def found(self) -> str:
        """What a look has found: "node1 can join"."""
        return self._receiver.recv(_LONGEST).decode()

    def close(self) -> None:
        """Look no more. A look that hangs is left alone: its thread ends with the process."""
        self._is_over.set()
        self._receiver.close()

    def _search(self) -> None:
        with self._sender, contextlib.suppress(OSError):  # the attempt is over
            while not self._is_over.wait(self._options.grow_s):
                if found := look(self._options, self._plan, self._avoided):
                    self._sender.send(found.encode()[:_LONGEST])


def look(options: LaunchOptions, plan: Plan, avoided: Collection[str] = ()) -> str:
    """Look once, for hosts that `plan` could do with, but for those `avoided`: "node1 can join", or "".

    A list of hosts in error, as while it is edited, and a machine that fails, are for the next look.
    """
    if options.n is not None and plan.request.world_size >= options.n:
        return ""
    used = {host.key for host in plan.hosts.hosts}
    try:
        listed = read_hosts(options, os.environ, is_first=False).usable
        new = [host for host in listed if host.key not in {*used, *avoided}]
        if not new or len(listed) - options.spares <= len(plan.hosts.usable):
            return ""
        forget_addresses()
        # With the same versions as the first host of the job.
        together = replace(plan.named, hosts=(*plan.hosts.usable[:1], *new))
        checked = run_preflight(options, together, plan.starter, os.environ)
    except (UserError, JobFailed):
        return ""
    joining = [host.name for host in new if host not in checked.complaints]
    return f"{all_of(joining)} can join" if joining else ""
