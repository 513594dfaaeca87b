"""What many sources write on one terminal, file or pipe, and what waits for the verdict.

Tests mpiddp/launch/{log,output}.py.
python -m pytest tests/unit/launch/test_screen.py
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
import time
from typing import IO

import pytest

from mpiddp.launch import log
from mpiddp.launch.log import Screen, Source
from mpiddp.launch.output import JobOutput
from mpiddp.protocol.server import TimedSelector


def test_the_only_rank_has_whole_lines_behind_its_prefix(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    screen, rank = Screen(1, "stdout", is_shared=False), Source(0, b"[0] ")
    screen.show(rank, b"a\nb\rc\n\nd")
    assert capfdbinary.readouterr().out == b"[0] a\n[0] c\n[0] \n"
    screen.end(rank)
    assert capfdbinary.readouterr().out == b"[0] d\n"


def begun(*, shows_end: bool) -> tuple[JobOutput, list[IO[bytes]]]:
    """The output of a job of two ranks, and mpirun's ends of its streams."""
    ends = [os.pipe() for _ in range(2)]
    streams = [os.fdopen(reader, "rb", 0) for reader, _ in ends]
    outputs = JobOutput(2, TimedSelector(), *streams, has_prefix=True, shows_end=shows_end)
    return outputs, [os.fdopen(writer, "wb", 0) for _, writer in ends]


def copy_until(outputs: JobOutput, ranks: list[int]) -> None:
    """Copy until the output of all ranks but these has ended."""
    deadline = time.monotonic() + 60
    while outputs.open_ranks != ranks and time.monotonic() < deadline:
        outputs._selector.ready(time.monotonic() + 0.01)
        outputs.copy()
    assert outputs.open_ranks == ranks


def test_the_end_of_what_ranks_print_on_stderr_is_kept_for_the_verdict(
    capfd: pytest.CaptureFixture[str],
) -> None:
    outputs, _ = begun(shows_end=False)
    ours, theirs = socket.socketpair()
    outputs.add(2, 1, "host1", theirs)
    for first in range(0, 40_000, 1000):
        ours.sendall(b"".join(b"line %d\n" % number for number in range(first, first + 1000)))
        outputs.copy()
    ours.close()
    copy_until(outputs, [])
    outputs.finish()
    outputs.settle(is_said=True)
    kept = outputs.last_errors[1]
    assert 100 < len(kept) < 10_000
    assert kept[-1] == "line 39999"
    assert capfd.readouterr().err.count("\n") == 40_000


def test_a_sentence_reaches_a_pipe_that_another_program_has_made_non_blocking() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, b"." * fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 16))
    thread = threading.Thread(target=log.write_all, args=(writer, b"rank 3 failed first\n"))
    thread.start()
    text = b""
    while not text.endswith(b"first\n"):
        text += os.read(reader, 1 << 20)
    thread.join(60)
    for file in (reader, writer):
        os.close(file)


def test_no_write_waits_for_a_terminal_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have room for a part of a text, and say that it can be written."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError

    monkeypatch.setenv("TERM", "xterm")
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(30)
    try:
        for size in range(1, 900, 37):
            ours, theirs = os.openpty()
            screen = Screen(theirs, "stdout", is_shared=False)
            while not screen.is_blocked:
                screen.show(Source(0), b"x" * size + b"\n")
                size += 1
            os.close(ours)
            os.close(theirs)
            os.close(screen.file)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
