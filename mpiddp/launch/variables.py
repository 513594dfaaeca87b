"""The variables of the ranks: the user's, the launcher's own, and the GPUs of each host."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.hosts.gpus import VISIBLE, for_numbers, hides_all_gpus, is_of_one_host, written
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.starters.command import JobNetwork, RankStarter
from mpiddp.launch.starters.environment import Exports, forwarded
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


def variables_of_ranks(
    options: LaunchOptions,
    starter: RankStarter,
    placed: Hosts,
    network: JobNetwork,
    env: Mapping[str, str],
) -> dict[str, str]:
    """All variables that the ranks get. Those of the launcher's options take precedence."""
    first, *others = placed.hosts
    has_scheduler = starter.kind.has_scheduler
    defaults = {}
    if has_scheduler and others and is_this_host(first.name) and network.interface:
        # srun does not pass on rank 0's address, and its host's name may resolve to another network.
        defaults["MASTER_ADDR"] = env.get("MASTER_ADDR") or network.interface.address
    # mpi4py finds the library by itself if it is installed beside python.
    own_folder = Path(sys.executable).absolute().parent
    if starter.libmpi is not None and starter.program.parent != own_folder:
        named = None if options.mpirun else env.get("MPI4PY_LIBMPI")
        defaults["MPI4PY_LIBMPI"] = named or str(starter.libmpi)
    networks = ",".join(network.networks) or None
    settings = {
        PLACEMENT: ",".join(f"{host.name}:{host.ranks}" for host in placed.hosts),
        NETWORKS: networks,
        INTERFACE: networks if options.interface else None,
        TIMEOUT: f"{options.timeout_s:.12g}" if options.timeout_s else None,
        BIND: "gpu" if options.bind == "gpu" else None,
        REPORT: "1" if options.verbose else None,
        VERBOSE: "1" if options.verbose else None,
        LOG_DIR: options.log_dir,
        "MASTER_ADDR": options.master_addr,
        # A scheduler chooses the GPUs of each host itself.
        GPUS: None if has_scheduler else gpu_table(placed.hosts, env, options.variables) or None,
    }
    inherited = forwarded(env, options.variables) | defaults
    given = with_values(inherited, options.variables)
    return given | {name: value for name, value in settings.items() if value is not None}


def with_values(env: Mapping[str, str], exports: Exports) -> dict[str, str]:
    """`env`, with the values that the user gives for the ranks."""
    return {**env, **{name: value for name, value in exports.items() if value is not None}}


def check_gpu_choice(hosts: Hosts, exports: Exports) -> None:
    """Raise UserError if both the hostfile and -x choose GPUs."""
    chosen = sorted(exports.keys() & set(VISIBLE))
    for host in hosts.hosts:
        if chosen and host.gpus is not None:
            raise UserError(
                f"{hosts.where(host)}: gpus= and -x {chosen[0]} both choose the GPUs of {host.name}. "
                "Leave one out."
            )


def env_on_host(name: str, env: Mapping[str, str], exports: Exports) -> dict[str, str]:
    """`env`, with the variables that choose GPUs as the ranks on the host `name` get them."""
    variables = with_values(env, exports)
    if is_this_host(name):
        return variables
    return {
        each: value
        for each, value in variables.items()
        if each in exports or not is_of_one_host(each, value)
    }


def gpu_table(hosts: Sequence[Host], env: Mapping[str, str], exports: Exports) -> str:
    """MPIDDP_GPUS: what the ranks of each host set before they load torch; "" for nothing.

    Numbers of the hostfile do not count in a job whose user hides all GPUs, and nobody has checked them.
    """
    own = {
        name: env[name]
        for name in VISIBLE
        if name in env and name not in exports and is_of_one_host(name, env[name])
    }
    choices: list[dict[str, str]] = []
    for host in hosts:
        if host.gpus is not None and not hides_all_gpus(env):
            choices.append(for_numbers(host.gpus, env))
        else:
            choices.append(own if is_this_host(host.name) else {})
    return written(choices)
