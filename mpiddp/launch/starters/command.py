"""What a starter is given and what it makes of it: Request, Command and Flag, each flag with its reason.

`mpiddp.launch.starters.table` has a row for each kind of starter. `mpiddp launch --dry-run` prints the reason
of every flag.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import NamedTuple

from mpiddp.errors import UserError
from mpiddp.hosts.allocations import leading_schedulers
from mpiddp.hosts.hostfile import Hosts
from mpiddp.hosts.interfaces import Interface
from mpiddp.text import all_of, shown

LEFT_OUT = "…"  # stands for a value in what is printed
_LONGEST_ARGUMENT = 100_000  # characters; Linux allows 128 KiB
_NOTHING: Mapping[str, str] = MappingProxyType({})

# The reasons that several starters give for their flags.
WHY = {
    "bind none": "no binding: MPI would give each rank one core, and data loading needs more",
    "bind numa": "--bind numa: each rank uses the cores and the memory of one NUMA node",
    "bind core": "--bind core: each rank uses one core",
    "ranks": "one process per rank",
    "folder": "the same working folder on every host",
    "variables": "passes only these variables to the ranks, by name, so that `ps` shows no value",
    "network": "the network that connects the hosts; not every network of a host does",
}


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


class Flag(NamedTuple):
    """Arguments of the command line that belong together, and their reason."""

    arguments: tuple[str, ...]
    reason: str


@dataclass
class Command:
    """A command line, the variables to set in its environment, and the files to write for it, in `folder`.

    variables: the names of those that the ranks get.
    """

    program: str
    flags: list[Flag]
    job: tuple[str, ...]
    variables: set[str] = field(default_factory=set)
    folder: str = "."
    settings: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # their texts by their paths

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
        return [self.program, *(each for flag in self.flags for each in flag.arguments), *self.job]

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
        for reason, flags in groupby(self.flags, lambda flag: flag.reason):
            lines += [f"  {shlex.join(flag.arguments)}" for flag in flags]
            lines.append(f"      {reason}")
        return "\n".join(lines)


class StarterKind(NamedTuple):
    """A kind of program that starts ranks, with all that is particular to it.

    - version: the pattern of its --version output.
    - compose: its flags for a request. It adds variables and files to the command.
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
    """

    name: str
    version: re.Pattern[str]
    compose: Callable[[Request, Command], list[Flag]]
    library: str = ""
    daemon: str = ""
    has_scheduler: bool = False
    stop_signal: signal.Signals = signal.SIGTERM
    proves_signals: bool = False
    cuts_own_name: bool = False


class RankStarter(NamedTuple):
    """One installed starter. `program` is absolute. `libmpi` is None if mpi4py finds the library itself."""

    kind: StarterKind
    name: str  # and its version
    program: Path
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
        job = (*request.job, *arguments)
        command = Command(str(self.program), [], job, {*every}, scratch)
        command.flags = self.kind.compose(request, command)
        if request.mpi_args:
            command.flags.append(Flag(request.mpi_args, "--mpi-args, as you wrote them"))
        command.settings = {**own, **command.settings, **own}
        return command


def parse_mpi_args(texts: Sequence[str]) -> tuple[str, ...]:
    """The arguments of each --mpi-args, split as a shell splits them, in one row."""
    arguments: list[str] = []
    for text in texts:
        try:
            found = shlex.split(text)
        except ValueError as error:
            raise UserError(f"--mpi-args={shown(text)}: {str(error).lower()}.") from None
        if found and not found[0].startswith("-"):
            raise UserError(
                f'--mpi-args={shown(text)}: "{shown(found[0])}" is not an option, and mpirun would '
                "start it as a program. Example: --mpi-args='--mca pml ucx'"
            )
        arguments += found
    return tuple(arguments)
