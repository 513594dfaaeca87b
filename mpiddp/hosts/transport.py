"""The programs that run a command on another host: ssh, and the programs of schedulers, which need no ssh.

Each is called as ssh is: its options, the host, and one command line for a shell there. A job uses one of
them for its preflight, to kill what is left of it, and for its start, unless the scheduler starts the ranks.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpiddp.text import with_fix


class Transport(NamedTuple):
    """A program like ssh."""

    name: str
    agent: tuple[str, ...]  # its command up to the host
    hydra: str  # Hydra's launcher for it; "rsh" if Hydra calls it as it would call rsh
    fix: str = ""  # for a host that it does not reach, "" for ssh itself, which says more
    hint: str = ""  # if it does not reach a host, "" if there is nothing more to say
    login_s: float = 15.0  # that a login may take, see --login-timeout
    silence_s: float = 15.0  # of a host, until ssh ends a connection to it
    shell: tuple[str, ...] = ()  # before the command line, if the program starts no shell itself
    keeps_open: bool = False  # whether a login may run one program after the other
    at_once: tuple[str, ...] = ()  # its options to pass on each byte at once, and not whole lines
    environment: Callable[[Mapping[str, str]], dict[str, str]] = dict  # of the program, by ours
    # LD_LIBRARY_PATH for a job's own Python, which may not start without it; "" for the host's own.
    libraries: str = ""

    def complaint(self, host: str, reason: str) -> str:
        """The sentence about a host that it does not reach."""
        failed = f"{self.name} {host} failed: {reason.rstrip('.')}."
        return with_fix(failed, self.fix.format(host=host))

    @property
    def connect_s(self) -> int:
        """The time of a login until the host speaks ssh: one that is off says nothing."""
        return max(1, round(self.login_s / 3))

    @property
    def is_ssh(self) -> bool:
        return self.agent == SSH.agent

    @property
    def why(self) -> str:
        """Why an mpirun is told of it, "" for ssh, which it takes by itself."""
        return "" if self.is_ssh else f"{self.name} reaches the hosts of the job, without ssh"

    @property
    def is_installed(self) -> bool:
        return shutil.which(self.agent[0]) is not None


SSH = Transport("ssh", ("ssh",), "ssh", keeps_open=True)
# PBS has no program of its own that returns output (docs/clusters.md, "PBS without ssh").
SSH_IN_PBS = SSH._replace(
    hint="If this site allows no ssh between the hosts of a PBS job, let an MPI that knows PBS start the "
    "ranks: mpirun python -m mpiddp run …"
)
# qrsh(1): -inherit starts a task of the running job. The parallel environment needs control_slaves.
QRSH = Transport(
    "qrsh -inherit", ("qrsh", "-inherit"), "sge", "--hostfile $PE_HOSTFILE, where ssh is allowed"
)
# "blaunch" in IBM's LSF command reference: a drop-in replacement of rsh and ssh within a job.
BLAUNCH = Transport(
    "blaunch", ("blaunch",), "rsh", "--hostfile $LSB_DJOB_HOSTFILE, where ssh is allowed"
)
_SRUN_NEEDS = re.compile("(?!SLURM_|SRUN_)|SLURM_(CONF|JOB_?ID$|(WORKING_)?CLUSTER|JWT)")


def _for_srun(env: Mapping[str, str]) -> dict[str, str]:
    """`env` for a step on one node, with all of its GPUs. srun takes variables of the job for options.

    Without its own number of GPUs, a step would want those of all nodes, or of one task. If the job has asked
    for a sum, which Slurm may divide unevenly, the step has none.
    """
    gpus = env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_GPUS_PER_NODE") or "0"
    needed = {name: value for name, value in env.items() if _SRUN_NEEDS.match(name)}
    total = env.get("SLURM_GPUS", "").rpartition(":")[2]
    if (
        total
        and "SLURM_GPUS_PER_NODE" not in env
        and int(gpus) * int(env["SLURM_JOB_NUM_NODES"]) != int(total)
    ):
        return {**needed, "SLURM_STEP_GRES": "none"}
    return needed if gpus == "0" else {**needed, "SLURM_GPUS_PER_NODE": gpus}


# srun(1): with --overlap (Slurm 20.11), a step shares the cores, the memory and the GPUs of the job with its
# other steps. Slurm encrypts nothing, so only the variables of a login are exported.
SRUN = Transport(
    "srun",
    (
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--mpi=none", "--quiet"),
        *("--chdir=/", "--export=HOME,USER,LOGNAME,SHELL,LANG,PATH,LD_LIBRARY_PATH", "--nodelist"),
    ),
    "rsh",
    "scontrol show node {host}",
    "If Slurm loses a node, it ends the whole job, unless the job has: #SBATCH --no-kill",
    shell=("sh", "-c"),
    keeps_open=True,
    at_once=("--unbuffered",),
    environment=_for_srun,
)
