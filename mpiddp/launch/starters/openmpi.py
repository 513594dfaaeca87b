"""The command line of Open MPI's mpirun. Measured with 4.1.8 and 5.0.11."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpiddp.launch.starters.command import Command, Flag, Request, flag
from mpiddp.launch.starters.detect import RankStarter
from mpiddp.launch.starters.mpi_args import parameters_in
from mpiddp.launch.starters.shared import (
    BINDINGS,
    DETECTION,
    EXPORT,
    NETWORK,
    SHIELD,
    SSH_CONFIG,
    WDIR,
    host_file,
    ssh_arguments,
    ssh_config,
)
from mpiddp.text import all_of

_SHIELD = "{agent} ignores SIGTERM: batch systems send it to every process, and mpirun ends with its {agent}"
_KEEPALIVE = "detects a lost host within seconds instead of minutes"
# With more hosts than this, Open MPI makes some hosts log in to others.
_TREE_RADIX = 64
_LOGINS_FROM_HERE = (
    "this host makes all ssh logins; the other hosts need no ssh keys for each other"
)
_FULL_NAMES = (
    "keeps full host names; Open MPI cuts them at the first dot by default, and ssh may not know "
    "the short ones"
)


# The folder that holds the session folder of mpirun itself; the other hosts' daemons have their own.
SESSION_FOLDER = "PRTE_MCA_prte_local_tmpdir_base"


def needs_own_session(starter: RankStarter, request: Request) -> bool:
    """Whether this mpirun should get a folder of its own by SESSION_FOLDER.

    Those of Open MPI 5 that share one disturb each other: of 6,300 mpiruns, twelve at a time, 10 ended with
    "The PMIx server's listener thread failed to start", and of 6,300 with a folder each, none.
    """
    chosen = (*request.env, *parameters_in(request.mpi_args))
    is_open_mpi_5 = starter.kind == "openmpi" and starter.major >= 5
    return is_open_mpi_5 and not any("tmpdir_base" in name for name in chosen)


def open_mpi(starter: RankStarter, request: Request) -> Command:
    flags = []
    if request.as_root:
        flags.append(
            flag("--allow-run-as-root", why="mpirun refuses to run as root without this flag")
        )
    names = [node.name for node in request.nodes for _ in range(node.ranks)]
    hosts = ",".join(names)
    listed = host_file(request, hosts, names)
    flags += [
        flag("-n", str(request.world_size), why="one process per rank"),
        flag(
            *(("--hostfile", *listed) if listed else ("-H", hosts)),
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
    if len(request.nodes) > 1:
        parameters += [
            ("oob_tcp_keepalive_time", "5", _KEEPALIVE),
            ("oob_tcp_keepalive_intvl", "2", _KEEPALIVE),
            ("oob_tcp_keepalive_probes", "3", _KEEPALIVE),
        ]
        if request.networks:
            include = ",".join(request.networks)
            parameters += [
                ("btl_tcp_if_include", include, NETWORK),
                ("oob_tcp_if_include", include, NETWORK),
            ]
    if any("." in node.name and not _is_address(node.name) for node in request.nodes):
        runtime = "orte" if starter.major < 5 else "prte"
        parameters.append((f"{runtime}_keep_fqdn_hostnames", "1", _FULL_NAMES))
    if "PRTE_MCA_plm_ssh_agent" not in request.env:
        parameters += _agent(request)
    if request.schedulers:
        flags += _pins(starter, request)
    if files:
        parameters.append(("plm_rsh_args", ssh_arguments(files), SSH_CONFIG))
    if len(request.nodes) > _TREE_RADIX:
        parameters.append(("plm_rsh_no_tree_spawn", "1", _LOGINS_FROM_HERE))
    theirs = parameters_in(request.mpi_args)
    for name, value, why in parameters:
        is_set = {f"OMPI_MCA_{name}", f"PRTE_MCA_{name}"} & request.env.keys()
        if not is_set and name not in theirs:
            flags.append(flag("--mca", name, value, why=why))
    flags.append(flag("--wdir", request.folder, why=WDIR))
    flags += [flag("-x", name, why=EXPORT) for name in request.exports]
    return Command(
        str(starter.program), tuple(flags), request.job, request.settings, {**files, **listed}
    )


def _agent(request: Request) -> Iterator[tuple[str, str, str]]:
    """The parameter that names the program for the other hosts, unless it is Open MPI's own choice."""
    agent, reasons = " ".join(request.transport.agent), []
    if request.transport.is_ssh:
        agent = "ssh -x"
    elif len(request.nodes) > 1:
        reasons.append(f"{request.transport.name} reaches the hosts of the job, without ssh")
    if request.shields_ssh:
        agent = f"{SHIELD} {agent}"
        reasons.append(_SHIELD.format(agent=request.transport.agent[0]))
    if reasons:
        yield "plm_rsh_agent", agent, "; ".join(reasons)


# Names that this Open MPI was built without do no harm.
_RAS = {True: "^slurm,tm,lsf,gridengine,alps", False: "^slurm,pbs,lsf,gridengine,flux,pals"}


def _pins(starter: RankStarter, request: Request) -> Iterator[Flag]:
    """The flags that keep Open MPI from following a scheduler's variables."""
    is_old = starter.major < 5
    option, plm = ("--mca", "rsh") if is_old else ("--prtemca", "ssh")
    why = DETECTION.format(schedulers=all_of(request.schedulers))
    for name, value in (("ras", _RAS[is_old]), ("plm", plm), (f"plm_{plm}_disable_qrsh", "1")):
        if not {f"OMPI_MCA_{name}", f"PRTE_MCA_{name}"} & request.env.keys():
            yield flag(option, name, value, why=why)


def _is_address(name: str) -> bool:
    return re.fullmatch(r"[0-9.]+", name) is not None
