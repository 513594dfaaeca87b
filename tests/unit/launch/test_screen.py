"""What many sources write on one terminal, file or pipe, and what waits for the verdict.

Tests mpiddp/launch/{screen,output}.py.
python -m pytest tests/unit/launch/test_screen.py
"""

from __future__ import annotations

import fcntl
import os
import socket
import termios
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mpiddp.launch import log
from mpiddp.launch import screen as screens
from mpiddp.launch.output import JobOutput
from mpiddp.launch.screen import Screen, Source
from mpiddp.protocol.messages import FRAME, LONGEST_LINE
from tests.support.patience import PATIENCE_S


class Reader:
    """A screen on one end of a pipe, or of a terminal, and what arrives at the other."""

    def __init__(self, *, is_shared: bool, is_terminal: bool = False) -> None:
        self.reader, writer = os.openpty() if is_terminal else os.pipe()
        if is_terminal:
            import tty

            tty.setraw(writer)
        os.set_blocking(self.reader, False)
        self.screen = Screen(writer, "stdout", is_shared=is_shared)
        os.close(writer)

    def seen(self) -> bytes:
        try:
            return os.read(self.reader, 1 << 20)
        except (BlockingIOError, OSError):
            return b""


@pytest.fixture
def alone() -> Iterator[Reader]:
    reader = Reader(is_shared=False)
    yield reader
    reader.screen.close()
    os.close(reader.reader)


@pytest.fixture
def shared() -> Iterator[Reader]:
    reader = Reader(is_shared=True)
    yield reader
    reader.screen.close()
    os.close(reader.reader)


ZERO, ONE = b"[rank 0 a] ", b"[rank 1 b] "


def test_another_source_begins_a_line(alone: Reader) -> None:
    alone.screen.show(Source(0), b"a")
    alone.screen.show(Source(-1), b"b\n")
    alone.screen.show(Source(0), b"c")
    assert alone.seen() == b"a\nb\nc"


def test_each_line_of_the_only_rank_has_its_prefix(alone: Reader) -> None:
    rank = Source(0, ZERO)
    alone.screen.show(rank, b"a\nb\n\nc")
    assert alone.seen() == ZERO + b"a\n" + ZERO + b"b\n" + ZERO + b"\n" + ZERO + b"c"
    alone.screen.show(rank, b"d\re\r\n")
    assert alone.seen() == b"d\r" + ZERO + b"e\r\n"
    alone.screen.show(Source(0, ZERO), b"f\n")
    assert alone.seen() == ZERO + b"f\n"


