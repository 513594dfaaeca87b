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
from pathlib import Path
from typing import IO

import pytest

from mpiddp.launch import log
from mpiddp.launch.log import Screen, Source
from mpiddp.launch.output import JobOutput
from mpiddp.protocol.server import TimedSelector


def test_the_only_rank_passes_its_bytes_on(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    screen, rank = Screen(1, "stdout", is_shared=False), Source(0)
    screen.show(rank, b"a\nb\n\nc")
    assert capfdbinary.readouterr().out == b"a\nb\n\nc"
    screen.show(rank, b"d\re\r\n")
    assert capfdbinary.readouterr().out == b"d\re\r\n"
    screen.show(Source(-1), b"another source\nbegins a line")
    screen.show(rank, b"f")
    assert capfdbinary.readouterr().out == b"another source\nbegins a line\nf"


def test_the_only_rank_has_whole_lines_behind_its_prefix(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    screen, rank = Screen(1, "stdout", is_shared=False), Source(0, b"[0] ")
    screen.show(rank, b"a\nb\rc\n\nd")
    assert capfdbinary.readouterr().out == b"[0] a\n[0] c\n[0] \n"
    screen.end(rank)
    assert capfdbinary.readouterr().out == b"[0] d\n"


def test_an_open_line_grows_through_a_pipe(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(log.time, "monotonic", lambda: clock)
    screen = Screen(1, "stdout", is_shared=True)
    first, second = Source(0, b"[0] "), Source(1, b"[1] ")
    screen.show(second, b"1%")
    screen.show(first, b"\r1%")
    screen.show_growth()
    assert capfdbinary.readouterr().out == b""  # the rest of the line may be on its way
    clock += log.GROWTH_S
    screen.show_growth()
    assert capfdbinary.readouterr().out == b"[0] 1%"  # of the lowest rank alone
    screen.show(first, b"\r2%")
    screen.show_growth()
    assert capfdbinary.readouterr().out == b""  # at most once a second
    clock += log.GROWTH_S
    screen.show_growth()
    assert capfdbinary.readouterr().out == b"\r[0] 2%"
    screen.show(second, b"\r9%\n")
    assert capfdbinary.readouterr().out == b"\n[1] 9%\n"
    screen.show(first, b"\r9%\n")
    assert capfdbinary.readouterr().out == b"[0] 9%\n"


RULE = b"-" * 60 + b"\n"
SAID = RULE + b"prterun detected that one or more processes exited with non-zero status\n" + RULE


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


@pytest.mark.parametrize("shows_end", [False, True])
def test_the_streams_of_a_rank_and_of_mpirun_are_copied(
    shows_end: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outputs, ours = begun(shows_end=shows_end)
    outputs.hold_mpirun()
    pairs = [socket.socketpair() for _ in range(3)]
    for (_, theirs), (stream, rank) in zip(pairs, [(1, 0), (2, 1), (1, 1)], strict=True):
        outputs.add(stream, rank, f"host{rank}", theirs)
    for (each, _), text in zip(pairs, [b"a\n", b"b\n", b"c"], strict=True):
        each.sendall(text)
    ours[1].write(SAID)
    pairs[0][0].close()
    copy_until(outputs, [1])
    for each, _ in pairs[1:]:
        each.close()
    copy_until(outputs, [])
    outputs.log("a sentence.", is_error=True)
    outputs.finish()
    outputs.settle(is_said=True, log_dir=str(tmp_path))
    assert (tmp_path / "mpirun.log").exists() is not shows_end
    seen = capfd.readouterr()
    assert sorted(seen.out.splitlines()) == ["[rank 0 host0] a", "[rank 1 host1] c"]
    assert sorted(seen.err.splitlines()) == sorted(
        ["[rank 1 host1] b", "mpiddp: a sentence.", *(SAID.decode().splitlines() * shows_end)]
    )


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
