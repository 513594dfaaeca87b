"""The command line of Open MPI's mpirun. Measured with 4.1.8 and 5.0.11."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from mpiddp.hosts.allocations import SCHEDULERS, leading_schedulers
from mpiddp.launch.starters.command import (
    BINDINGS,
    DETECTION,
    NETWORK,
    SSH_CONFIG,
    WDIR,
    Command,
    Flag,
    RankStarter,
    Request,
    flag,
    host_file,
    ssh_arguments,
    ssh_config,
)
from mpiddp.text import all_of

_SHIELD = "env --ignore-signal=TERM"  # GNU coreutils 8.31
_IGNORES = "{agent} ignores SIGTERM: batch systems send it to every process, and mpirun ends with its {agent}"
_EXPORT = "passes these variables to the ranks on other hosts, by name, so that `ps` shows no value"
_KEEPALIVE = "detects a lost host within seconds instead of minutes"
# With more hosts than this, Open MPI makes some hosts log in to others.
_TREE_RADIX = 64
_LOGINS_FROM_HERE = (
    "this host makes all ssh logins; the other hosts need no ssh keys for each other"
)
_SESSIONS = (
    "session files outside the TMPDIR of the job, which the scheduler removes on a host as soon as one of "
    "the job's tasks ends there"
)
_FULL_NAMES = (
    "keeps full host names; Open MPI cuts them at the first dot by default, and ssh may not know "
    "the short ones"
)


_PARAMETER_OPTIONS = ("mca", "gmca", "omca", "prtemca", "pmixmca")
# Components beside those that follow a scheduler of our table. Names that this Open MPI was built without do
# no harm.
_ALPS, _PALS = "alps", "pals"


def _chooses_tmpdir(request: Request) -> bool:
    """Whether the user has chosen a folder for session files."""
    chosen = (*request.env, *_parameters_in(request.mpi_args))
    return any("tmpdir_base" in name for name in chosen)


def open_mpi_4(starter: RankStarter, request: Request) -> Command:
    followers = [row.followed_by[0] for row in SCHEDULERS if row.followed_by and row.followed_by[0]]
    pins = _pins(request, "--mca", "rsh", [*followers, _ALPS])
    return _open_mpi(starter, request, "orte", pins, "orte_tmpdir_base")


def open_mpi_5(starter: RankStarter, request: Request) -> Command:
    followers = [row.followed_by[1] for row in SCHEDULERS if row.followed_by]
    pins = _pins(request, "--prtemca", "ssh", [*followers, _PALS])
    # Not prte_tmpdir_base, which would contradict the folder of this mpirun's own session.
    command = _open_mpi(starter, request, "prte", pins, "prte_remote_tmpdir_base")
    if request.scratch == "." or _chooses_tmpdir(request):
        return command
    # Those that share a folder disturb each other: of 6,300 mpiruns, twelve at a time, 10 ended with "The
    # PMIx server's listener thread failed to start", and of 6,300 with a folder each, none.
    own = {"PRTE_MCA_prte_local_tmpdir_base": request.scratch}
    return command._replace(settings={**command.settings, **own})


def _open_mpi(
    starter: RankStarter, request: Request, runtime: str, pins: Iterator[Flag], tmpdir: str
) -> Command:
    flags = []
    if os.geteuid() == 0:
        flags.append(
            flag("--allow-run-as-root", why="mpirun refuses to run as root without this flag")
        )
    names = request.names_of_ranks
    listed = host_file(request, names)
    flags += [
        flag("-n", str(request.world_size), why="one process per rank"),
        flag(
            *(("--hostfile", *listed) if listed else ("-H", ",".join(names))),
            *("--map-by", "seq"),
            why="the host of each rank in order; Open MPI's other mappings reorder hosts",
        ),
        flag("--bind-to", request.bind, why=BINDINGS[request.bind]),
    ]
    parameters = [
        (
            *("pml", "ob1"),
            "skips a 1 s search for fast networks; MPI carries only a few messages",
        ),
        (
            *("btl", "self,vader,tcp"),
            "shared memory and TCP are enough for these messages, and every host has them",
        ),
    ]
    files = ssh_config(request)
    all_hosts = request.hosts.hosts
    if len(all_hosts) > 1:
        parameters += [
            ("oob_tcp_keepalive_time", "5", _KEEPALIVE),
            ("oob_tcp_keepalive_intvl", "2", _KEEPALIVE),
            ("oob_tcp_keepalive_probes", "3", _KEEPALIVE),
        ]
        if request.network.networks:
            include = ",".join(request.network.networks)
            parameters += [
                ("btl_tcp_if_include", include, NETWORK),
                ("oob_tcp_if_include", include, NETWORK),
            ]
    if any("." in host.name and not _is_address(host.name) for host in all_hosts):
        parameters.append((f"{runtime}_keep_fqdn_hostnames", "1", _FULL_NAMES))
    if not request.hosts.transport.is_ssh and not _chooses_tmpdir(request):
        parameters.append((tmpdir, "/tmp", _SESSIONS))
    if "PRTE_MCA_plm_ssh_agent" not in request.env:
        parameters += _agent(request)
    flags += pins
    if files:
        parameters.append(("plm_rsh_args", ssh_arguments(files), SSH_CONFIG))
    if len(all_hosts) > _TREE_RADIX:
        parameters.append(("plm_rsh_no_tree_spawn", "1", _LOGINS_FROM_HERE))
    theirs = _parameters_in(request.mpi_args)
    for name, value, why in parameters:
        is_set = {f"OMPI_MCA_{name}", f"PRTE_MCA_{name}"} & request.env.keys()
        if not is_set and name not in theirs:
            flags.append(flag("--mca", name, value, why=why))
    flags.append(flag("--wdir", request.folder, why=WDIR))
    flags += [flag("-x", name, why=_EXPORT) for name in sorted(request.variables)]
    return Command(
        str(starter.program), tuple(flags), request.job, request.settings, {**files, **listed}
    )


def _agent(request: Request) -> Iterator[tuple[str, str, str]]:
    """The parameter that names the program for the other hosts, unless it is Open MPI's own choice."""
    transport, has_others = request.hosts.transport, len(request.hosts.hosts) > 1
    agent, reasons = " ".join(transport.agent), []
    if transport.is_ssh:
        agent = "ssh -x"
    elif has_others:
        reasons.append(f"{transport.name} reaches the hosts of the job, without ssh")
    if has_others and can_shield():
        agent = f"{_SHIELD} {agent}"
        reasons.append(_IGNORES.format(agent=transport.agent[0]))
    if reasons:
        yield "plm_rsh_agent", agent, "; ".join(reasons)


@cache
def can_shield() -> bool:
    """Whether this machine's env(1) can start a program that ignores SIGTERM."""
    try:
        return subprocess.run([*_SHIELD.split(), "true"], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def _pins(request: Request, option: str, plm: str, followers: Sequence[str]) -> Iterator[Flag]:
    """The flags that keep Open MPI's components from following a scheduler's variables."""
    schedulers = leading_schedulers(request.env)
    if not schedulers:
        return
    why = DETECTION.format(schedulers=all_of(schedulers))
    ras = f"^{','.join(followers)}"
    for name, value in (("ras", ras), ("plm", plm), (f"plm_{plm}_disable_qrsh", "1")):
        if not {f"OMPI_MCA_{name}", f"PRTE_MCA_{name}"} & request.env.keys():
            yield flag(option, name, value, why=why)


def _parameters_in(arguments: Sequence[str]) -> frozenset[str]:
    """The names of the parameters that `arguments` set."""
    return frozenset(
        name
        for option, name in pairwise(arguments)
        if option.startswith("-") and option.lstrip("-") in _PARAMETER_OPTIONS
    )


def _is_address(name: str) -> bool:
    return re.fullmatch(r"[0-9.]+", name) is not None
