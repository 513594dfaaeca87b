"""The command lines of Hydra: MPICH's mpirun (measured with 5.0.2) and Intel MPI's (2021.18)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from mpiddp.hosts.allocations import leading_schedulers
from mpiddp.launch.starters.command import (
    BINDINGS,
    DETECTION,
    EXPORT_ONLY,
    NETWORK,
    WDIR,
    Command,
    Flag,
    RankStarter,
    Request,
    host_file,
    ssh_arguments,
    ssh_config,
)
from mpiddp.text import all_of


def mpich(starter: RankStarter, request: Request) -> Command:
    counts = _counts(request)
    listed = host_file(request, counts)
    files = ssh_config(request)
    settings = request.settings
    exports = set(request.variables)
    if files:
        settings["HYDRA_LAUNCHER_EXTRA_ARGS"] = ssh_arguments(files)
    if len(request.hosts.hosts) > 1 and "UCX_TLS" not in request.env:
        # TCP is enough for a few messages. UCX takes several containers of one machine for one host,
        # and then hangs between them.
        settings.setdefault("UCX_TLS", "tcp,self")
        exports.add("UCX_TLS")
    flags = [
        Flag(
            (*(("-f", *listed) if listed else ("-hosts", ",".join(counts))),),
            "the number of ranks on each host, in order",
        ),
        Flag(("-bind-to", request.bind), BINDINGS[request.bind]),
        *_launcher(request, "-launcher", "-rmk", "user"),
        *_hydra(request, exports),
        Flag(("-n", str(request.world_size)), "one process per rank"),
    ]
    return Command(str(starter.program), tuple(flags), request.job, settings, {**files, **listed})


def intel_mpi(starter: RankStarter, request: Request) -> Command:
    files = ssh_config(request)
    settings = request.settings
    if files:
        settings["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = ssh_arguments(files)
    # A file, because its -hosts accepts no counts and assigns the ranks in another order.
    machines = str(PurePath(request.scratch, "mpiddp-machines"))
    files[machines] = "".join(f"{line}\n" for line in _counts(request))
    if leading_schedulers(request.env):
        # Otherwise it takes the counts of Slurm, LSF or PBS in place of the file's.
        settings.setdefault("I_MPI_JOB_RESPECT_PROCESS_PLACEMENT", "off")
    flags = [
        Flag(("-machinefile", machines), "the number of ranks on each host, in order"),
        *_launcher(request, "-bootstrap"),
        *_hydra(request, request.variables),
        Flag(("-genv", *_INTEL_PINNING[request.bind]), BINDINGS[request.bind]),
        Flag(("-n", str(request.world_size)), "one process per rank"),
    ]
    return Command(str(starter.program), tuple(flags), request.job, settings, files)


_INTEL_PINNING = {
    "none": ("I_MPI_PIN", "0"),
    "numa": ("I_MPI_PIN_DOMAIN", "numa"),
    "core": ("I_MPI_PIN_DOMAIN", "core"),
}


def _launcher(request: Request, option: str, *more: str) -> list[Flag]:
    """The flags that keep Hydra from following a scheduler's variables."""
    schedulers = leading_schedulers(request.env)
    if not schedulers:
        return []
    why = DETECTION.format(schedulers=all_of(schedulers))
    hydra, (program, *_) = request.hosts.transport.hydra, request.hosts.transport.agent
    executable = (f"{option}-exec", program) if hydra == "rsh" else ()
    return [Flag((option, hydra, *executable, *more), why)]


def _counts(request: Request) -> list[str]:
    return [f"{host.name}:{host.ranks}" for host in request.hosts.hosts]


def _hydra(request: Request, exports: Iterable[str]) -> list[Flag]:
    """The flags that MPICH's and Intel's process managers share."""
    flags = [
        Flag(("-genvlist", ",".join(sorted(exports))), EXPORT_ONLY),
        Flag(("-wdir", request.folder), WDIR),
    ]
    if len(request.hosts.hosts) > 1 and request.network.interface:
        flags.append(Flag(("-iface", request.network.interface.name), NETWORK))
    return flags
