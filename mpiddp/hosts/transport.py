"""The programs that run a command on another host: ssh, and the programs of schedulers, which need no ssh.

Each is called as ssh is: its options, the host, and one command line for a shell there. A job uses one of
them for its preflight, to kill what is left of it, and for its start, unless the scheduler starts the ranks.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import NamedTuple

from mpiddp.text import with_fix


class Transport(NamedTuple):
    """A program like ssh."""

    name: str
    agent: tuple[str, ...]  # its command up to the host
    hydra: str  # Hydra's launcher for it; "rsh" if Hydra calls it as it would call rsh
    fix: str = ""  # for a host that it does not reach, "" for ssh itself, which says more
    hint: str = ""  # for users who cannot use it, "" if there is nothing to say
    if_lost: str = ""  # what its scheduler does with a job that has lost a host
    login_s: float = 15.0  # that a login may take, see --login-timeout
    silence_s: float = 15.0  # of a host, until ssh ends a connection to it
    shell: tuple[str, ...] = ()  # before the command line, if the program starts no shell itself
    keeps_open: bool = False  # whether a login may run one program after the other
    at_once: tuple[str, ...] = ()  # its options to pass on each byte at once, and not whole lines
    not_passed: re.Pattern[str] | None = None  # variables that it would take for its own options

    def command(self, host: str, line: str) -> list[str]:
        """The command that runs a command line on a host."""
        return [*self.agent, host, *self.shell, line]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables of `env` for the program."""
        no = self.not_passed
        return {name: value for name, value in env.items() if not (no and no.match(name))}

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
    def is_installed(self) -> bool:
        return shutil.which(self.agent[0]) is not None


SSH = Transport("ssh", ("ssh",), "ssh", keeps_open=True)
# PBS has no program of its own that returns output (docs/clusters.md, "PBS without ssh").
SSH_IN_PBS = SSH._replace(
    hint="If this site allows no ssh between the hosts of a PBS job, let an MPI that knows PBS start the "
    "ranks: mpirun python -m mpiddp run …"
)
_INSTEAD = "{}, where ssh is allowed"
# qrsh(1): -inherit starts a task of the running job. The parallel environment needs control_slaves.
QRSH = Transport(
    "qrsh -inherit", ("qrsh", "-inherit"), "sge", _INSTEAD.format("--hostfile $PE_HOSTFILE")
)
# "blaunch" in IBM's LSF command reference: a drop-in replacement of rsh and ssh within a job.
BLAUNCH = Transport(
    "blaunch", ("blaunch",), "rsh", _INSTEAD.format("--hostfile $LSB_DJOB_HOSTFILE")
)
# srun(1): with --overlap (Slurm 20.11), a step shares the cores, the memory and the GPUs of the job with its
# other steps. Slurm encrypts nothing, so only the variables of a login are exported. srun takes variables of
# the job for options of a step, for example SLURM_GPUS, which has the GPUs of all nodes.
SRUN = Transport(
    "srun",
    (
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--mpi=none", "--quiet"),
        *("--chdir=/", "--export=HOME,USER,LOGNAME,SHELL,LANG,PATH", "--nodelist"),
    ),
    "rsh",
    "scontrol show node {host}",
    if_lost="If Slurm loses a node, it ends the whole job, unless the job has: #SBATCH --no-kill",
    shell=("sh", "-c"),
    keeps_open=True,
    at_once=("--unbuffered",),
    not_passed=re.compile("(SLURM_(?!CONF|JOB_?ID$|(WORKING_)?CLUSTER|JWT)|SRUN_)"),
)
