"""What a rank keeps over its attempts: its world, its launcher, and a spare Python for the next attempt."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from mpiddp.errors import named_by
from mpiddp.hosts import private
from mpiddp.hosts.processes import descendants
from mpiddp.protocol import variables
from mpiddp.protocol.channel import next_key
from mpiddp.protocol.terminal import Terminal, prefix_of
from mpiddp.runtime.child import PASSED, Program
from mpiddp.runtime.job.coordinator import Server
from mpiddp.runtime.process import RankProcess, Shown
from mpiddp.world import World


class Rank:
    """What a rank keeps over the attempts that its launcher lets it make."""

    def __init__(self, program: Program, world: World) -> None:
        self.world, self.program = world, program
        self._program = program  # of the first attempt
        self.kept = os.environ.pop(variables.PRIVATE, "")
        if self.kept:
            with named_by(""):
                given = private.take(self.kept)
            host, *names = given.pop(variables.LEFT_OUT).split(",")
            for each in names if host == world.hostname else ():
                os.environ.pop(each, None)  # it has them from the launcher's shell
            os.environ.update(given)
        address, key = os.environ.pop(variables.ADDRESS, ""), os.environ.pop(variables.SECRET, "")
        self.launcher = Server(address, key) if address and key else None
        selection = os.environ.pop(variables.OUTPUT, "") if self.launcher else ""
        if self.launcher is None:
            os.environ.pop(variables.JOB, None)
        terminal = Terminal.parse(os.environ.pop(variables.TERMINAL, ""))
        self.prefix = prefix_of(world.rank, world.hostname) if terminal.has_prefix else ""
        self.shown = Shown(selection, terminal.behind(self.prefix))
        # Whether it waits for the launcher after a failure, which may begin the next attempt.
        holds = bool(os.environ.pop(variables.HOLDS, "")) and self.launcher is not None
        self.holds = holds and not program.starts_mpi
        # Children of the shell that this process may have replaced by exec.
        self.others = frozenset(descendants(os.getpid()))
        self.spare: RankProcess | None = None  # that has imported torch, for the next attempt
        # This process's parent. Without it, nothing would end this rank.
        has_daemon = world.launcher.mpis or world.launcher.name == "slurm"
        self.daemon = os.getppid() if has_daemon else None
        self.wakeup: int | None = None  # readable when a signal has arrived
        self._variables = dict(os.environ)  # of every attempt
        self.own: Mapping[str, str] = {}  # the variables of this attempt

    def begin_again(self, facts: Mapping[str, Any]) -> None:
        """Prepare for the next attempt, by what the launcher says of it."""
        assert self.launcher is not None
        self.program = self._program._replace(args=(*self._program.args, *facts["args"]))
        self.own, self.holds = facts["variables"], facts["holds"]
        os.environ.clear()
        os.environ.update(self._variables, **self.own)
        self.launcher = self.launcher._replace(key=next_key(self.launcher.key))

    def process(self) -> RankProcess:
        """The process of the next attempt: the spare one, unless the script has changed meanwhile."""
        spare, self.spare = self.spare, None
        if spare is not None:
            if spare.can_begin and self.program.imports_torch:
                return spare
            spare.discard()
        return RankProcess(self.program, self.world, self.shown, self.others)

    def offer_spare(self) -> list[tuple[int, int]]:
        """The files of a spare process, which the script makes before its first line: a copy of itself."""
        self.spare = RankProcess(self.program, self.world, self.shown, self.others)
        return self.spare.offer()

    def catch_signals(self) -> None:
        """From now on, a file is readable when a signal has arrived, and contains its number.

        Before, a signal ends this process, and the script with it: MPI holds the interpreter's lock.
        """
        if self.wakeup is not None:
            return
        self.wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*PASSED, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)
