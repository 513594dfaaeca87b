"""What `mpiddp ps`, `top` and `stacks` get of a job, see `mpiddp.protocol.viewers`.

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
from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.protocol.viewers import (
    JOB,
    STACKS,
    folders,
    is_private,
    new_folder,
    peer,
    taken,
)
from mpiddp.text import escaped

_MOST_WAITING = 16  # viewers
_TRIES = 3  # another launcher may remove the empty folder
_QUIET_STEPS, _QUIET_S = 10, 3.0  # without a step: a rank is quiet after the longer of these
_LONGEST_LINE = 200  # characters of a rank's last line


class Listener(NamedTuple):
    """A socket for viewers that want `kind`: JOB or STACKS."""

    kind: str
    socket: socket.socket
    path: Path


class Console:
    """The sockets of a job, over all of its attempts. Without any, the job runs unseen."""

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
    return Console(name, _listen())


def _listen() -> list[Listener]:
    if listeners := _listen_in(folders() * _TRIES):
        return listeners
    if why := taken():
        log.info(why)
        with contextlib.suppress(OSError):
            return _listen_in([new_folder()])
    return []


def _listen_in(candidates: Sequence[Path]) -> list[Listener]:
    for folder in candidates:
        opened: list[Listener] = []
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if is_private(folder):
                name = os.urandom(4).hex()
                for kind in (STACKS, JOB):
                    opened.append(_listener(folder / f"{name}{kind}", kind))
                return opened
        except OSError:
            for listener in opened:
                listener.socket.close()
                listener.path.unlink(missing_ok=True)
    return []


def _listener(path: Path, kind: str) -> Listener:
    """It gets its name last: a viewer removes the socket of a launcher that does not listen."""
    listener = socket.socket(socket.AF_UNIX)
    unnamed = path.with_suffix("")
    try:
        listener.bind(str(unnamed))
        listener.listen()
        listener.setblocking(False)
        unnamed.rename(path)
    except OSError:
        listener.close()
        raise
    return Listener(kind, listener, path)


def job_facts(ranks: Ranks, latest: Mapping[int, bytes], now: float) -> dict[str, Any]:
    """The state of the job and of each rank. Times of a step are means in seconds; memory is in bytes.

    Args:
        latest: the end of what each rank has written.
    """
    table = [_rank_facts(ranks, rank, now) for rank in range(ranks.world_size)]
    for rank, facts in enumerate(table):
        facts["line"] = _last_line(latest.get(rank, b""))
    rates = [facts["rate"] for facts in table if "rate" in facts]
    return {
        "ranks": table,
        "step": max((step for step, _ in ranks.steps.values()), default=None),
        "rate": max(rates, default=None),
    }


def _rank_facts(ranks: Ranks, rank: int, now: float) -> dict[str, Any]:
    facts = {
        "rank": rank,
        "host": ranks.host_of(rank),
        "pid": ranks.started.get(rank, {}).get("pid"),
        "state": _state(ranks, rank),
    }
    if rank in ranks.steps:
        step, since = ranks.steps[rank]
        facts |= {"step": step, "ago_s": now - since, "memory": ranks.paces[rank].memory}
        if time_of_step := ranks.paces[rank].step_time:
            step_s, own_s, _, cpu_s = time_of_step
            if facts["state"] == "running" and now - since > max(_QUIET_STEPS * step_s, _QUIET_S):
                facts["state"], step_s = "quiet", now - since
            facts |= {"rate": 1 / step_s, "own_s": own_s, "wait_s": max(0.0, step_s - own_s)}
            facts["cores"] = cpu_s / step_s
    return facts


def _state(ranks: Ranks, rank: int) -> str:
    for state, members in (
        ("failed", ranks.failures),
        ("done", ranks.done),
        ("saving", ranks.saving),
        ("running", ranks.joining),
        ("joining", ranks.started),
    ):
        if rank in members:
            return state
    return "starting"


def _last_line(text: bytes) -> str:
    """The last line that is not empty, as a terminal shows it."""
    lines = text.decode(errors="replace").replace("\r", "\n").split("\n")
    return escaped(next((line for line in reversed(lines) if line.strip()), "")[-_LONGEST_LINE:])
