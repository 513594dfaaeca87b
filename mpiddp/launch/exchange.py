"""The function that every rank of `mpiddp.spawn` runs, and the answer of each rank.

    caller -> launcher   call, with the function        rank -> launcher   function, answer
    launcher -> caller   answer, outcome                launcher -> rank   function, answer

A rank waits until its answer is answered, so the launcher has it before the rank reports its end. The
launcher never unpickles anything. Whoever does checks the MAC first.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from mpiddp.protocol.channel import VALUE_LIMIT, Lines, decode, encode, value_mac
from mpiddp.protocol.server import ChannelServer, Message

_NO_LIMIT = 1 << 62  # between the caller and its own launcher


class Exchange:
    """The exchange of one job, whose function is as `mpiddp.runtime.function.pickled_call` makes it.

    limit: the most bytes of a pickled result.
    """

    def __init__(self, function: bytes = b"", limit: int = 0) -> None:
        self._function = function
        self._value_limit = max(VALUE_LIMIT, len(function), 2 * limit)  # base64 takes 4/3
        self._line = b""  # of the function
        self.world_size = 0
        # In the latest attempt, by rank: pickles in base64.
        self.results: dict[int, bytes] = {}
        self.errors: dict[int, bytes] = {}

    def begin(self, server: ChannelServer) -> None:
        """An attempt begins, with a new server. The answers of an earlier one no longer count."""
        server.value_limit = self._value_limit
        mac = value_mac(server.key, "function", self._function)
        self._line = encode("function", self._function, mac=mac)
        self.world_size = server.world_size
        self.results, self.errors = {}, {}

    def take(self, message: Message, server: ChannelServer) -> None:
        """A rank asks for the function, or answers."""
        rank, facts = message.rank, message.facts
        if message.kind == "function":
            server.send_line(rank, self._line, to_script=True)
        elif facts["mac"] == value_mac(server.key, f"answer {rank}", facts["body"]):
            found = self.results if facts["is_result"] else self.errors
            found[rank] = facts["body"]
            server.send(rank, "answer", to_script=True)


def messages_over(connection: socket.socket) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The messages between a caller and its launcher, each with its value, until the connection ends.

    Raises OSError if it has ended.
    """
    lines = Lines(_NO_LIMIT)
    while chunk := connection.recv(1 << 20):
        for line in lines.split(chunk):
            yield decode(line)
