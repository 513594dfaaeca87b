"""Turn the options of `mpiddp launch` into a plan: the hosts, their ranks, the network, the starter."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpiddp.errors import UserError
from mpiddp.hosts.allocation import Allocation, leading_schedulers
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.nodes import Node, is_this_host, ranks_by_host, resolve_all
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.launch import log
from mpiddp.launch.gpu_choice import check_gpu_choice, gpu_table
from mpiddp.launch.network import (
    JobNetwork,
    RequestedInterface,
    find_network,
    request_interface,
)
from mpiddp.launch.options import How, LaunchOptions, Where
from mpiddp.launch.rank_counts import place_ranks, with_slots
from mpiddp.launch.remote.wait import wait_for_hosts
from mpiddp.launch.starters.command import Request
from mpiddp.launch.starters.detect import RankStarter, find_mpirun, find_srun, identify
from mpiddp.launch.starters.environment import forwarded, parse_exports
from mpiddp.launch.starters.mpi_args import check_mpi_args
from mpiddp.launch.starters.shared import can_shield
from mpiddp.launch.usable_hosts import (
    Earlier,
    Named,
    UsableHosts,
    check_hosts,
    find_hosts,
)
from mpiddp.paths import cause_of, check_program
from mpiddp.protocol.variables import (
    BIND,
    GPUS,
    INTERFACE,
    LOG_DIR,
    NETWORKS,
    PLACEMENT,
    REPORT,
    TIMEOUT,
    VERBOSE,
)

if TYPE_CHECKING:
    from mpiddp.launch.remote.preflight import HostInfo


@dataclass(frozen=True)
class Plan:
    """One attempt at a job: the starter, and the request for it.

    `named`: the hosts that were to choose from. `found`: those that were chosen.
    """

    starter: RankStarter
    request: Request
    named: Named
    found: UsableHosts


def make_plan(
    options: LaunchOptions,
    started_at: float,
    env: Mapping[str, str],
    *,
    max_ranks: int | None = None,
    may_wait: bool = False,
    earlier: Earlier | None = None,
) -> Plan:
    """Find the hosts, the starter and the network, and log the choices that the user should know.

    Args:
        started_at: when the user started the command, in seconds since 1970.
        max_ranks: an upper bound on the number of ranks, beside the options.
        may_wait: wait for hosts if the options request it. A restart has pauses of its own.
        earlier: what earlier attempts say, None for the first one.

    Raises:
        UserError: bad input, or something that this machine lacks.
        JobFailed: a machine failed.
    """
    exports = parse_exports(options.how.all_exports, env)
    requested = request_interface(options.how.interface) if options.how.interface else None
    # Not resolved: the path of its python identifies a virtual environment.
    python = Path(sys.executable).absolute()

    named, allocation = earlier.named if earlier else find_hosts(options.where, env)
    transport = allocation.transport if allocation else SSH
    starter = _find_starter(options.how, python, env, allocation)
    check_mpi_args(starter, options.how.mpi_args)
    check_gpu_choice(named, exports)
    _check_spares(options.where)
    if starter.kind == "slurm":
        _check_without_preflight(options)
    if options.when.grow_s is not None and allocation is None and not options.where.names_hosts:
        raise UserError("--grow: no hosts are named, so none can join. Name them: --hostfile FILE")
    # Slurm starts a job when its nodes are up, and the site may have no ssh to ask them over.
    can_wait = may_wait and not options.dry_run and starter.kind != "slurm"
    if can_wait and options.where.wait_s is not None:
        expected = [host for host in named.hosts if host.slots != 0]
        wait_for_hosts(expected, options.where.wait_s, transport)
    resolve_all([host.name for host in named.hosts])
    if options.verbose:
        log.info(f"{starter.name}, {starter.program}")
        if len(named.hosts) > 1 and starter.kind != "slurm":
            log.info(f"{transport.name} reaches the other hosts")

    def preflight(hosts: Hosts) -> Mapping[Host, HostInfo]:
        return _preflight(options, starter, python, hosts, env, requested, transport, earlier)

    found = check_hosts(options.where, named, preflight, earlier.enough if earlier else None)
    hosts = with_slots(
        options.where,
        found,
        options.backend,
        exports,
        dry_run=options.dry_run,
        transport=transport,
    )
    nodes = place_ranks(
        options.where,
        hosts,
        starter,
        max_ranks=max_ranks,
        some_left_out=found.some_left_out,
    )
    network = find_network(nodes, requested, found.info.values())
    _explain(options, starter, nodes, network)

    settings = {name: value for name, value in exports.items() if value is not None}
    hidden = frozenset(settings)
    settings |= _settings(options, nodes, network, requested, started_at)
    if starter.kind != "slurm" and (table := gpu_table(nodes, env, exports)):
        settings[GPUS] = table  # Slurm itself chooses the GPUs of each host
    for name, value in _defaults(options.how, starter, python, nodes, network, env).items():
        settings.setdefault(name, value)
    return Plan(
        starter=starter,
        named=(named, allocation),
        found=found,
        request=Request(
            nodes=nodes,
            job=options.job.rank_command(python),
            folder=_working_folder(env),
            exports=forwarded(env, [*exports, *settings]),
            settings=settings,
            env=env,
            hidden=hidden,
            bind="none" if options.how.bind == "gpu" else options.how.bind,  # the ranks do it
            mpi_args=options.how.mpi_args,
            interface=network.interface.name if network.interface else None,
            networks=network.networks,
            as_root=os.geteuid() == 0,
            is_command=options.job.is_command,
            control_address=network.control_address,
            transport=transport,
            schedulers=leading_schedulers(env),
            shields_ssh=starter.kind == "openmpi" and len(nodes) > 1 and can_shield(),
        ),
    )


def _find_starter(
    how: How, python: Path, env: Mapping[str, str], allocation: Allocation | None
) -> RankStarter:
    uses_srun = allocation is not None and allocation.starter == "srun" and how.mpirun is None
    return identify(find_srun(env) if uses_srun else find_mpirun(how.mpirun, python, env), env)


def _check_spares(where: Where) -> None:
    """Raise UserError for spares that could never take a host's place."""
    if where.spares and not where.check:
        raise UserError(
            "--spares needs the preflight, which finds the hosts that fail. Leave out --no-check."
        )


