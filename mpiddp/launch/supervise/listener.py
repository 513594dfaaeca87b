"""The listening socket of the control channel: on one address, or for this host in a private folder."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from mpiddp.paths import cause_of
from mpiddp.protocol.messages import UNIX


class Listener:
    """A listening socket. `shown` is its address as the ranks get it.

    Args:
        address: the socket gets a free port of it; None for ranks on this host only: a Unix socket that
            only this user can open.

    Raises:
        UserError: it cannot listen on `address`.
        JobFailed: a machine failed.
    """

    def __init__(self, address: str | None) -> None:
        self._folder: Path | None = None
        if address is None:
            self._folder = _private_folder()
            path = self._folder / "control"
            self.socket = _listen_at(path)
            self.shown = f"{UNIX}{path}"
        else:
            self.socket = _listen(address)
            host, port = self.socket.getsockname()[:2]
            self.shown = f"{host}:{port}"
        self.socket.setblocking(False)

    @property
    def is_local(self) -> bool:
        """Whether only processes of this host connect."""
        return self._folder is not None

    def close(self) -> None:
        self.socket.close()
        if self._folder is not None:
            _remove(self._folder / "control")


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise cause_of(error)(
            f"cannot listen on {address} of this machine ({error.strerror}). "
            "Name another interface: --interface NAME"
        ) from None


def _listen_at(path: Path) -> socket.socket:
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1024)
    except OSError as error:
        if listener is not None:
            listener.close()
        _remove(path)
        raise cause_of(error)(f"cannot listen at {path} ({error.strerror}).") from None
    return listener


def _private_folder() -> Path:
    """A new folder that only this user can open. Its path is short, because a socket's has 107 bytes."""
    folder = Path("/tmp", f"mpiddp-{os.urandom(8).hex()}")
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise cause_of(error)(f"cannot create a folder in /tmp ({error.strerror}).") from None
    return folder


def _remove(path: Path) -> None:
    """Remove the socket, if there is one, and its folder."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
