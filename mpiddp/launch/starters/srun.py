"""The command line of Slurm's srun."""

from __future__ import annotations

from collections.abc import Iterable

from mpiddp.launch.starters.command import (
    BINDINGS,
    EXPORT_ONLY,
    WDIR,
    Command,
    RankStarter,
    Request,
    flag,
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
        flag(f"--ntasks={request.world_size}", why="one process per rank"),
        flag(
            "--distribution=arbitrary",
            *(() if listed else (f"--nodelist={','.join(names)}",)),
            why="the host of each rank, in order",
        ),
        flag("--mpi=none", why="the ranks join through Slurm's variables; MPI is not needed"),
        flag(f"--cpu-bind={binding}", why=BINDINGS[request.bind]),
        flag("--kill-on-bad-exit=1", why="one failed rank ends the job"),
        flag("--quit-on-interrupt", why="one Ctrl-C is enough"),
        flag(f"--chdir={request.folder}", why=WDIR),
        flag(f"--export={','.join(_with_login(request))}", why=EXPORT_ONLY),
    ]
    cpus = request.env.get("SLURM_CPUS_PER_TASK", "")
    most = max(host.ranks for host in request.hosts.hosts)
    if most > 1 and not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & request.env.keys():
        # As scripts for torchrun do: the job has the cores of one task on each host, and several GPUs.
        flags.append(
            flag("--overcommit", why="the ranks of a host share the cores of its one task")
        )
        cpus = str(int(cpus) // most or "") if cpus.isdecimal() else ""
    if cpus:
        flags.append(
            flag(f"--cpus-per-task={cpus}", why="srun does not inherit this option from sbatch")
        )
    return Command(str(starter.program), tuple(flags), request.job, settings, listed)


def _with_login(request: Request) -> Iterable[str]:
    """The exports and the variables of a login. srun passes on no variable that is not named."""
    login = {"HOME", "USER", "LOGNAME", "SHELL", "LANG"} & request.env.keys()
    return sorted(login.union(request.variables))
