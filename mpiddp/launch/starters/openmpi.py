"""The command line of Open MPI's mpirun. Measured with 4.1.8 and 5.0.11."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from itertools import pairwise

from mpiddp.hosts.allocations import SCHEDULERS
from mpiddp.launch.starters.command import WHY, Command, Flag, Request

_SHIELD = "env --ignore-signal=TERM"  # GNU coreutils 8.31
_IN_ORDER = "the host of each rank in order; Open MPI's other mappings reorder hosts"
_AS_ROOT = "mpirun refuses to run as root without this flag"
_NO_SEARCH = "skips a 1 s search for fast networks; MPI carries only a few messages"
_BTL = "shared memory and TCP are enough for these messages, and every host has them"
_EXPORT = "passes these variables to the ranks on other hosts, by name, so that `ps` shows no value"
_KEEPALIVE = "detects a lost host within seconds instead of minutes"
_SSH_CONFIG = "the users and ports of the hostfile; they take precedence over your ssh settings"
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
# For each generation: its runtime, the option of the runtime's parameters, the component that starts daemons,
# one that would follow another scheduler, and the folder of session files. That of 5 is not
# prte_tmpdir_base, which would contradict the folder of this mpirun's own session.
_NAMES = {
    4: ("orte", "--mca", "rsh", "alps", "orte_tmpdir_base"),
    5: ("prte", "--prtemca", "ssh", "pals", "prte_remote_tmpdir_base"),
}


def open_mpi(generation: int, request: Request, command: Command) -> list[Flag]:
    runtime, option, plm, other, tmpdir = _NAMES[generation]
    followers = [row.followed_by[generation - 4] for row in SCHEDULERS if row.followed_by]
    followers = [each for each in (*followers, other) if each]
    names = request.names_of_ranks
    listed, ssh = command.host_file(names), command.ssh_arguments(request.hosts)
    hosts, is_ssh = request.hosts.hosts, request.hosts.transport.is_ssh
    several = len(hosts) > 1
    include = ",".join(request.network.networks) if several else ""
    dotted = [each for each in hosts if "." in each.name and each.name.strip("0123456789.")]
    given, why_pinned = _given(request), request.why_pinned
    chooses_tmpdir = any("tmpdir_base" in name for name in given)
    if generation == 5 and command.folder != "." and not chooses_tmpdir:
        # The next launch removes it after a kill. And those that share a folder disturb each other: of 6,300
        # mpiruns, twelve at a time, 10 ended with "The PMIx server's listener thread failed to start", and of
        # 6,300 with a folder each, none.
        command.settings["PRTE_MCA_prte_local_tmpdir_base"] = command.folder
    agent, why_agent = _agent(request)
    needs_agent = why_agent and "plm_ssh_agent" not in given
    # For each: its option, its name, its value, whether this job needs it, and why. The first three keep its
    # components from following a scheduler's variables. Names that this one was built without do no harm.
    parameters: list[tuple[str, str, str, object, str]] = [
        (option, "ras", f"^{','.join(followers)}", why_pinned, why_pinned),
        (option, "plm", plm, why_pinned, why_pinned),
        (option, f"plm_{plm}_disable_qrsh", "1", why_pinned, why_pinned),
        ("--mca", "pml", "ob1", True, _NO_SEARCH),
        ("--mca", "btl", "self,vader,tcp", True, _BTL),
        ("--mca", "oob_tcp_keepalive_time", "5", several, _KEEPALIVE),
        ("--mca", "oob_tcp_keepalive_intvl", "2", several, _KEEPALIVE),
        ("--mca", "oob_tcp_keepalive_probes", "3", several, _KEEPALIVE),
        ("--mca", "btl_tcp_if_include", include, include, WHY["network"]),
        ("--mca", "oob_tcp_if_include", include, include, WHY["network"]),
        ("--mca", f"{runtime}_keep_fqdn_hostnames", "1", dotted, _FULL_NAMES),
        ("--mca", tmpdir, "/tmp", not (is_ssh or chooses_tmpdir), _SESSIONS),
        ("--mca", "plm_rsh_agent", agent, needs_agent, why_agent),
        ("--mca", "plm_rsh_args", ssh, ssh, _SSH_CONFIG),
        ("--mca", "plm_rsh_no_tree_spawn", "1", len(hosts) > _TREE_RADIX, _LOGINS_FROM_HERE),
    ]
    where = ("--hostfile", listed) if listed else ("-H", ",".join(names))
    return [
        *([Flag(("--allow-run-as-root",), _AS_ROOT)] if os.geteuid() == 0 else []),
        Flag(("-n", str(request.world_size)), WHY["ranks"]),
        Flag((*where, "--map-by", "seq"), _IN_ORDER),
        Flag(("--bind-to", request.bind), WHY[f"bind {request.bind}"]),
        *(
            Flag((flag, name, value), why)
            for flag, name, value, is_needed, why in parameters
            if is_needed and name not in given
        ),
        Flag(("--wdir", request.folder), WHY["folder"]),
        *(Flag(("-x", name), _EXPORT) for name in sorted(command.variables)),
    ]


def _given(request: Request) -> set[str]:
    """The names of the parameters that the user's environment or own arguments for mpirun set."""
    in_arguments = {
        name
        for flag, name in pairwise(request.mpi_args)
        if flag.startswith("-") and flag.lstrip("-") in _PARAMETER_OPTIONS
    }
    return in_arguments | {name.partition("_MCA_")[2] for name in request.env}


def _agent(request: Request) -> tuple[str, str]:
    """The program for the other hosts and the reason, "" where it is Open MPI's own choice."""
    if len(request.hosts.hosts) == 1:
        return "", ""
    transport, program = request.hosts.transport, request.hosts.transport.agent[0]
    agent, reasons = "ssh -x", list[str]()
    if not transport.is_ssh:
        agent = " ".join(transport.agent)
        reasons.append(f"{transport.name} reaches the hosts of the job, without ssh")
    if can_shield():
        agent = f"{_SHIELD} {agent}"
        reasons.append(
            f"{program} ignores SIGTERM: batch systems send it to every process, and mpirun ends with "
            f"its {program}"
        )
    return agent, "; ".join(reasons)


@cache
def can_shield() -> bool:
    """Whether this machine's env(1) can start a program that ignores SIGTERM."""
    try:
        return subprocess.run([*_SHIELD.split(), "true"], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False
