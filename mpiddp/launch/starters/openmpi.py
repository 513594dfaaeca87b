"""The command line of Open MPI's mpirun. Measured with 4.1.8 and 5.0.11."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise

from mpiddp.hosts.allocations import SCHEDULERS
from mpiddp.launch.starters.command import WHY, Flag, Parts, Request, host_file

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
_Parameter = tuple[str, str, object, str]  # its name, its value, whether this job needs it, and why


def open_mpi_4(request: Request, variables: Collection[str], scratch: str) -> Parts:
    followers = [row.followed_by[0] for row in SCHEDULERS if row.followed_by and row.followed_by[0]]
    pins = _pins(request, "rsh", [*followers, "alps"])
    return _open_mpi(request, variables, scratch, "orte", "--mca", pins, "orte_tmpdir_base")


def open_mpi_5(request: Request, variables: Collection[str], scratch: str) -> Parts:
    followers = [row.followed_by[1] for row in SCHEDULERS if row.followed_by]
    pins = _pins(request, "ssh", [*followers, "pals"])
    # Not prte_tmpdir_base, which would contradict the folder of this mpirun's own session.
    tmpdir = "prte_remote_tmpdir_base"
    flags, _, files = _open_mpi(request, variables, scratch, "prte", "--prtemca", pins, tmpdir)
    if scratch == "." or _chooses_tmpdir(request):
        return flags, {}, files
    # The next launch removes it after a kill. And those that share a folder disturb each other: of 6,300
    # mpiruns, twelve at a time, 10 ended with "The PMIx server's listener thread failed to start", and of
    # 6,300 with a folder each, none.
    return flags, {"PRTE_MCA_prte_local_tmpdir_base": scratch}, files


def _open_mpi(
    request: Request,
    variables: Collection[str],
    scratch: str,
    runtime: str,
    option: str,
    pins: Sequence[_Parameter],
    tmpdir: str,
) -> Parts:
    names = request.names_of_ranks
    listed, (ssh, files) = host_file(scratch, names), request.ssh_config(scratch)
    where = ("--hostfile", *listed) if listed else ("-H", ",".join(names))
    hosts, is_ssh = request.hosts.hosts, request.hosts.transport.is_ssh
    several = len(hosts) > 1
    include = ",".join(request.network.networks) if several else ""
    dotted = [each for each in hosts if "." in each.name and each.name.strip("0123456789.")]
    parameters: list[_Parameter] = [
        ("pml", "ob1", True, _NO_SEARCH),
        ("btl", "self,vader,tcp", True, _BTL),
        ("oob_tcp_keepalive_time", "5", several, _KEEPALIVE),
        ("oob_tcp_keepalive_intvl", "2", several, _KEEPALIVE),
        ("oob_tcp_keepalive_probes", "3", several, _KEEPALIVE),
        ("btl_tcp_if_include", include, include, WHY["network"]),
        ("oob_tcp_if_include", include, include, WHY["network"]),
        (f"{runtime}_keep_fqdn_hostnames", "1", dotted, _FULL_NAMES),
        (tmpdir, "/tmp", not is_ssh and not _chooses_tmpdir(request), _SESSIONS),
        ("plm_rsh_agent", *_agent(request)),
        ("plm_rsh_args", ssh, ssh, _SSH_CONFIG),
        ("plm_rsh_no_tree_spawn", "1", len(hosts) > _TREE_RADIX, _LOGINS_FROM_HERE),
    ]

    def flags_of(option: str, rows: Sequence[_Parameter], but: Collection[str] = ()) -> list[Flag]:
        """The parameters that this job needs, unless the user's environment or `but` sets them."""
        return [
            Flag((option, name, value), why)
            for name, value, is_needed, why in rows
            if is_needed
            and name not in but
            and not {f"OMPI_MCA_{name}", f"PRTE_MCA_{name}"} & request.env.keys()
        ]

    flags = [
        *([Flag(("--allow-run-as-root",), _AS_ROOT)] if os.geteuid() == 0 else []),
        Flag(("-n", str(request.world_size)), WHY["ranks"]),
        Flag((*where, "--map-by", "seq"), _IN_ORDER),
        Flag(("--bind-to", request.bind), WHY[f"bind {request.bind}"]),
        *flags_of(option, pins),
        *flags_of("--mca", parameters, _in_arguments(request)),
        Flag(("--wdir", request.folder), WHY["folder"]),
        *(Flag(("-x", name), _EXPORT) for name in sorted(variables)),
    ]
    return flags, {}, {**files, **listed}


def _in_arguments(request: Request) -> set[str]:
    """The names of the parameters that the user's own arguments for mpirun set."""
    return {
        name
        for flag, name in pairwise(request.mpi_args)
        if flag.startswith("-") and flag.lstrip("-") in _PARAMETER_OPTIONS
    }


def _chooses_tmpdir(request: Request) -> bool:
    """Whether the user has chosen a folder for session files."""
    return any("tmpdir_base" in name for name in (*request.env, *_in_arguments(request)))


def _pins(request: Request, plm: str, followers: Sequence[str]) -> list[_Parameter]:
    """What keeps Open MPI's components, `followers`, from following a scheduler's variables.

    Names that this Open MPI was built without do no harm.
    """
    why, ras = request.why_pinned, f"^{','.join(followers)}"
    pins = {"ras": ras, "plm": plm, f"plm_{plm}_disable_qrsh": "1"}
    return [(name, value, why, why) for name, value in pins.items()]


def _agent(request: Request) -> tuple[str, bool, str]:
    """The program for the other hosts, whether it is another one than Open MPI's own choice, and why."""
    transport, has_others = request.hosts.transport, len(request.hosts.hosts) > 1
    agent = "ssh -x" if transport.is_ssh else " ".join(transport.agent)
    reasons = []
    if has_others and not transport.is_ssh:
        reasons.append(f"{transport.name} reaches the hosts of the job, without ssh")
    if has_others and can_shield():
        program, agent = transport.agent[0], f"{_SHIELD} {agent}"
        reasons.append(
            f"{program} ignores SIGTERM: batch systems send it to every process, and mpirun ends with "
            f"its {program}"
        )
    is_chosen = "PRTE_MCA_plm_ssh_agent" in request.env
    return agent, bool(reasons) and not is_chosen, "; ".join(reasons)


@cache
def can_shield() -> bool:
    """Whether this machine's env(1) can start a program that ignores SIGTERM."""
    try:
        return subprocess.run([*_SHIELD.split(), "true"], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False
