"""The command line of Slurm's srun."""

from __future__ import annotations

from collections.abc import Iterable

from mpiddp.launch.starters.command import (
    BINDINGS,
    EXPORT_ONLY,
    WDIR,
    Command,
    Flag,
    RankStarter,
    Request,
    host_file,
)


def srun(starter: RankStarter, request: Request) -> Command:
    names = request.names_of_ranks
    listed = host_file(request, names)
    settings = request.settings
    if listed:
        (settings["SLURM_HOSTFILE"],) = listed
    binding = {"none": "none", "numa": "ldoms", "core": "cores"}[request.bind]
    flags = [
        Flag((f"--ntasks={request.world_size}",), "one process per rank"),
        Flag(
            ("--distribution=arbitrary", *(() if listed else (f"--nodelist={','.join(names)}",))),
            "the host of each rank, in order",
        ),
        Flag(("--mpi=none",), "the ranks join through Slurm's variables; MPI is not needed"),
        Flag((f"--cpu-bind={binding}",), BINDINGS[request.bind]),
        Flag(("--kill-on-bad-exit=1",), "one failed rank ends the job"),
        Flag(("--quit-on-interrupt",), "one Ctrl-C is enough"),
        Flag((f"--chdir={request.folder}",), WDIR),
        Flag((f"--export={','.join(_with_login(request))}",), EXPORT_ONLY),
    ]
    cpus = request.env.get("SLURM_CPUS_PER_TASK", "")
    most = max(host.ranks for host in request.hosts.hosts)
    if most > 1 and not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & request.env.keys():
        # As scripts for torchrun do: the job has the cores of one task on each host, and several GPUs.
        flags.append(Flag(("--overcommit",), "the ranks of a host share the cores of its one task"))
        cpus = str(int(cpus) // most or "") if cpus.isdecimal() else ""
    if cpus:
        flags.append(
            Flag((f"--cpus-per-task={cpus}",), "srun does not inherit this option from sbatch")
        )
    return Command(str(starter.program), tuple(flags), request.job, settings, listed)


def _with_login(request: Request) -> Iterable[str]:
    """The exports and the variables of a login. srun passes on no variable that is not named."""
    login = {"HOME", "USER", "LOGNAME", "SHELL", "LANG"} & request.env.keys()
    return sorted(login.union(request.variables))