def test_a_quiet_line_is_shown_once(shared: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(0, ZERO)
    shared.screen.show(source, b"password: ")
    shared.screen.show_quiet_lines()
    assert shared.seen() == b""
    monkeypatch.setattr(screens, "_QUIET_S", 0.0)
    shared.screen.show_quiet_lines()
    shared.screen.show_quiet_lines()
    assert shared.seen() == ZERO + b"password: \n"
    shared.screen.show(source, b"done\n")
    assert shared.seen() == ZERO + b"password: done\n"
    shared.screen.show(source, b"1%\r2%")
    shared.screen.show_quiet_lines()
    assert shared.seen() == b""


def does_not_wait(call: Callable[[], object]) -> None:
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(PATIENCE_S)
    assert not caller.is_alive()


def test_a_reader_that_reads_no_more_delays_the_ranks_and_not_the_launcher() -> None:
    """As a pager does."""
    reader, writer = os.pipe()
    screen = Screen(writer, "stderr", is_shared=False)
    os.close(writer)
    text = b"x" * (1 << 20) + b"\n"
    rank = threading.Thread(target=screen.show, args=(Source(0), text), daemon=True)
    rank.start()
    assert os.read(reader, 1) == b"x"  # the pipe is being filled
    does_not_wait(lambda: screen.log("stopping"))
    does_not_wait(lambda: screen.show_status(["step 1"]))
    assert rank.is_alive()
    with os.fdopen(reader, "rb") as file:
        does_not_wait(lambda: file.read(1 << 20))
        does_not_wait(rank.join)
        does_not_wait(screen.close)
        assert file.read() == b"mpiddp: stopping\n"


def test_a_terminal_after_ctrl_s_does_not_delay_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = os.openpty()
    screen = Screen(terminal, "stdout", is_shared=True)
    termios.tcflow(terminal, termios.TCOOFF)
    does_not_wait(lambda: screen.show_status(["step 1"]))
    does_not_wait(lambda: screen.log("stopping"))
    termios.tcflow(terminal, termios.TCOON)
    does_not_wait(lambda: screen.show_status(["step 2"]))
    does_not_wait(lambda: screen.log("stopped"))
    shown = b""
    while b"stopped" not in shown:
        shown += os.read(master, 1 << 16)
    assert b"step 1" not in shown
    assert shown.index(b"stopping") < shown.index(b"stopped")
    screen.close()
    os.close(master)
    os.close(terminal)


# --- what mpirun says about the end ---

RULE = b"-" * 60 + b"\n"
SAID = RULE + b"prterun detected that one or more processes exited with non-zero status\n" + RULE


# --- the threads that copy ---


@pytest.mark.parametrize("shows_end", [False, True])
def test_the_streams_of_a_rank_and_of_mpirun_are_copied(
    shows_end: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    outputs = JobOutput("all", 2, has_prefix=True, shows_end=shows_end)
    ours = [os.dup(pipe) for pipe in outputs.pipes.values()]
    outputs.begin()
    outputs.note_failure()
    pairs = [socket.socketpair() for _ in range(3)]
    for (_, theirs), (stream, rank) in zip(pairs, [(1, 0), (2, 1), (1, 1)], strict=True):
        outputs.add(stream, rank, f"host{rank}", theirs)
    for (each, _), text in zip(pairs, [b"a\n", b"b\n", b"c"], strict=True):
        each.sendall(FRAME.pack(len(text))[:2])
        each.sendall(FRAME.pack(len(text))[2:] + text)
    os.write(ours[1], SAID)
    deadline = time.monotonic() + 60
    for number, (each, _) in enumerate(pairs[:2]):
        each.close()
        while number == 0 and outputs.open_ranks != [1] and time.monotonic() < deadline:
            time.sleep(0.01)
    pairs[2][0].close()
    while outputs.open_ranks and time.monotonic() < deadline:
        time.sleep(0.01)
    outputs.log("a sentence.", is_error=True)
    for pipe in ours:
        os.close(pipe)
    outputs.finish()
    while not outputs.is_finished(0.01) and time.monotonic() < deadline:
        pass
    assert outputs.settle(is_said=True) == (b"" if shows_end else SAID)
    seen = capfd.readouterr()
    assert sorted(seen.out.splitlines()) == ["[rank 0 host0] a", "[rank 1 host1] c"]
    assert sorted(seen.err.splitlines()) == sorted(
        ["[rank 1 host1] b", "mpiddp: a sentence.", *(SAID.decode().splitlines() * shows_end)]
    )


def test_a_connection_that_breaks_the_protocol_is_closed() -> None:
    outputs = JobOutput("all", 1)
    outputs.begin()
    ours, theirs = socket.socketpair()
    outputs.add(1, 0, "a", theirs)
    ours.sendall(FRAME.pack(LONGEST_LINE + (1 << 18)))
    ours.settimeout(60)
    assert ours.recv(1) == b""
    outputs.finish()
    assert outputs.is_finished(60)
    outputs.settle(is_said=True)


def test_a_quiet_line_that_ends_so_is_not_repeated(
    shared: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screens, "_QUIET_S", 0.0)
    source = Source(0, ZERO)
    shared.screen.show(source, b"Enter: ")
    shared.screen.show_quiet_lines()
    shared.screen.end(source)
    assert shared.seen() == ZERO + b"Enter: \n"
    assert not shared.screen.has_open_lines


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
