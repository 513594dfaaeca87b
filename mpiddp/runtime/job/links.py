"""Whom this process talks to as a rank of its job: the other ranks, the launcher, and its agent."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from mpiddp.protocol.channel import encode
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.world import World, is_joined


class Links:
    """The connections of this process, which has none before it joins. Messages to nobody are dropped."""

    def __init__(self) -> None:
        # This process is the script of a rank, whose agent reports its end. By hand it is the rank itself.
        self.has_agent = is_joined(os.environ)
        self.control: socket.socket | None = None  # to the agent, unless that has started a command
        # It has host names once the ranks have joined. They join once: MPI cannot be initialized again.
        self.coordinator = Coordinator(World(0, 1, 0, 1), None)

    @property
    def has_launcher(self) -> bool:
        """Whether `mpiddp launch` listens."""
        return self.coordinator.has_launcher

    def send(self, kind: str, **facts: object) -> None:
        """Send the launcher a message, if there is a launcher."""
        if self.has_launcher:
            self.coordinator.send(kind, b"", **facts)

    def tell_agent(self, kind: str, **facts: object) -> None:
        """Tell the agent that has started this script, if one has."""
        if self.control is not None:
            with contextlib.suppress(OSError):  # the script has closed it
                self.control.sendall(encode(kind, b"", **facts))

    def tell_over(self, code: int) -> None:
        """Tell the agent that this script, which has failed, has no more to do than to end."""
        if self.control is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the script may have closed or replaced it
                    stream.flush()
            self.tell_agent("over", code=code)
