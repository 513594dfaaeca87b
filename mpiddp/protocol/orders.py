"""The orders of a launcher to the agents of its ranks: one record, in one variable that no script gets.

An option of `mpiddp launch` reaches the agents if its field of `LaunchOptions` is also a field here.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from mpiddp.errors import UserError
from mpiddp.protocol.terminal import Terminal
from mpiddp.protocol.variables import LOST_AFTER_S

_VERSION = 1  # grows when a field changes its meaning


class Orders(NamedTuple):
    """The orders for one attempt. Each default is that of an agent without a launcher."""

    address: str = ""  # where the launcher listens: "host:port" or "unix:path"
    key: str = ""  # of the job in this attempt
    lost_s: float = LOST_AFTER_S  # after so many seconds of silence, the launcher's host is lost
    log_ranks: str = ""  # the streams that the launcher shows
    terminal: Terminal = Terminal()
    holds: bool = False  # after a failure, wait for the launcher, which may begin the next attempt
    failed_grace_s: float = 3.0  # after a failure elsewhere, the script has this time after SIGTERM
    umask: int | None = None  # of the launcher, because ssh carries none
    exported: Sequence[str] = ()  # the names of the variables that the user has given with -x
    mpi_variables: bool = False  # the program also finds Open MPI's variables of its rank
    variables: Mapping[str, str] = MappingProxyType({})  # more variables, of this attempt alone
    args: Sequence[str] = ()  # the last arguments of the program
    hosts: str = "HOSTFILE"  # of the job, as the user has typed them, for fixes
    image: str | None = None  # in which the program runs, "docker://NAME"
    mounts: Sequence[
        str
    ] = ()  # the folders of the host that a container gets, beside the working folder

    def packed(self) -> str:
        """The orders as JSON, without the defaults; "" if these are all."""
        facts = {
            name: value
            for name, value in self._asdict().items()
            if value != self._field_defaults[name]
        }
        return json.dumps({"version": _VERSION, **facts}, separators=(",", ":")) if facts else ""

    @classmethod
    def unpacked(cls, text: str) -> Orders:
        """The orders of `packed`. Raises UserError if the launcher is of another version."""
        facts = json.loads(text or "{}")
        if facts.pop("version", _VERSION) != _VERSION or facts.keys() - {*cls._fields}:
            problem = (
                f"the mpiddp on {socket.gethostname()} has another version than the launcher's"
            )
            raise UserError(f"{problem}.", fix="mpiddp hosts push HOSTFILE")
        return cls(**facts)._replace(terminal=Terminal(*facts.get("terminal", ())))
