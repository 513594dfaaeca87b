"""A key-value store for the ranks of a command, without torch.

The process of such a rank only starts the command and waits. `import torch` would cost it a second or two
and some 250 MB, which the command's own torch costs again. So these processes agree over this store, and
rank 0 serves torch's store for the commands alone.

`SignedStore` guards the values, as in torch's store, which has no password either.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Sequence
from typing import Any

from mpiddp.protocol.messages import notice_silence

_LONGEST = 64 << 20  # bytes of a request or an answer: a value of every rank
_CHUNK = 1 << 16
_READ = selectors.EVENT_READ
CONNECT_TIMEOUT_S = 30.0


class PlainStore:
    """A client with one connection, for one thread at a time. Its methods are those of torch's Store.

    Every method raises RuntimeError if the connection is lost, as torch's do.
    """

    def __init__(self, address: str, port: int) -> None:
        self._address, self._port = address, port
        self._lock = threading.Lock()
        try:
            self._connection = socket.create_connection((address, port), CONNECT_TIMEOUT_S)
            self._connection.settimeout(None)
            notice_silence(self._connection)
        except OSError as error:
            raise RuntimeError(f"no connection to rank 0: {error}") from None
        self._answers = self._connection.makefile("rb")

    def clone(self) -> PlainStore:
        return PlainStore(self._address, self._port)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return all(value is not None for value in self._ask("get", *keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of the keys, b"" for a key that is missing."""
        return [(value or "").encode() for value in self._ask("get", *keys)]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set the key if its value is `expected`, or if it is missing and `expected` is ""."""
        return str(self._ask("compare_set", key, expected, desired)).encode()

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def _ask(self, *request: str) -> Any:
        try:
            with self._lock:
                self._connection.sendall(json.dumps(request).encode() + b"\n")
                line = self._answers.readline(_LONGEST)
            return json.loads(line)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"lost the connection to rank 0: {error}") from None


class PlainServer:
    """Serves the store on `listener`, in a thread. Whoever sends anything but requests is dropped."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._values: dict[str, str] = {}
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, _READ)
            while True:
                for key, events in selector.select():
                    client = key.data
                    if client is None:
                        self._accept(selector)
                    elif (events & _READ and not self._receive(client)) or not client.send():
                        selector.unregister(client.connection)
                        client.connection.close()
                    else:
                        wanted = _READ | (selectors.EVENT_WRITE if client.unsent else 0)
                        selector.modify(client.connection, wanted, client)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # it has already closed, or too many are open
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            notice_silence(connection)
            selector.register(connection, _READ, _Client(connection))

    def _receive(self, client: _Client) -> bool:
        """Answer the requests that have arrived. Whether the client is still there."""
        try:
            chunk = client.connection.recv(_CHUNK)
            client.buffer += chunk
            *lines, rest = client.buffer.split(b"\n")
            client.buffer = bytearray(rest)
            for line in lines:
                client.unsent += json.dumps(self._answer(*json.loads(line))).encode() + b"\n"
                if len(client.unsent) > _LONGEST:
                    return False
        except BlockingIOError:
            return True
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            return False
        return bool(chunk) and len(client.buffer) <= _LONGEST

    def _answer(self, kind: str, *arguments: str) -> object:
        if not all(isinstance(each, str) for each in arguments):
            raise ValueError(kind)
        if kind == "get":
            found = [self._values.get(key) for key in arguments]
            if sum(len(value or "") for value in found) > _LONGEST:  # a key may be asked for often
                raise ValueError("the answer is too long")
            return found
        key, *values = arguments
        if kind == "delete":
            return self._values.pop(key, None) is not None
        if kind == "set":
            (self._values[key],) = values
            return None
        expected, desired = values
        current = self._values.get(key, "")
        if current != expected:
            return current
        self._values[key] = desired
        return desired


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = bytearray()
        self.unsent = bytearray()

    def send(self) -> bool:
        """Send as much as the connection accepts. Whether the client is still there."""
        try:
            del self.unsent[: self.connection.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True
