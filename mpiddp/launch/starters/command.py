"""The command that starts every rank: its request, its flags, and the text of --dry-run.

`mpiddp.launch.starters.compose` composes it for the installed MPI. `mpiddp launch --dry-run` prints the
reason of every flag.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpiddp.hosts.nodes import Node
from mpiddp.hosts.transport import SSH, Transport
from mpiddp.launch.starters.environment import LEFT_OUT, is_secret


@dataclass(frozen=True)
class Request:
    """The job to start and its hosts, independent of the MPI.

    `nodes` are in the order of the ranks. `settings` are the variables that the launcher sets itself, in
    mpirun's environment, and the values of `hidden` ones are not printed; `exports` are the names of all
    variables that the ranks get. `env` is the user's environment. `mpi_args` are the user's own arguments
    for mpirun. `networks` ("10.0.0.0/24", or the name of an interface that all hosts have), if not empty,
    are the only ones that MPI may use, and `interface` is this machine's interface. `control_address` is
    the launcher's address for the ranks, None if it is not known. `transport` reaches the other hosts; with
    `shields_ssh`, mpirun's processes of it ignore SIGTERM. `schedulers` are those whose variables mpirun
    must not follow. `scratch` is the folder for mpirun's files. With `is_command`, the script of a rank may
    run in a container.
    """

    nodes: tuple[Node, ...]
    job: tuple[str, ...]
    folder: str
    exports: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    bind: str = "none"
    mpi_args: tuple[str, ...] = ()
    interface: str | None = None
    networks: tuple[str, ...] = ()
    as_root: bool = False
    control_address: str | None = None
    transport: Transport = SSH
    shields_ssh: bool = False
    schedulers: tuple[str, ...] = ()
    scratch: str = "."
    is_command: bool = False

    @property
    def world_size(self) -> int:
        return sum(node.ranks for node in self.nodes)


@dataclass(frozen=True)
class Flag:
    """Arguments of the command line that belong together, and their reason."""

    arguments: tuple[str, ...]
    reason: str


def flag(*arguments: str, why: str) -> Flag:
    return Flag(arguments, why)


@dataclass(frozen=True)
class Command:
    """A command line, the variables to set in its environment, and the files to write for it."""

    program: str
    flags: tuple[Flag, ...]
    job: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        return [self.program, *(each for flag in self.flags for each in flag.arguments), *self.job]

    def write_files(self) -> None:
        for path, text in self.files.items():
            Path(path).write_text(text)

    def explained(self, request: Request) -> str:
        """The command ready to paste, followed by every flag with its reason.

        It is without the values that `request` hides: one that the shell has comes from its variable.
        """
        lines = []
        for path, text in self.files.items():
            lines += [f"cat > {shlex.quote(path)} <<'END'", text.rstrip("\n"), "END"]
        assignments = [_assignment(name, self.settings[name], request) for name in self.settings]
        lines += [" ".join([*assignments, shlex.join(self.argv)]), ""]
        # Several flags in a row often share a reason: print it once, below the last of them.
        for position, flag in enumerate(self.flags):
            lines.append(f"  {shlex.join(flag.arguments)}")
            following = self.flags[position + 1 : position + 2]
            if not following or following[0].reason != flag.reason:
                lines.append(f"      {flag.reason}")
        return "\n".join(lines)


def _assignment(name: str, value: str, request: Request) -> str:
    """The assignment in shell syntax."""
    if name not in request.hidden and not is_secret(name):
        return f"{name}={shlex.quote(value)}"
    return f'{name}="${name}"' if request.env.get(name) == value else f"{name}={LEFT_OUT}"
