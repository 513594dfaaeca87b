"""One function for each MPI: the flags that start a request exactly on its hosts and in its order.

Pure functions of data. What is said about an MPI here was measured with Open MPI 4.1.8 and 5.0.11,
MPICH 5.0.2 and Intel MPI 2021.18.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath

from mpiddp.launch.command import Command, Flag, Node, Request, flag
from mpiddp.launch.mpi import Flavour, Mpi

BINDINGS = {
    "none": "a rank's data loading needs more than the one core that MPI would give it",
    "numa": "--bind numa: a rank keeps to the cores and the memory of one NUMA node",
    "core": "--bind core: a rank keeps to one core",
}
WDIR = "the same working folder on every host"
EXPORT = "these variables reach the ranks on other hosts, by name: no value is shown to `ps`"


def compose(mpi: Mpi, request: Request) -> Command:
    """The command that starts `request` with `mpi`."""
    return _COMPOSERS[mpi.flavour](mpi, request)


def open_mpi(mpi: Mpi, request: Request) -> Command:
    flags = []
    if request.as_root:
        flags.append(flag("--allow-run-as-root", why="you are root, as is usual in a container"))
    hosts = ",".join(node.name for node in request.nodes for _ in range(node.ranks))
    flags += [
        flag("-n", str(request.world_size), why="one process per rank"),
        flag(
            *("-H", hosts, "--map-by", "seq"),
            why="each rank's host, one by one: Open MPI's other mappings have their own order",
        ),
        flag("--bind-to", request.bind, why=BINDINGS[request.bind]),
    ]
    parameters = [
        ("pml", "ob1", "skips 1 s of looking for fast networks: MPI only carries a few messages"),
        ("btl", "self,vader,tcp", "for them shared memory and TCP will do, which every host has"),
    ]
    files = _ssh_config(request)
    if len(request.nodes) > 1:
        parameters += [
            ("oob_tcp_keepalive_time", "5", _KEEPALIVE),
            ("oob_tcp_keepalive_intvl", "2", _KEEPALIVE),
            ("oob_tcp_keepalive_probes", "3", _KEEPALIVE),
        ]
        if request.networks:
            include = ",".join(request.networks)
            parameters += [
                ("btl_tcp_if_include", include, _NETWORK),
                ("oob_tcp_if_include", include, _NETWORK),
            ]
    if any("." in node.name and not _is_address(node.name) for node in request.nodes):
        runtime = "orte" if mpi.major < 5 else "prte"
        parameters.append((f"{runtime}_keep_fqdn_hostnames", "1", _WHOLE_NAMES))
    if files:
        parameters.append(("plm_rsh_args", _ssh_arguments(files), _SSH_CONFIG))
    if len(request.nodes) > _TREE_RADIX:
        parameters.append(("plm_rsh_no_tree_spawn", "1", _LOGINS_FROM_HERE))
    for name, value, why in parameters:
        if not {f"OMPI_MCA_{name}", f"PRTE_MCA_{name}"} & request.env.keys():
            flags.append(flag("--mca", name, value, why=why))
    flags.append(flag("--wdir", request.folder, why=WDIR))
    flags += [flag("-x", name, why=EXPORT) for name in request.exports]
    return Command(str(mpi.program), tuple(flags), request.job, request.settings, files)


_NETWORK = "the network that the hosts share, for not every one of a host's leads to the others"
_KEEPALIVE = "a host that is cut off is noticed within seconds, not minutes"


# From so many hosts on Open MPI has some log in to others.
_TREE_RADIX = 64
_LOGINS_FROM_HERE = "all logins come from this host: the others need not know one another"
_WHOLE_NAMES = "names stay whole: cut at the first dot, as is usual, ssh may not know them"


def _is_address(name: str) -> bool:
    return re.fullmatch(r"[0-9.]+", name) is not None


def mpich(mpi: Mpi, request: Request) -> Command:
    hosts = ",".join(f"{node.name}:{node.ranks}" for node in request.nodes)
    files = _ssh_config(request)
    settings = dict(request.settings)
    exports = list(request.exports)
    if files:
        settings["HYDRA_LAUNCHER_EXTRA_ARGS"] = _ssh_arguments(files)
    if len(request.nodes) > 1 and "UCX_TLS" not in request.env:
        # For a few messages TCP will do, and UCX takes several containers of one machine for one
        # host, between which it then waits for ever.
        settings.setdefault("UCX_TLS", "tcp,self")
        exports.append("UCX_TLS")
    flags = [
        flag("-hosts", hosts, why="each host's number of ranks, in order"),
        flag("-bind-to", request.bind, why=BINDINGS[request.bind]),
        *_hydra(request, exports),
        flag("-n", str(request.world_size), why="one process per rank"),
    ]
    return Command(str(mpi.program), tuple(flags), request.job, settings, files)


def intel_mpi(mpi: Mpi, request: Request) -> Command:
    files = _ssh_config(request)
    settings = dict(request.settings)
    if files:
        settings["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = _ssh_arguments(files)
    # A file, because its -hosts takes no counts and deals the ranks out as it likes.
    machines = str(PurePath(request.scratch, "mpiddp-machines"))
    files[machines] = "".join(f"{node.name}:{node.ranks}\n" for node in request.nodes)
    flags = [
        flag("-machinefile", machines, why="each host's number of ranks, in order"),
        *_hydra(request, request.exports),
        flag("-genv", *_INTEL_PINNING[request.bind], why=BINDINGS[request.bind]),
        flag("-n", str(request.world_size), why="one process per rank"),
    ]
    return Command(str(mpi.program), tuple(flags), request.job, settings, files)


_INTEL_PINNING = {
    "none": ("I_MPI_PIN", "0"),
    "numa": ("I_MPI_PIN_DOMAIN", "numa"),
    "core": ("I_MPI_PIN_DOMAIN", "core"),
}


def _hydra(request: Request, exports: Sequence[str]) -> list[Flag]:
    """What MPICH's and Intel's process managers have in common."""
    flags = [
        flag("-genvlist", ",".join(exports), why=f"only {EXPORT}"),
        flag("-wdir", request.folder, why=WDIR),
    ]
    if len(request.nodes) > 1 and request.interface:
        flags.append(flag("-iface", request.interface, why=_NETWORK))
    return flags


def srun(mpi: Mpi, request: Request) -> Command:
    hosts = ",".join(node.name for node in request.nodes for _ in range(node.ranks))
    binding = {"none": "none", "numa": "ldoms", "core": "cores"}[request.bind]
    flags = [
        flag(f"--ntasks={request.world_size}", why="one process per rank"),
        flag(
            *("--distribution=arbitrary", f"--nodelist={hosts}"),
            why="each rank's host, one by one",
        ),
        flag("--mpi=none", why="the ranks meet by Slurm's own variables, MPI is not needed"),
        flag(f"--cpu-bind={binding}", why=BINDINGS[request.bind]),
        flag("--kill-on-bad-exit=1", why="a rank that fails ends the job"),
        flag("--quit-on-interrupt", why="one Ctrl-C is enough"),
        flag(f"--chdir={request.folder}", why=WDIR),
        flag(f"--export={','.join(_with_login(request))}", why=f"only {EXPORT}"),
    ]
    if cpus := request.env.get("SLURM_CPUS_PER_TASK"):
        flags.append(flag(f"--cpus-per-task={cpus}", why="srun forgets what sbatch was asked for"))
    return Command(str(mpi.program), tuple(flags), request.job, request.settings)


def _with_login(request: Request) -> Iterable[str]:
    """srun leaves out even what every login has."""
    login = {"HOME", "USER", "LOGNAME", "SHELL", "LANG"} & request.env.keys()
    return sorted(login.union(request.exports))


_SSH_CONFIG = "the users and ports that the hostfile names, before your own ssh settings"


def _ssh_config(request: Request) -> dict[str, str]:
    """The file that tells ssh of users and ports, which no MPI's command line has room for."""
    special = [node for node in request.nodes if node.user or node.port]
    if not special:
        return {}
    lines = [line for node in special for line in _ssh_host(node)]
    lines += ["Host *", "  Include ~/.ssh/config", "  Include /etc/ssh/ssh_config"]
    return {str(PurePath(request.scratch, "mpiddp-ssh_config")): "\n".join(lines) + "\n"}


def _ssh_arguments(files: Mapping[str, str]) -> str:
    return f"-F {next(iter(files))}"


def _ssh_host(node: Node) -> Iterable[str]:
    yield f"Host {node.name}"
    if node.user:
        yield f"  User {node.user}"
    if node.port:
        yield f"  Port {node.port}"


_COMPOSERS: dict[Flavour, Callable[[Mpi, Request], Command]] = {
    "openmpi": open_mpi,
    "mpich": mpich,
    "intelmpi": intel_mpi,
    "slurm": srun,
}
