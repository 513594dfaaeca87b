"""Where `mpiddp ps`, `top` and `stacks` find this job, see `mpiddp.protocol.viewers`.

A viewer gets a file in memory. So the launcher parses nothing of it, sends one byte, and never waits for it.
Without a folder to listen in, a job runs unseen.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.launch import log
from mpiddp.protocol.viewers import JOB, STACKS, folders, is_private, new_folder, peer, taken
from mpiddp.text import escaped

_MOST_WAITING = 16  # viewers
_TRIES = 3  # another launcher may remove the empty folder


class Listener(NamedTuple):
    """A socket for viewers that want `kind`: JOB or STACKS."""

    kind: str
    socket: socket.socket
    path: Path


class Console:
    """The sockets of a job, over all of its attempts."""

    def __init__(self, name: str = "", listeners: Sequence[Listener] = ()) -> None:
        self._name = escaped(name)
        self._began_at = time.time()
        self.attempts = 0  # that have begun
        self._listeners = listeners
        self._waiting: list[socket.socket] = []  # viewers that want stacks

    def close(self) -> None:
        for listener in self._listeners:
            listener.socket.close()
            with contextlib.suppress(OSError):
                listener.path.unlink(missing_ok=True)
                listener.path.parent.rmdir()  # the last launcher removes it

    @contextlib.contextmanager
    def attending(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Within the body, an attempt, the selector reports a Listener when a viewer has come."""
        self.attempts += 1
        for listener in self._listeners:
            selector.register(listener.socket, selectors.EVENT_READ, listener)
        try:
            yield
        finally:
            for listener in self._listeners:
                with contextlib.suppress(KeyError):
                    selector.unregister(listener.socket)

    def accept(self, listener: Listener, selector: selectors.BaseSelector) -> socket.socket | None:
        """The connection of a viewer of this user."""
        try:
            viewer, _ = listener.socket.accept()
        except BlockingIOError:
            return None
        except OSError:  # no file is left; the selector would report it without end
            selector.unregister(listener.socket)
            return None
        viewer.setblocking(False)
        if peer(viewer)[1] == os.getuid():
            return viewer
        viewer.close()
        return None

    def let_wait(self, viewer: socket.socket) -> None:
        """Let the viewer wait for `answer_all`. Of too many, the first one waits no longer."""
        if len(self._waiting) == _MOST_WAITING:
            self._waiting.pop(0).close()
        self._waiting.append(viewer)

    def answer_all(self, facts: Mapping[str, Any]) -> None:
        """Send these facts to the viewers that wait."""
        waiting, self._waiting = self._waiting, []
        for viewer in waiting:
            self.answer(viewer, facts)

    def answer(self, viewer: socket.socket, facts: Mapping[str, Any]) -> None:
        """Send a viewer these facts, and close its connection."""
        job = {
            "pid": os.getpid(),
            "name": self._name,
            "age_s": time.time() - self._began_at,
            "attempt": self.attempts,
        }
        with viewer, contextlib.suppress(OSError):  # it has left, or there is no memory
            file = os.memfd_create("mpiddp")
            try:
                os.write(file, json.dumps({**job, **facts}).encode())
                socket.send_fds(viewer, [b"."], [file])
            finally:
                os.close(file)


def open_console(name: str) -> Console:
    """The console of the job with this name, which viewers find in a folder of this user."""
    for folder in folders() * _TRIES:
        if listeners := _listen_in(folder):
            return Console(name, listeners)
    if why := taken():
        log.info(why)
        with contextlib.suppress(OSError):
            return Console(name, _listen_in(new_folder()))
    return Console(name)


def _listen_in(folder: Path) -> list[Listener]:
    """The listeners in this folder; none if that fails. Each gets its name last.

    A viewer removes the socket of a launcher that does not listen.
    """
    opened: list[Listener] = []
    unnamed = folder / os.urandom(4).hex()
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if not is_private(folder):
            return []
        for kind in (STACKS, JOB):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(unnamed))
            stack.callback(unnamed.unlink, missing_ok=True)
            listener.listen()
            listener.setblocking(False)
            path = unnamed.with_suffix(kind)
            unnamed.rename(path)
            stack.callback(path.unlink, missing_ok=True)
            opened.append(Listener(kind, listener, path))
        stack.pop_all()
        return opened
    return []
