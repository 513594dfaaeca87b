"""To whom this process speaks: the server of its job, and the agent that has started it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping

from mpiddp.runtime.job.channel import JobChannel


class Link:
    """The connections of one process.

    Attributes:
        channel: this process's connection to its job; None until there is one.
        control: the connection to the agent that has started this script; None for any other process.
        has_launcher: whether `mpiddp launch` listens.
    """

    def __init__(self) -> None:
        self.channel: JobChannel | None = None
        self.control: socket.socket | None = None
        self.has_launcher = False
        self._pid = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, which is not a rank."""
        return os.getpid() == self._pid

    def send(self, kind: str, **fields: object) -> None:
        """Send the launcher a message, if there is a launcher."""
        if self.has_launcher and self.channel is not None:
            self.channel.send(kind, b"", **fields)

    def tell(self, kind: str) -> None:
        """The script "supports_stop", or has "stopped"."""
        self.send(kind)
        self.tell_agent({"type": kind})

    def tell_agent(self, facts: Mapping[str, object]) -> None:
        if self.control is not None and self.is_of_this_process:
            with contextlib.suppress(OSError):  # the script has closed it
                self.control.sendall(json.dumps(facts).encode() + b"\n")
