"""What many sources write on one terminal, file or pipe, and what waits for the verdict."""

import fcntl
import os
import re
import struct
import termios
import threading
from pathlib import Path

import pytest

from mpiddp.launch import log
from mpiddp.launch.log import Screen, Source


def test_a_sentence_reaches_a_pipe_that_another_program_has_made_non_blocking():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, b"." * fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 16))
    thread = threading.Thread(target=log.write_all, args=(writer, b"rank 3 failed first\n"))
    thread.start()
    read_until(reader, b"first\n")
    thread.join(60)
    for file in (reader, writer):
        os.close(file)


def read_until(reader: int, end: bytes) -> bytes:
    text = b""
    while not text.endswith(end):
        chunk = os.read(reader, 65536)
        assert chunk, text
        text += chunk
    return text


class Terminal:
    """A screen on a terminal of its own, and what it has shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_shared: bool) -> None:
        monkeypatch.setenv("TERM", "xterm")
        self._reader, self._writer = os.openpty()
        self.screen = Screen(self._writer, "stdout", is_shared=is_shared)

    def after(self, source: Source, text: bytes) -> str:
        """What it shows once the source has written this."""
        self.screen.show(source, text)
        return self.shown()

    def shown(self) -> str:
        """What it shows after the last call, without the codes that cut a line at the margin."""
        os.write(self._writer, b"\0")  # what was written before comes first
        text = read_until(self._reader, b"\0").decode().rstrip("\0").replace("\r\n", "\n")
        return re.sub(r"\x1b\[\?7[lh]|\x1b\[0m", "", text)


ERASED, UP = "\r\x1b[J", "\x1b[1A"
STATUS = ["step 7", "2 ranks"]


def test_on_a_terminal_open_lines_stay_below_the_others(monkeypatch):
    terminal = Terminal(monkeypatch, is_shared=True)
    first, second = Source(0, b"[0] "), Source(1, b"[1] ")
    assert terminal.after(first, b"\r10 %") == "[0] 10 %"
    assert terminal.after(second, b"a line\nopen") == f"{ERASED}[1] a line\n[0] 10 %"
    terminal.screen.show_lines(b"a sentence\n")
    assert terminal.shown() == f"{ERASED}a sentence\n[0] 10 %"
    assert terminal.after(first, b"\r20 %") == f"{ERASED}[0] 20 %"
    assert terminal.after(first, b"\rdone\n") == f"{ERASED}[0] done\n[1] open"
    terminal.screen.end(second)
    assert terminal.shown() == f"{ERASED}[1] open\n"


def test_a_line_that_grows_costs_its_length_and_shows_its_end(monkeypatch):
    terminal = Terminal(monkeypatch, is_shared=True)
    fcntl.ioctl(terminal.screen.file, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    source = Source(0, b"[0] ")
    drawn = 0
    for number in range(1000):
        terminal.screen.show(source, b"%d" % (number % 10))
        drawn += len(shown := terminal.shown())
        if number == 30:
            assert shown == "0"  # the rest is there
    assert shown == f"{ERASED}[0] " + ("0123456789" * 4)[-35:]
    assert drawn < 1000 * 45
    assert terminal.after(source, b"\n") == f"{ERASED}[0] {'0123456789' * 100}\n"


def test_a_pipe_takes_large_pieces_and_stays_blocking_for_the_shell():
    reader, writer = os.pipe()
    screen = Screen(writer, "stdout", is_shared=True)
    lines = b"x" * 999 + b"\n"
    screen.show(Source(0), lines * 40)
    assert (os.get_blocking(writer), os.get_blocking(screen.file)) == (True, False)
    assert os.read(reader, 1 << 20) == lines * 40
    screen.close()
    for file in (reader, writer):
        os.close(file)


def test_bars_of_several_lines_leave_the_lines_of_others_alone(monkeypatch):
    """Those of tqdm and rich: they go up to their other lines, and erase the whole line that they are in."""
    terminal = Terminal(monkeypatch, is_shared=True)
    source = Source(0, b"[0] ")
    assert terminal.after(source, b"\router 0\n\rinner 1\x1b[A") == "[0] outer 0\n[0] inner 1"
    assert terminal.after(source, b"\n\rinner 2\x1b[A") == f"{ERASED}[0] inner 2"
    assert terminal.after(source, b"\r\x1b[2Krich") == f"{ERASED}[0] \x1b[Krich"
    lines = b"\r\x1b[1A\x1b[1Aone\ntwo\nthree"
    shown = f"{ERASED}[0] \x1b[1A\x1b[1Aone\n[0] two\n[0] three"
    assert terminal.after(source, lines) == shown
    assert terminal.after(Source(1, b"[1] "), b"an error\n") == f"{ERASED}[1] an error\n[0] three"
    assert terminal.after(source, lines) == f"{ERASED}[0] one\n[0] two\n[0] three"


def test_a_terminal_that_has_hung_up_is_a_reader_that_has_gone(monkeypatch):
    """As a closed pipe is: the job has not failed. A full disk is another thing."""
    terminal = Terminal(monkeypatch, is_shared=False)
    os.close(terminal._reader)
    terminal.screen.show_lines(b"a sentence\n")
    assert not terminal.screen.has_failed
    with Path("/dev/full").open("wb") as full:
        screen = Screen(full.fileno(), "stdout", is_shared=False)
        screen.show_lines(b"a sentence\n")
        assert screen.has_failed


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_killed_script_leaves_the_terminal_as_it_was(monkeypatch, is_shared):
    terminal = Terminal(monkeypatch, is_shared=is_shared)
    source = Source(0)
    terminal.screen.show(source, b"\x1b[?25l\x1b[?2004h\x1b[?2004l\x1b[?1049hstep 1\n")
    terminal.shown()
    terminal.screen.end(source)
    terminal.screen.close()
    assert terminal.shown() == f"\x1b[?25h{ERASED}\x1b[?1049l{ERASED}"


def test_the_status_stays_below_whole_lines(monkeypatch):
    terminal = Terminal(monkeypatch, is_shared=False)
    source, below = Source(0), "step 7\n2 ranks"
    terminal.screen.show_status(STATUS)
    assert terminal.shown() == below
    # A line that is open has the place for itself.
    assert terminal.after(source, b"a\nb") == f"{UP}{ERASED}a\nb"
    terminal.screen.show_status(STATUS)
    assert terminal.after(source, b"c\n") == f"c\n{below}"
    terminal.screen.show_lines(b"a sentence\n")
    assert terminal.shown() == f"{UP}{ERASED}a sentence\n{below}"
    terminal.screen.show_status([])
    assert terminal.shown() == f"{UP}{ERASED}"
    assert terminal.after(source, b"d\n") == "d\n"
