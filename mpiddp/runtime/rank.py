"""What a rank knows when an attempt begins: its world, its program, and its launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpiddp.errors import JobFailed, named_by
from mpiddp.protocol import variables
from mpiddp.protocol.channel import SCRIPT, TEXT_LIMIT, next_key
from mpiddp.protocol.orders import Orders
from mpiddp.protocol.terminal import prefix_of
from mpiddp.runtime.gpu import limit_threads
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.program import Program
from mpiddp.text import remember_hosts
from mpiddp.world import RANK_SOURCES, World, set_by_launchers

_GPUS_S = 5.0  # a look at the GPUs before the next attempt takes at most this long


def python_by_hand() -> list[str]:
    """The command of this Python with its flags, as multiprocessing starts it."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags]


class Rank(NamedTuple):
    """A rank in one attempt."""

    world: World
    command: Program  # the program as the user has given it
    orders: Orders  # of the launcher, or the defaults
    private_file: str  # its name on this host, where it is removed once all ranks have met
    daemon: int | None  # this process's parent. Without it, nothing would end this rank.
    variables: Mapping[str, str]  # the variables of every attempt

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
                        f"{world.hostname}: mpirun's login has another /tmp than the login before it.",
                        fix="give all logins there the same /tmp: see pam_namespace and PrivateTmp",
                    ) from None
            # What the mpirun has set for this rank stays. It has passed on its own settings itself.
            mpi = set_by_launchers(env)
            env |= {n: taken[n] for n in taken if n not in env or not n.startswith(mpi)}
        orders = Orders.unpacked(env.pop(variables.ORDERS, ""))
        remember_hosts(orders.hosts)
        if not orders.address:
            env.pop(variables.JOB, None)
        if orders.umask is not None:
            os.umask(orders.umask)
        has_daemon = world.launcher.mpis or world.launcher.name == "slurm"
        rank = cls(
            world,
            program,
            orders,
            private_file=private_file,
            daemon=os.getppid() if has_daemon else None,
            variables=dict(env),
        )
        return rank.resized(orders.terminal.columns, orders.terminal.rows)

    @property
    def launcher(self) -> Server | None:
        orders = self.orders
        return (
            Server(orders.address, orders.key, is_launcher=True, lost_s=orders.lost_s)
            if orders.address
            else None
        )

    @property
    def python(self) -> list[str]:
        """The command of this Python. By hand, it has the user's flags, such as -O or -W error."""
        return [sys.executable] if self.launcher else python_by_hand()

    @property
    def program(self) -> Program:
        return self.command._replace(args=(*self.command.args, *self.orders.args))

    @property
    def kept(self) -> Sequence[str]:
        """The names of variables that its program gets, although an MPI may set them."""
        of_mpi = variables_of_open_mpi(self.world) if self.orders.mpi_variables else ()
        return (*self.orders.exported, *of_mpi)

    def next(self, orders: Orders) -> Rank:
        """The rank in the next attempt, by the orders for it, which have no key."""
        rank = self._replace(orders=orders._replace(key=next_key(self.orders.key)), private_file="")
        return rank.resized(orders.terminal.columns, orders.terminal.rows)

    def resized(self, columns: int, rows: int) -> Rank:
        """The rank whose launcher has a terminal of this size, and may write a prefix before each line."""
        terminal = self.orders.terminal._replace(columns=columns, rows=rows)
        if terminal.has_prefix:
            terminal = terminal.behind(prefix_of(self.world.rank, self.world.hostname))
        return self._replace(orders=self.orders._replace(terminal=terminal))


def variables_of_open_mpi(world: World) -> dict[str, str]:
    """The four variables of Open MPI with which a script reads its rank. No library joins an MPI by them alone."""
    (names,) = (row.variables for row in RANK_SOURCES if row.name == "openmpi")
    values = world.rank, world.world_size, world.local_rank, world.local_world_size
    return {name: str(value) for name, value in zip(names, values, strict=True)}


def variables_of_script(ranks: Coordinator, error_file: Path) -> dict[str, str]:
    """The variables of a script whose rank has met the others, beside those that come from the rendezvous."""
    world = ranks.world
    env = {variables.LAUNCHER: world.launcher.name}
    if ranks.connection is not None:
        key = ranks.server.member_key(world.rank, SCRIPT)
        env |= {variables.CHANNEL: ranks.server.address, variables.CHANNEL_SECRET: key}
        env |= {variables.LOST_AFTER: str(ranks.server.lost_s)} if ranks.server.lost_s else {}
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
