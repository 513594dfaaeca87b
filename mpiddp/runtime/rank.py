"""What a rank knows when an attempt begins: its world, its program, and its launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mpiddp.errors import JobFailed, named_by
from mpiddp.hosts.processes import descendants
from mpiddp.protocol import variables
from mpiddp.protocol.channel import SCRIPT, TEXT_LIMIT, next_key
from mpiddp.protocol.terminal import Terminal, prefix_of
from mpiddp.runtime.gpu import limit_threads
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.program import Program
from mpiddp.world import World, set_by_launchers

_GPUS_S = 5.0  # a look at the GPUs before the next attempt takes at most this long


def python_by_hand() -> list[str]:
    """The command of this Python with its flags, as multiprocessing starts it."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags]


class Rank(NamedTuple):
    """A rank in one attempt."""

    world: World
    command: Program  # the program as the user has given it
    launcher: Server | None
    # The streams of the script that the launcher shows in this terminal. Without a launcher it is "", because
    # the script has the streams of the MPI.
    selection: str
    terminal: Terminal
    holds: bool  # it waits for the launcher after a failure, which may begin the next attempt
    failed_grace_s: float  # after a failure elsewhere, the script has this time after SIGTERM
    lost_s: float  # after so many seconds of silence, the launcher's host is lost
    private_file: str  # its name on this host, where it is removed once all ranks have met
    daemon: int | None  # this process's parent. Without it, nothing would end this rank.
    others: frozenset[int]  # children of the shell that this process may have replaced by exec
    exported: frozenset[str]  # the names of the variables that the user has given with -x
    variables: Mapping[str, str]  # the variables of every attempt
    # In this attempt alone: more variables, and the last arguments of the program.
    attempt_variables: Mapping[str, str] = MappingProxyType({})
    args: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, program: Program) -> Rank:
        """The rank of this process. The variables that only its agent needs leave os.environ."""
        world, env = World.from_env(), os.environ
        if private_file := env.pop(variables.PRIVATE, ""):
            from mpiddp.hosts import private  # takes 2 ms, and ranks of one host need none

            with named_by(""):
                try:
                    taken = private.take(private_file)
                except FileNotFoundError:
                    raise JobFailed(
                        f"{world.hostname}: mpirun's login has another /tmp than the login before it. All "
                        "logins need the same /tmp: see pam_namespace and PrivateTmp there."
                    ) from None
            # What the mpirun has set for this rank stays. It has passed on its own settings itself.
            mpi = set_by_launchers(env)
            env |= {n: taken[n] for n in taken if n not in env or not n.startswith(mpi)}
        address, key = env.pop(variables.ADDRESS, ""), env.pop(variables.SECRET, "")
        launcher = Server(address, key) if address and key else None
        if launcher is None:
            env.pop(variables.JOB, None)
        if umask := env.pop(variables.UMASK, ""):
            os.umask(int(umask, 8))
        selection, holds = env.pop(variables.OUTPUT, ""), env.pop(variables.HOLDS, "")
        terminal = Terminal(*json.loads(env.pop(variables.TERMINAL, "[]")))
        has_daemon = world.launcher.mpis or world.launcher.name == "slurm"
        rank = cls(
            world,
            program,
            launcher,
            selection if launcher else "",
            terminal,
            holds=bool(holds and launcher),
            failed_grace_s=float(env.pop(variables.FAILED_GRACE, variables.FAILED_GRACE_S)),
            lost_s=float(env.get(variables.LOST_AFTER, variables.LOST_AFTER_S)),
            private_file=private_file,
            daemon=os.getppid() if has_daemon else None,
            others=frozenset(descendants(os.getpid())),
            exported=frozenset(env.pop(variables.EXPORTED, "").split(",")),
            variables=dict(env),
        )
        return rank.resized(terminal.columns, terminal.rows)

    @property
    def python(self) -> list[str]:
        """The command of this Python. By hand, it has the user's flags, such as -O or -W error."""
        return [sys.executable] if self.launcher else python_by_hand()

    @property
    def program(self) -> Program:
        return self.command._replace(args=(*self.command.args, *self.args))

    def next(self, facts: Mapping[str, Any]) -> Rank:
        """The rank in the next attempt, by what the launcher says of it."""
        assert self.launcher is not None
        return self._replace(
            launcher=self.launcher._replace(key=next_key(self.launcher.key)),
            holds=facts["holds"],
            private_file="",
            attempt_variables=facts["variables"],
            args=tuple(facts["args"]),
        )

    def resized(self, columns: int, rows: int) -> Rank:
        """The rank whose launcher has a terminal of this size, and may write a prefix before each line."""
        terminal = self.terminal._replace(columns=columns, rows=rows)
        if terminal.has_prefix:
            terminal = terminal.behind(prefix_of(self.world.rank, self.world.hostname))
        return self._replace(terminal=terminal)


def variables_of_script(ranks: Coordinator, error_file: Path) -> dict[str, str]:
    """The variables of a script whose rank has met the others, beside those that come from the rendezvous."""
    world = ranks.world
    env = {variables.LAUNCHER: world.launcher.name}
    if ranks.connection is not None:
        key = ranks.server.member_key(world.rank, SCRIPT)
        env |= {variables.CHANNEL: ranks.server.address, variables.CHANNEL_SECRET: key}
    if world.launcher.name != "torchrun":
        env[variables.ERROR_FILE] = str(error_file)
    if threads := limit_threads(world):  # the local ranks have just been counted
        env["OMP_NUM_THREADS"] = str(threads)
    return env


def wrong_with_host(world: World) -> str:
    """What is wrong with the GPUs of this host. One rank of each host looks."""
    if world.local_rank:
        return ""
    from mpiddp.hosts.gpu_faults import wrong_here

    return "\n".join(wrong_here(os.environ, timeout_s=_GPUS_S))[:TEXT_LIMIT]
