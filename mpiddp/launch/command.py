"""What a starter is given and what it makes of it: Request and Command, each flag with its reason.

`mpiddp.launch.starters` has a row for each kind of starter. `mpiddp launch --dry-run` prints the reason of
every flag.
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

from mpiddp.hosts.allocations import leading_schedulers
from mpiddp.hosts.hostfile import Hosts
from mpiddp.hosts.interfaces import Interface
from mpiddp.text import all_of

LEFT_OUT = "…"  # stands for a value in what is printed
_LONGEST_ARGUMENT = 100_000  # characters; Linux allows 128 KiB
_NOTHING: Mapping[str, str] = MappingProxyType({})


class JobNetwork(NamedTuple):
    """The network of a job.

    - interface: this machine's, None if no single one leads to all hosts.
    - networks: those that MPI must use on all hosts ("10.0.0.0/24", or the name of an interface that all
      have), empty if they are not known.
    - control_address: this machine's address for all ranks; "" only in a dry run that does not know it.
    """

    interface: Interface | None = None
    networks: tuple[str, ...] = ()
    control_address: str = "127.0.0.1"


class Request(NamedTuple):
    """The job to start and its hosts, independent of the MPI.

    hosts: in the order of the ranks, each with its number, under the names that mpirun gets.
    job: the command of a rank. With `is_command`, its script may run in a container.
    variables: all that the ranks get, by name. env: the user's environment, which mpirun inherits.
    mpi_args: the user's own arguments for mpirun.
    """

    hosts: Hosts
    job: tuple[str, ...]
    folder: str
    variables: Mapping[str, str] = _NOTHING
    env: Mapping[str, str] = _NOTHING
    network: JobNetwork = JobNetwork()
    bind: str = "none"
    mpi_args: tuple[str, ...] = ()
    is_command: bool = False

    @property
    def world_size(self) -> int:
        return self.hosts.world_size

    @property
    def names_of_ranks(self) -> list[str]:
        """The name of each rank's host."""
        return [host.name for host in self.hosts.hosts for _ in range(host.ranks)]

    @property
    def why_pinned(self) -> str:
        """The reason of flags that keep an mpirun from following a scheduler's variables; "" without any."""
        schedulers = all_of(leading_schedulers(self.env))
        why = "the hosts, and the way to them, are those of this command; mpirun would follow"
        return f"{why} {schedulers}" if schedulers else ""


@dataclass
class Command:
    """A command line, the variables to set in its environment, and the files to write for it, in `folder`.

    flags: for each its reason, and then its arguments. variables: the names of those that the ranks get.
    """

    program: str
    flags: list[tuple[str, ...]]
    job: tuple[str, ...]
    variables: set[str] = field(default_factory=set)
    folder: str = "."
    settings: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # their texts by their paths

    def add(self, reason: str, *arguments: str) -> None:
        """Add arguments that belong together, unless there is no reason for them."""
        if reason:
            self.flags.append((reason, *arguments))

    def file(self, name: str, lines: Sequence[str]) -> str:
        """The path of a new file of these lines."""
        path = str(PurePath(self.folder, name))
        self.files[path] = "".join(f"{line}\n" for line in lines)
        return path

    def host_file(self, lines: Sequence[str]) -> str:
        """A file of these lines, if they are too long for an argument, with commas between; else ""."""
        is_short = len(",".join(lines)) <= _LONGEST_ARGUMENT
        return "" if is_short else self.file("mpiddp-hosts", lines)

    def ssh_arguments(self, hosts: Hosts) -> str:
        """ssh's arguments for a file with the users and ports, if any. No MPI has options for them."""
        lines = []
        for host in hosts.hosts:
            keys = {"User": host.user, "Port": host.port}
            special = [f"  {key} {value}" for key, value in keys.items() if value]
            lines += [f"Host {host.name}", *special] if special else []
        if not lines:
            return ""
        lines += ["Host *", "  Include ~/.ssh/config", "  Include /etc/ssh/ssh_config"]
        return f"-F {self.file('mpiddp-ssh_config', lines)}"

    @property
    def argv(self) -> list[str]:
        return [self.program, *(each for _, *flag in self.flags for each in flag), *self.job]

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
    """A program that starts ranks, with all that is particular to its kind.

    - name: of the kind, and the version of an installed one.
    - version: the pattern of its --version output.
    - add_flags: adds flags for a request, variables and files to the command.
    - library: the file name of its libmpi, "" if the ranks need none.
    - daemon: the program that it starts on the other hosts, in the folder of mpirun.
    - has_scheduler: a scheduler stands behind it, which checks the hosts, chooses their GPUs, ends what is
      left of a job, and may let a start wait.
    - stop_signal: what ends it. Open MPI's takes SIGHUP like SIGTERM, and can do without SIGTERM. Hydra's
      survives a SIGTERM to all processes of a job until the ranks have saved. Intel MPI's, a shell script,
      cannot be shielded. srun passes SIGTERM on to its tasks.
    - proves_signals: its exit code 128 + N proves that signal N has killed a rank. Elsewhere that may be the
      starter's own code, or that of a rank that it has ended.
    - cuts_own_name: it always cuts this machine's name at the first dot.
    - program, libmpi: of an installed one, absolute paths. No libmpi: mpi4py finds the library itself.
    """

    name: str
    version: re.Pattern[str]
    add_flags: Callable[[Request, Command], None]
    library: str = ""
    daemon: str = ""
    has_scheduler: bool = False
    stop_signal: signal.Signals = signal.SIGTERM
    proves_signals: bool = False
    cuts_own_name: bool = False
    program: Path = Path()
    libmpi: Path | None = None

    def compose(
        self,
        request: Request,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] = _NOTHING,
        scratch: str = ".",
    ) -> Command:
        """The command that starts `request` on exactly its hosts and in its order.

        arguments: more of them for the job. variables: more of them for the ranks. scratch: the folder of the
        command's files.
        """
        every = {**request.variables, **variables}
        # The others are inherited from the user's environment.
        own = {name: value for name, value in every.items() if request.env.get(name) != value}
        command = Command(str(self.program), [], (*request.job, *arguments), {*every}, scratch)
        self.add_flags(request, command)
        if request.mpi_args:
            command.add("--mpi-args, as you wrote them", *request.mpi_args)
        command.settings = {**own, **command.settings, **own}
        return command
