"""The function that every rank of `mpiddp.spawn` runs, and the answer of each rank.

A rank opens a connection for each of the two, with the proof that all its connections begin with:

    "function"  the rank sends GO, then the launcher sends the function
    "answer"    the rank sends its result, exception or refusal, then the launcher sends GO

So the launcher has a rank's answer before the rank reports its end. It never unpickles anything.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from mpiddp.protocol.messages import ANSWER, FUNCTION, GO, notice_silence
from mpiddp.protocol.payload import Payload, receive_payload, send_payload


class Exchange:
    """The exchange of one job. Without a function, it ends the connection of a rank that asks for one.

    Args:
        limit: the most bytes of an answer's body.
    """

    def __init__(self, function: Payload | None = None, limit: int = 0) -> None:
        self._function = function
        self._limit = limit
        self._secret = ""
        self.world_size = 0
        self.answers: dict[int, Payload] = {}  # by rank, of the latest attempt

    def begin(self, secret: str, world_size: int) -> None:
        """An attempt begins, with a new secret. The answers of an earlier one no longer count."""
        self._secret = secret
        self.world_size = world_size
        self.answers = {}

    def add(self, rank: int, kind: str, connection: socket.socket) -> None:
        """Serve the connection of a rank in a thread, which lives for one transfer.

        Args:
            kind: FUNCTION or ANSWER.
        """
        if self._function is None:
            connection.close()
            return
        is_function = kind == FUNCTION
        arguments = (connection, rank, is_function, self._function, self._secret, self.answers)
        threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(
        self,
        connection: socket.socket,
        rank: int,
        is_function: bool,
        function: Payload,
        secret: str,
        answers: dict[int, Payload],
    ) -> None:
        # A rank that ends meanwhile is noticed by its other connection.
        with connection, contextlib.suppress(OSError, ValueError):
            connection.setblocking(True)
            notice_silence(connection, is_read_slowly=True)
            if is_function:
                connection.recv(len(GO))
                send_payload(connection, function, secret, FUNCTION)
            else:
                purpose = f"{ANSWER} {rank}"
                answers[rank] = receive_payload(connection, secret, purpose, limit=self._limit)
                connection.sendall(GO)
