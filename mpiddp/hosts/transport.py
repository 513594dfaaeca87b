"""The programs that run a command on another host: ssh, and the programs of schedulers, which need no ssh.

Each is called as ssh is: its options, the host, and one command line for a shell there. A job uses one of
them for its preflight, for its start, and to kill what is left of it.
"""

from __future__ import annotations

import shutil
from typing import NamedTuple


class Transport(NamedTuple):
    """A program like ssh."""

    name: str
    agent: tuple[str, ...]  # its command up to the host
    hydra: str  # Hydra's launcher for it; "rsh" if Hydra calls it as it would call rsh
    instead: str = ""  # the options of `mpiddp launch` that use ssh instead, "" for ssh itself
    hint: str = ""  # for users who cannot use it, "" if there is nothing to say
    login_s: float = 15.0  # that a login may take, see --login-timeout
    silence_s: float = 15.0  # of a host, until ssh ends a connection to it

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


SSH = Transport("ssh", ("ssh",), "ssh")
# PBS has no program of its own that returns output (docs/clusters.md, "PBS without ssh").
SSH_IN_PBS = SSH._replace(
    hint="If this site allows no ssh between the hosts of a PBS job, let an MPI that knows PBS start the "
    "ranks: mpirun python -m mpiddp run …"
)
# qrsh(1): -inherit starts a task of the running job. The parallel environment needs control_slaves.
QRSH = Transport("qrsh -inherit", ("qrsh", "-inherit"), "sge", "--hostfile $PE_HOSTFILE")
# "blaunch" in IBM's LSF command reference: a drop-in replacement of rsh and ssh within a job.
BLAUNCH = Transport("blaunch", ("blaunch",), "rsh", "--hostfile $LSB_DJOB_HOSTFILE")
