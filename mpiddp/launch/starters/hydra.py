"""The command lines of Hydra: MPICH's mpirun (measured with 5.0.2) and Intel MPI's (2021.18)."""

from __future__ import annotations

from mpiddp.launch.starters.command import WHY, Command, Flag, Request

_RANKS = "the number of ranks on each host, in order"
_INTEL_PINNING = {
    "none": ("I_MPI_PIN", "0"),
    "numa": ("I_MPI_PIN_DOMAIN", "numa"),
    "core": ("I_MPI_PIN_DOMAIN", "core"),
}


def mpich(request: Request, command: Command) -> list[Flag]:
    counts = _counts(request)
    if ssh := command.ssh_arguments(request.hosts):
        command.settings["HYDRA_LAUNCHER_EXTRA_ARGS"] = ssh
    if len(counts) > 1 and "UCX_TLS" not in request.env:
        # TCP is enough for a few messages. UCX takes several containers of one machine for one host,
        # and then hangs between them.
        command.settings["UCX_TLS"] = "tcp,self"
        command.variables.add("UCX_TLS")
    listed = command.host_file(counts)
    return [
        Flag(("-f", listed) if listed else ("-hosts", ",".join(counts)), _RANKS),
        Flag(("-bind-to", request.bind), WHY[f"bind {request.bind}"]),
        *_hydra(request, command, "-launcher", "-rmk", "user"),
        Flag(("-n", str(request.world_size)), WHY["ranks"]),
    ]


def intel_mpi(request: Request, command: Command) -> list[Flag]:
    if ssh := command.ssh_arguments(request.hosts):
        command.settings["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = ssh
    if request.why_pinned:
        # Otherwise it takes the counts of Slurm, LSF or PBS in place of the file's.
        command.settings["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] = "off"
    # A file, because its -hosts accepts no counts and assigns the ranks in another order.
    machines = command.file("mpiddp-machines", _counts(request))
    return [
        Flag(("-machinefile", machines), _RANKS),
        *_hydra(request, command, "-bootstrap"),
        Flag(("-genv", *_INTEL_PINNING[request.bind]), WHY[f"bind {request.bind}"]),
        Flag(("-n", str(request.world_size)), WHY["ranks"]),
    ]


def _counts(request: Request) -> list[str]:
    return [f"{host.name}:{host.ranks}" for host in request.hosts.hosts]


def _hydra(request: Request, command: Command, launcher: str, *more: str) -> list[Flag]:
    """The flags that MPICH's and Intel's process managers share.

    The first, `launcher` and `more`, keep them from following a scheduler's variables.
    """
    why, hydra = request.why_pinned, request.hosts.transport.hydra
    program = (f"{launcher}-exec", request.hosts.transport.agent[0]) if hydra == "rsh" else ()
    flags = [
        *([Flag((launcher, hydra, *program, *more), why)] if why else []),
        Flag(("-genvlist", ",".join(sorted(command.variables))), WHY["variables"]),
        Flag(("-wdir", request.folder), WHY["folder"]),
    ]
    if len(request.hosts.hosts) > 1 and request.network.interface:
        flags.append(Flag(("-iface", request.network.interface.name), WHY["network"]))
    return flags
