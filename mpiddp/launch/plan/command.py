"""The command that starts a job: a Starter takes a Request, and makes a Command, each flag with its reason.

`launch.plan.starters` has a row for each kind of starter. `mpiddp launch --dry-run` prints every reason.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import NamedTuple

from mpiddp.hosts.allocations import SCHEDULERS
from mpiddp.hosts.hostfile import Hosts
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.ssh import ANY_SHELL_SSH, ssh_config
from mpiddp.launch.plan.environment import LEFT_OUT, Environment, to_start
from mpiddp.text import all_of

_LONGEST_ARGUMENT = 100_000  # characters; Linux allows 128 KiB


class Request(NamedTuple):
    """The job to start and its hosts, independent of the MPI."""

    # In the order of their ranks, each with its number of ranks, by mpirun's name for it.
    hosts: Hosts
    job: tuple[str, ...]  # the command of a rank
    folder: str
    environment: Environment = Environment()
    bind: str = "none"
    mpi_args: tuple[str, ...] = ()  # the user's own arguments for mpirun
    is_restart: bool = False
    # The network, by `find_network`: this machine's interface, None if no single one leads to all hosts.
    interface: Interface | None = None
    # The networks that MPI must use on all hosts: "10.0.0.0/24", or the name of an interface that all hosts
    # have. Empty if they are not known.
    networks: tuple[str, ...] = ()
    # This machine's address that all ranks can reach; "" if a dry run finds none.
    control_address: str = "127.0.0.1"
    addresses: Mapping[str, str] = MappingProxyType(
        {}
    )  # of hosts in `networks`, by their names, where known

    @property
    def other_family(self) -> int:
        """The version of IP that the job does not use."""
        return 4 if ":" in self.control_address else 6

    @property
    def names_of_ranks(self) -> list[str]:
        """The name of each rank's host."""
        return [host.name for host in self.hosts.hosts for _ in range(host.ranks)]

    @property
    def why_pinned(self) -> str:
        """The reason for flags that keep mpirun from following a scheduler's variables; "" without any."""
        names = [
            row.name
            for row in SCHEDULERS
            if row.followed_by and row.is_present(self.environment.shell)
        ]
        why = "the hosts, and the way to them, are those of this command; mpirun would follow"
        return f"{why} {all_of(names)}" if names else ""


@dataclass
class Command:
    """A command line, the variables to set in its environment, and the files to write for it, in `folder`."""

    program: str
    flags: list[tuple[str, ...]]  # each with its reason first, and then its arguments
    job: tuple[str, ...]
    variables: set[str] = field(default_factory=set)  # the names of the ranks' variables
    folder: str = "."
    settings: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # their texts by their paths

    def add(self, reason: str, *arguments: str) -> None:
        """Add one flag with its arguments. An empty reason means that this job does not need it."""
        if reason:
            self.flags.append((reason, *arguments))

    def file(self, name: str, lines: Sequence[str]) -> str:
        """The path of a new file of these lines."""
        path = str(PurePath(self.folder, name))
        self.files[path] = "".join(f"{line}\n" for line in lines)
        return path

    def host_file(self, lines: Sequence[str]) -> str:
        """The path of a file of these lines if they are too long for one argument, with commas; else ""."""
        is_short = len(",".join(lines)) <= _LONGEST_ARGUMENT
        return "" if is_short else self.file("mpiddp-hosts", lines)

    def ssh_agent(self, hosts: Hosts, *first: str) -> str:
        """The command in the place of ssh, with the job's configuration; "" if the job needs no ssh.

        It runs the lines `first` before ssh.
        """
        if all(host.listed for host in hosts.hosts) or not hosts.transport.is_ssh:
            return ""
        config = ssh_config(hosts.hosts, hosts.transport).splitlines()
        # mpirun splits the agent at blanks, which the path of this package may have.
        agent = self.file("mpiddp-ssh", [*first, f". {shlex.quote(str(ANY_SHELL_SSH))}"])
        return f"sh {agent} -F {self.file('mpiddp-ssh_config', config)}"

    @property
    def argv(self) -> list[str]:
        return [self.program, *(word for _, *flag in self.flags for word in flag), *self.job]

    def explained(self, hidden: Collection[str] = ()) -> str:
        """The command ready to paste, without the values of `hidden`, and then each flag with its reason."""
        lines = []
        for path, text in self.files.items():
            lines += [f"cat > {shlex.quote(path)} <<'END'", f"{text}END"]
        assignments = [
            f"{name}={LEFT_OUT if name in hidden else shlex.quote(value)}"
            for name, value in self.settings.items()
        ]
        lines += [" ".join([*assignments, shlex.join(self.argv)]), ""]
        # Several flags in a row often share a reason: print it once, below the last of them.
        for reason, flags in groupby(self.flags, itemgetter(0)):
            lines += [*(f"  {shlex.join(flag)}" for _, *flag in flags), f"      {reason}"]
        return "\n".join(lines)


class Starter(NamedTuple):
    """A program that starts ranks, with all that is particular to its kind."""

    name: str  # of the kind, and the version of an installed one
    version: re.Pattern[str]  # in its --version output
    add_flags: Callable[[Request, Command], None]  # adds variables and files too
    library: str = ""  # the file name of its libmpi, "" if the ranks need none
    daemon: str = ""  # the program that it starts on the other hosts, in the folder of mpirun
    # srun may wait until other steps of the job end, and Slurm chooses the GPUs of its tasks.
    may_wait: bool = False
    chooses_gpus: bool = False
    # The signal that ends it. Open MPI's mpirun takes SIGHUP like SIGTERM, so it can ignore the SIGTERM that
    # a batch system sends to every process of a job. Hydra survives that until the ranks have saved. Intel
    # MPI's mpirun is a shell script, which cannot ignore it. srun passes SIGTERM on to its tasks.
    stop_signal: signal.Signals = signal.SIGTERM
    # Its exit code 128 + N proves that signal N has killed a rank. Elsewhere that may be the starter's own
    # code, or that of a rank that it has ended.
    proves_signals: bool = False
    cuts_own_name: bool = False  # it always cuts this machine's name at the first dot
    program: Path = Path()  # of an installed one, an absolute path
    libmpi: Path | None = None  # the same; None: mpi4py finds the library itself

    def compose(self, request: Request, scratch: str = ".") -> Command:
        """The command that starts `request` on exactly its hosts, in its order, with files in `scratch`."""
        shell, chosen, ours = request.environment
        passed = {
            **to_start(shell),
            **chosen,
            **ours,
        }  # mpirun's own environment has the others of the shell
        changed = {name: value for name, value in passed.items() if shell.get(name) != value}
        command = Command(str(self.program), [], request.job, {*passed}, scratch, {**changed})
        self.add_flags(request, command)
        command.settings |= changed  # they precede the settings of a starter
        command.add("--mpi-args, as you wrote them" * bool(request.mpi_args), *request.mpi_args)
        return command