def _check_without_preflight(options: LaunchOptions) -> None:
    """Raise UserError for options that have no effect, because srun starts the ranks."""
    where = options.where
    for option, is_given in (
        ("--spares", where.spares),
        ("--grow", options.when.grow_s),
        ("--min-hosts", where.min_hosts),
        ("--min-ranks", where.min_ranks),
    ):
        if is_given:
            raise UserError(
                f"{option}: inside a Slurm job, srun starts the ranks and mpiddp checks no host. Start them "
                "over ssh instead: --mpirun PATH"
            )


def _preflight(
    options: LaunchOptions,
    starter: RankStarter,
    python: Path,
    hosts: Hosts,
    env: Mapping[str, str],
    requested: RequestedInterface | None,
    transport: Transport,
    earlier: Earlier | None,
) -> Mapping[Host, HostInfo]:
    """The preflight's results; {} if it does not run. Slurm checks its own hosts.

    Hosts with slots=0 take no rank and are not checked.
    """
    used = [host for host in hosts.hosts if host.slots != 0]
    is_local = all(is_this_host(host.name) for host in used)
    program = options.job.command[0] if options.job.is_command else None
    if is_local and program is not None and not options.dry_run:
        check_program(program, env.get("PATH"))
    if is_local or starter.kind == "slurm" or options.dry_run or not options.where.check:
        return {}
    from mpiddp.launch.remote import preflight  # only jobs over several hosts pay for it

    requirements = preflight.HostRequirements(
        python=str(python),
        mpirun=str(starter.program),
        daemon=str(starter.daemon),
        folder=_working_folder(env),
        path=env.get("PATH", os.defpath),
        interface=requested.everywhere if requested else None,
        program=program,
    )
    return preflight.check_hosts(
        used,
        requirements,
        transport,
        known=earlier.info if earlier else {},
        proven=earlier.used if earlier else (),
    )


def _explain(
    options: LaunchOptions, starter: RankStarter, nodes: Sequence[Node], network: JobNetwork
) -> None:
    """Log the choices, if the options request it, and what will not work."""
    if options.verbose or options.dry_run:  # --report prints what the ranks find
        for line in ranks_by_host(nodes):
            log.info(line)
    if options.verbose and network.interface:
        interface = network.interface
        log.info(f"{interface.name} ({interface.address}) leads to the other hosts")
    if network.control_address is None and not options.dry_run:
        log.info(
            f"no address of this machine is known that {nodes[-1].name} can reach: "
            f"{starter.program.name}'s exit code decides the result, and a stop ends the job without a "
            "save. Name one: --interface NAME"
        )


def _settings(
    options: LaunchOptions,
    nodes: Sequence[Node],
    network: JobNetwork,
    requested: RequestedInterface | None,
    started_at: float,
) -> dict[str, str]:
    """The environment variables that the launcher sets for the ranks."""
    values = {
        PLACEMENT: ",".join(f"{node.name}:{node.ranks}" for node in nodes),
        NETWORKS: ",".join(network.networks) or None,
        INTERFACE: requested.everywhere if requested else None,
        TIMEOUT: options.how.timeout_s,
        BIND: "gpu" if options.how.bind == "gpu" else None,
        REPORT: 1 if options.report else None,
        VERBOSE: 1 if options.verbose else None,
        LOG_DIR: options.output.log_dir,
        "MASTER_ADDR": options.how.master_addr,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _defaults(
    how: How,
    starter: RankStarter,
    python: Path,
    nodes: Sequence[Node],
    network: JobNetwork,
    env: Mapping[str, str],
) -> dict[str, str]:
    """Variables that the launcher sets unless the user has set them."""
    defaults = {}
    starts_here = len(nodes) > 1 and is_this_host(nodes[0].name)
    if starter.kind == "slurm" and starts_here and network.interface:
        # srun does not pass on rank 0's address, and its host's name may resolve to another network.
        defaults["MASTER_ADDR"] = env.get("MASTER_ADDR") or network.interface.address
    # mpi4py finds the library by itself if it is installed beside python.
    if starter.libmpi is not None and starter.program.parent != python.parent:
        named = None if how.mpirun else env.get("MPI4PY_LIBMPI")
        defaults["MPI4PY_LIBMPI"] = named or str(starter.libmpi)
    return defaults


def _working_folder(env: Mapping[str, str]) -> str:
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
