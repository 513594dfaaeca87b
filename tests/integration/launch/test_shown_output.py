"""What the launcher shows of its ranks' output: whole lines, whose, and in which form.

Most tests run ranks without MPI and torch, see tests/programs/light_job.py.
Tests mpiddp/launch/{output,screen}.py,
mpiddp/runtime/output.py.
python -m pytest tests/integration/launch/test_shown_output.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from mpiddp.launch.log import LONGEST_LINE, Screen, Source
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env


def run(*codes: str) -> tuple[bytes, bytes]:
    """The stdout and stderr of a job whose ranks run the codes, without the line of their exit codes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.light_job", *codes],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    *lines, codes_of_ranks = done.stderr.splitlines(keepends=True)
    assert codes_of_ranks.startswith(b"mpiddp: codes "), done.stderr
    return done.stdout, b"".join(lines)


FRAMES = """\
[rank1]: RuntimeError: the sizes differ
Exception raised from checkTimeout at /pytorch/ProcessGroupNCCL.cpp:607 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f2b0a6c51e6 in /venv/libc10.so)
frame #1: <unknown function> + 0xdc253 (0x7f2b64d94253 in /lib/libstdc++.so.6)
frame #2 is what the script prints
frame #3: clone + 0x44 (0x7f2b64d94253 in /lib/libc.so.6)
[rank1]: Exception raised from add at /pytorch/add.cpp:35 (most recent call first):
[rank1]: C++ CapturedTraceback:
[rank1]: #4 at::_ops::add_Tensor::call(at::Tensor const&) from ??:0
#5 and more from train.py:12
#6 after another line from train.py:12 and on
"""


def test_the_frames_of_an_error_of_torch_are_counted():
    """Only directly below the line that announces them."""
    _, err = run("pass", f"os.write(2, {FRAMES.encode()!r})")
    lines = FRAMES.splitlines()
    shown = [lines[0], lines[1], lines[4], lines[5], lines[6], lines[10]]
    assert err.decode().splitlines() == [
        *shown,
        "mpiddp: 5 lines of C++ were not shown. To keep them: --log-dir DIR",
    ]


def test_a_line_without_an_end_is_cut():
    code = f"os.write(1, b'x' * {LONGEST_LINE + 10}); os.write(1, b'y\\n')"
    out, _ = run(code, "pass")
    assert out.replace(b"\n", b"") == b"x" * (LONGEST_LINE + 10) + b"y"


def read_until(reader: int, end: bytes) -> bytes:
    text = b""
    while not text.endswith(end):
        chunk = os.read(reader, 65536)
        assert chunk, text
        text += chunk
    return text


def test_a_file_that_is_opened_late_has_the_first_lines(tmp_path):
    """It holds the first MiB, and what comes once it is there."""
    code = f"""
for number in range(1600):
    os.write(1, b"%999d\\n" % number)
for _ in range(2):
    current().log_to(Path({str(tmp_path)!r}))
while not Path({str(tmp_path / "rank_00000.out")!r}).exists():
    time.sleep(0.01)
print("late")
"""
    out, _ = run(code)
    text = (tmp_path / "rank_00000.out").read_bytes()
    assert out.startswith(text[: 1 << 20])
    assert text.endswith(b"late\n")


def test_a_file_that_cannot_be_written_is_named_and_loses_no_shown_line(tmp_path):
    """/dev/full is a disk without room."""
    (tmp_path / "rank_00000.out").symlink_to("/dev/full")
    code = f"""
current().log_to(Path({str(tmp_path)!r}))
print("shown")
"""
    out, err = run(code)
    shown, said = sorted(out.splitlines(), reverse=True)  # they come over two streams
    assert shown == b"shown"
    assert said.startswith(b"mpiddp: rank 0 on node1: its log of stdout has a gap: No space left")
    assert err == b""


class Terminal:
    """A screen on a terminal of its own, and what it has shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_shared: bool) -> None:
        monkeypatch.setenv("TERM", "xterm")
        self._reader, self._writer = os.openpty()
        self.screen = Screen(self._writer, "stdout", is_shared=is_shared)

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
    terminal.screen.show(first, b"\r10 %")
    assert terminal.shown() == "[0] 10 %"
    terminal.screen.show(second, b"a line\nopen")
    assert terminal.shown() == f"{ERASED}[1] a line\n[0] 10 %"
    terminal.screen.show_lines(b"a sentence\n")
    assert terminal.shown() == f"{ERASED}a sentence\n[0] 10 %"
    terminal.screen.show(first, b"\r20 %")
    assert terminal.shown() == f"{ERASED}[0] 20 %"
    terminal.screen.show(first, b"\rdone\n")
    assert terminal.shown() == f"{ERASED}[0] done\n[1] open"
    terminal.screen.end(second)
    assert terminal.shown() == f"{ERASED}[1] open\n"


def test_the_status_stays_below_whole_lines(monkeypatch):
    terminal = Terminal(monkeypatch, is_shared=False)
    source, below = Source(0), "step 7\n2 ranks"
    terminal.screen.show_status(STATUS)
    assert terminal.shown() == below
    terminal.screen.show(source, b"a\nb")  # a line that is open has the place for itself
    assert terminal.shown() == f"{UP}{ERASED}a\nb"
    terminal.screen.show_status(STATUS)
    terminal.screen.show(source, b"c\n")
    assert terminal.shown() == f"c\n{below}"
    terminal.screen.show_lines(b"a sentence\n")
    assert terminal.shown() == f"{UP}{ERASED}a sentence\n{below}"
    terminal.screen.show_status([])
    assert terminal.shown() == f"{UP}{ERASED}"
    terminal.screen.show(source, b"d\n")
    assert terminal.shown() == "d\n"


def test_a_line_of_the_launcher_ends_the_open_line_of_the_only_rank(monkeypatch):
    terminal = Terminal(monkeypatch, is_shared=False)
    source = Source(0)
    terminal.screen.show(source, b"a quest")
    terminal.screen.show_lines(b"a sentence\n")
    terminal.screen.show(source, b"ion\n")
    assert terminal.shown() == "a quest\na sentence\nion\n"
    terminal.screen.show(source, b"open")
    terminal.screen.close()
    assert terminal.shown() == "open\n"
