"""The process that reads one rank's stdout and stderr until their end.

It writes each to a file once the rank has named a folder, and sends the streams that the launcher shows over
connections of their own, in whole lines. It never reads ahead of a slow launcher, so a stopped terminal stops
the rank as a full pipe does, and nothing is lost. A signal to all processes of the job does not end it.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from mpiddp.protocol.messages import (
    DRAIN,
    DRAINED,
    FILES,
    OPEN_S,
    OUTPUT_PROCESS,
    STREAMS,
    is_shown,
)
from mpiddp.runtime.job.connect import Server
from mpiddp.runtime.launcher.output_stream import OutputStream
from mpiddp.world import World

# A rank that prints many short lines would wake this process for each of them.
_SHORT, _PAUSE_S = 2048, 0.005
# For processes that a rank leaves behind, and that still have its streams: if they are quiet, and in all.
_LEFTOVER_S, _LEFTOVER_LIMIT_S = 2.0, 10.0
_AWAY_S = 600.0  # until a launcher that reads nothing is taken for gone, once the rank has ended
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE),
)


def run(
    world: World,
    server: Server,
    selection: str,
    sources: Mapping[int, int],
    control: socket.socket,
    rank: int | None,
) -> NoReturn:
    """Be the output process of a rank, in a process forked from it.

    Args:
        selection: the ranks that the launcher shows, see `mpiddp.protocol.messages.is_shown`.
        sources: the file descriptor of each stream.
        control: the rank's messages, see `mpiddp.runtime.launcher.output`.
        rank: a file descriptor that is readable when the rank has ended.
    """
    try:
        os.setsid()
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(OUTPUT_PROCESS)
        # The MPI and the launcher notice the end of a rank by the end of its connections.
        pmi = _pmi_connection(os.environ)
        close_all_but({1, 2, *sources.values(), control.fileno(), rank, pmi})
        streams = [OutputStream(number, sources[number], world) for number in STREAMS]
        for stream in streams:
            stream.connect(server, is_wanted=is_shown(selection, world.rank, stream.number))
        _serve(streams, control, rank, pmi)
    finally:
        os._exit(0)


def _pmi_connection(env: Mapping[str, str]) -> int | None:
    """The rank's connection to Hydra's proxy, if it has one. This process closes it after the rank's end.

    The proxy kills a rank that closes it before, even after MPI_Finalize. `os.closerange` does.
    """
    name = env.get("PMI_FD", "")
    number = int(name) if name.isascii() and name.isdecimal() else -1
    try:
        return number if stat.S_ISSOCK(os.fstat(number).st_mode) else None
    except (OSError, OverflowError):  # it has none, or the number is an outer job's
        return None


def close_all_but(kept: Collection[int | None]) -> None:
    """Close the file descriptors of this process, but those that are `kept`."""
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if number not in kept:
            with contextlib.suppress(OSError):  # that of /proc/self/fd itself
                os.close(number)


def _serve(
    streams: Sequence[OutputStream],
    control: socket.socket | None,
    rank: int | None,
    pmi: int | None,
) -> None:
    """Read the streams until their end. A rank that leaves processes behind ends them soon after itself.

    A rank with a connection `pmi` may close its streams before its end, at which this closes that connection.
    """
    is_draining = has_ended = False
    ended_at: float | None = None  # when the rank ended
    read_at = 0.0  # when a stream was last read
    while pmi is not None or not all(stream.is_done for stream in streams):
        quiet_since = None if ended_at is None else max(ended_at, read_at)
        timeout_s = _timeout(streams, quiet_since, is_draining=is_draining)
        ready = _wait(streams, control, rank, timeout_s)
        now = time.monotonic()
        longest = max(stream.read_if_ready(ready) for stream in streams)
        read_at = now if longest > 0 else read_at
        for stream in streams:
            stream.send_if_ready(ready)
            if stream.line and (is_draining or now - stream.line_since >= OPEN_S):
                stream.flush()
        if control is not None and control.fileno() in ready:
            message = _receive(control, streams)
            is_draining |= message == DRAIN
            if not message:  # the rank has ended, and so have its forks; or it has closed its end
                control, has_ended = None, has_ended or rank is None
        elif is_draining and not longest and not any(stream.unsent for stream in streams):
            is_draining = False
            if control is not None:
                with contextlib.suppress(OSError):
                    control.send(DRAINED)
        if rank is not None and rank in ready:
            os.close(rank)
            rank, has_ended = None, True
        if has_ended and ended_at is None:
            ended_at = now
            if pmi is not None:
                os.close(pmi)
                pmi = None
            for stream in streams:
                stream.note_end_of_rank()
        if ended_at is not None:
            _end_leftover(streams, ended_at, max(ended_at, read_at), now)
        if 0 < longest < _SHORT and not is_draining:
            time.sleep(_PAUSE_S)


def _wait(
    streams: Sequence[OutputStream],
    control: socket.socket | None,
    rank: int | None,
    timeout_s: float | None,
) -> dict[int, int]:
    """The events of the file descriptors that are ready."""
    poll = select.poll()
    if control is not None:
        poll.register(control, select.POLLIN)
    if rank is not None:
        poll.register(rank, select.POLLIN)
    for stream in streams:
        if stream.is_readable and stream.source is not None:
            poll.register(stream.source, select.POLLIN)
        if stream.connection is not None:
            poll.register(stream.connection, select.POLLOUT if stream.unsent else 0)
    return dict(poll.poll(None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))))


def _timeout(
    streams: Sequence[OutputStream], quiet_since: float | None, *, is_draining: bool
) -> float | None:
    """Seconds until a line has been open for too long, or what is left of the rank quiet for too long."""
    if is_draining and not any(stream.unsent for stream in streams):
        return 0.0
    if any(stream.owed and stream.is_readable for stream in streams):
        return 0.0  # only a poll that finds nothing shows that all is read
    now = time.monotonic()
    times = [stream.line_since + OPEN_S - now for stream in streams if stream.line]
    if quiet_since is not None:
        times.append(max(quiet_since + _LEFTOVER_S - now, 0.5))
    return min(times, default=None)


def _receive(control: socket.socket, streams: Sequence[OutputStream]) -> bytes:
    """Obey a message of the rank, and return it; b"" at the end."""
    files = array.array("i", [0] * len(streams))
    try:
        message, rights, _, _ = control.recvmsg(64, socket.CMSG_SPACE(len(files) * files.itemsize))
    except OSError:
        message, rights = b"", []
    if message == FILES and rights:
        files = array.array("i", bytes(rights[0][2]))
        for stream, file in zip(streams, files, strict=True):
            stream.write_to(file)
    return message


def _end_leftover(
    streams: Sequence[OutputStream], ended_at: float, quiet_since: float, now: float
) -> None:
    """End the streams that only leftover processes of the rank have, once all that it wrote is read."""
    for stream in streams:
        if stream.unsent and now - max(quiet_since, stream.sent_at) >= _AWAY_S:
            stream.lose()
        is_quiet = not stream.unsent and now - quiet_since >= _LEFTOVER_S
        if not stream.owed and (is_quiet or now - ended_at >= _LEFTOVER_LIMIT_S):
            stream.end()
