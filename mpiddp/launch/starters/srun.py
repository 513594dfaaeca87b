"""The command line of Slurm's srun."""

from __future__ import annotations

from mpiddp.launch.starters.command import WHY, Command, Flag, Request


def srun(request: Request, command: Command) -> list[Flag]:
    names = request.names_of_ranks
    if listed := command.host_file(names):
        command.settings["SLURM_HOSTFILE"] = listed
    where = () if listed else (f"--nodelist={','.join(names)}",)
    binding = {"none": "none", "numa": "ldoms", "core": "cores"}[request.bind]
    # srun passes on no variable that is not named, also none of a login.
    exported = {"HOME", "USER", "LOGNAME", "SHELL", "LANG"} & request.env.keys() | command.variables
    flags = [
        Flag((f"--ntasks={request.world_size}",), WHY["ranks"]),
        Flag(("--distribution=arbitrary", *where), "the host of each rank, in order"),
        Flag(("--mpi=none",), "the ranks join through Slurm's variables; MPI is not needed"),
        Flag((f"--cpu-bind={binding}",), WHY[f"bind {request.bind}"]),
        Flag(("--kill-on-bad-exit=1",), "one failed rank ends the job"),
        Flag(("--quit-on-interrupt",), "one Ctrl-C is enough"),
        Flag((f"--chdir={request.folder}",), WHY["folder"]),
        Flag((f"--export={','.join(sorted(exported))}",), WHY["variables"]),
    ]
    cpus = request.env.get("SLURM_CPUS_PER_TASK", "")
    most = max(host.ranks for host in request.hosts.hosts)
    if most > 1 and not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & request.env.keys():
        # As scripts for torchrun do: the job has the cores of one task on each host, and several GPUs.
        flags.append(Flag(("--overcommit",), "the ranks of a host share the cores of its one task"))
        cpus = str(int(cpus) // most or "") if cpus.isdecimal() else ""
    if cpus:
        why = "srun does not inherit this option from sbatch"
        flags.append(Flag((f"--cpus-per-task={cpus}",), why))
    return flags
