"""The process of a rank's program and its streams: all that may be ready before an attempt begins."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mpiddp.protocol.channel import STREAMS, is_shown
from mpiddp.protocol.terminal import Manners, Terminal
from mpiddp.runtime.child import Child, Program
from mpiddp.runtime.job.coordinator import Server
from mpiddp.runtime.output import Input, Stream
from mpiddp.world import World


class Shown(NamedTuple):
    """What the launcher shows of a rank: the streams that --log-ranks selects, as in this terminal."""

    selection: str  # "" without a launcher: the program has the streams of the MPI
    terminal: Terminal


class RankProcess:
    """A program that may be started, and the ends of its streams."""

    def __init__(self, program: Program, world: World, shown: Shown, others: Iterable[int]) -> None:
        self.child = Child(program, others)
        self._shown, self._world = shown, world
        name = f"rank {world.rank} on {world.hostname}"
        numbers = STREAMS if shown.selection else ()
        self.streams = [Stream(each, name, shown.terminal) for each in numbers]
        # The files of the child, by its own descriptors. They are closed here when it starts.
        self._files = {stream.number: stream.theirs for stream in self.streams}
        self.input: Input | None = None  # of rank 0
        if shown.selection and world.rank == 0:
            self.input = Input(shown.terminal)
            self._files[0] = self.input.theirs
        elif shown.selection:
            self._files[0] = os.open(os.devnull, os.O_RDONLY)

    def start(self, variables: Mapping[str, str]) -> None:
        """Start the child, see `Child.start`."""
        self.child.start(self._files, variables)

    def offer(self) -> list[tuple[int, int]]:
        """The files with which another child makes this one, see `Child.go`."""
        return [(-1, self.child.offer()), *self._files.items()]

    @property
    def can_begin(self) -> bool:
        """Whether another child has made this one, which waits."""
        self.child.hear()
        return self.child.runs and self.child.control is not None

    def connect(self, launcher: Server) -> None:
        """Let the launcher show the streams, and send its stdin."""
        if self.input is not None:
            self.input.connect(launcher, self._world)
        for stream in self.streams:
            if is_shown(self._shown.selection, self._world.rank, stream.number):
                stream.connect(launcher, self._world)

    def register(self, poll: select.poll) -> None:
        """Let `poll` report what `act` needs."""
        for stream in self.streams:
            stream.register(poll)
        if self.input is not None:
            self.input.register(poll)

    def act(self, ready: Mapping[int, int]) -> Manners | None:
        """Read and send what the events of poll(2) allow. Returns what the script has set of its terminal."""
        for stream in self.streams:
            stream.act(ready)
        return self.input.act(ready) if self.input is not None else None

    def resize(self, terminal: Terminal) -> None:
        """Give the streams that are terminals a new size."""
        for stream in self.streams:
            if not stream.source.closed:
                terminal.resize(stream.source.fileno())
        if self.input is not None and self.input.sink is not None:
            terminal.resize(self.input.sink)

    @property
    def is_done(self) -> bool:
        """Whether all that was printed has been sent."""
        return all(stream.is_done for stream in self.streams)

    def discard(self) -> None:
        """Kill a child that waits, and close the streams."""
        self.child.pass_on(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Close the streams."""
        for stream in self.streams:
            stream.close()
        if self.input is not None:
            self.input.close()
