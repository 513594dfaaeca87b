"""What the launcher shows of its ranks' output: whole lines, whose, and in which form.

Most tests run ranks without MPI and torch, see tests/jobs/light_job.py.
Tests mpiddp/launch/{output,screen}.py,
mpiddp/runtime/output.py.
python -m pytest tests/integration/launch/test_shown_output.py
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.launch.output import without_end_message
from mpiddp.launch.screen import Screen, Source
from mpiddp.protocol.messages import LONGEST_LINE, is_shown
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

BOTH = "import sys; print('out', rank); print('err', rank, file=sys.stderr)"
# Writes lines of three parts, with pauses between them.
IN_PARTS = """
for number in range(40):
    for part in (f"<{rank} ", f"{number} ", f"{rank} {number}>\\n"):
        os.write(1 + number % 2, part.encode())
        time.sleep(0.002)
"""


def light_job(
    *codes: str, selection: str = "all", prefix: bool = False, options: tuple[str, ...] = ()
) -> list[str]:
    """The command of a job whose ranks run the codes."""
    program = [sys.executable, "-m", "tests.jobs.light_job", *options]
    return [*program, selection, "prefix" if prefix else "plain", *codes]


def run(
    *codes: str, selection: str = "all", prefix: bool = False, options: tuple[str, ...] = ()
) -> tuple[bytes, bytes]:
    """The stdout and stderr of a job whose ranks run the codes, without the line of their exit codes."""
    done = subprocess.run(
        light_job(*codes, selection=selection, prefix=prefix, options=options),
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    *lines, codes_of_ranks = done.stderr.splitlines(keepends=True)
    assert codes_of_ranks.startswith(b"mpiddp: codes "), done.stderr
    return done.stdout, b"".join(lines)


@pytest.mark.parametrize(
    ("selection", "stdout", "stderr"),
    [
        ("default", [0], [0, 1, 2, 3]),
        ("all", [0, 1, 2, 3], [0, 1, 2, 3]),
        ("none", [], []),
        ("0", [0], [0]),
        ("1,3", [1, 3], [1, 3]),
    ],
)
def test_the_ranks_of_a_selection(selection: str, stdout: list[int], stderr: list[int]) -> None:
    shown = [[rank for rank in range(4) if is_shown(selection, rank, each)] for each in (1, 2)]
    assert shown == [stdout, stderr]


def test_by_default_stdout_of_rank_0_and_stderr_of_all_ranks_are_shown() -> None:
    out, err = run(BOTH, BOTH, selection="default", prefix=True)
    assert out == b"[rank 0 node1] out 0\n"
    assert sorted(err.splitlines()) == [b"[rank 0 node1] err 0", b"[rank 1 node1] err 1"]


@pytest.mark.parametrize("options", [(), ("--terminal",)])
def test_lines_that_are_written_in_parts_arrive_whole(options: tuple[str, ...]) -> None:
    streams = run(*[IN_PARTS] * 4, prefix=True, options=options)
    for parity, stream in enumerate(streams):
        lines = stream.decode().splitlines()
        for rank in range(4):
            own = [line for line in lines if line.startswith(f"[rank {rank} ")]
            numbers = range(parity, 40, 2)
            assert own == [f"[rank {rank} node1] <{rank} {n} {rank} {n}>" for n in numbers]
        assert len(lines) == 80


def test_any_bytes_pass() -> None:
    text = b"\xff\xfe\x1b[1mbold\x1b[0m\x00\t\xe2\x82"
    out, _ = run(f"os.write(1, {text!r} + b'\\n')", "pass")
    assert out == text + b"\n"


@pytest.mark.parametrize("options", [(), ("--terminal",)])
def test_lines_of_a_megabyte_arrive_whole(options: tuple[str, ...]) -> None:
    code = "[print(str(rank) * 1_000_000, flush=True) for _ in range(5)]"
    out, _ = run(code, code, code, options=options)
    expected = [str(rank).encode() * 1_000_000 for rank in range(3) for _ in range(5)]
    assert sorted(out.splitlines()) == expected


def test_a_line_without_an_end_is_cut() -> None:
    code = f"os.write(1, b'x' * {LONGEST_LINE + 10}); os.write(1, b'y\\n')"
    out, _ = run(code, "pass")
    assert out.replace(b"\n", b"") == b"x" * (LONGEST_LINE + 10) + b"y"


@pytest.mark.parametrize("options", [(), ("--terminal",)])
def test_what_a_killed_rank_wrote_is_not_lost(options: tuple[str, ...]) -> None:
    """The line that is still open is shown as well."""
    code = """
for number in range(3000):
    os.write(1, f"line {number}\\n".encode())
os.write(1, b"open")
os.kill(os.getpid(), signal.SIGKILL)
"""
    out, _ = run(code, "pass", options=options)
    assert out == b"".join(b"line %d\n" % number for number in range(3000)) + b"open\n"


def test_a_signal_to_all_processes_of_a_rank_loses_nothing() -> None:
    """Open MPI, Hydra and batch systems signal process groups."""
    code = """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
os.setpgid(0, 0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    os.killpg(0, number)
    subprocess.run(["pkill", f"-{int(number)}", "-P", str(os.getpid())])
print("still here")
"""
    out, _ = run(code)
    assert out == b"still here\n"


def test_a_rank_that_waits_for_all_its_children_ends() -> None:
    code = """
subprocess.Popen(["true"])
try:
    while True:
        os.wait()
except ChildProcessError:
    print("no child is left")
"""
    assert run(code)[0] == b"no child is left\n"


def test_a_process_that_a_rank_leaves_behind_ends_with_it() -> None:
    """It has inherited the rank's stdout, and prints on. All lines of the rank are shown."""
    code = """
prints = "for number in $(seq 700); do echo x; sleep 1; done"
os.write(1, b"pid %d\\n" % subprocess.Popen(prints, shell=True, start_new_session=True, env={}).pid)
for number in range(5000):
    os.write(1, b"own %d\\n" % number)
"""
    lines = run(code)[0].decode().splitlines()
    (pid,) = (line.split()[1] for line in lines if line.startswith("pid "))
    assert not Path(f"/proc/{pid}").exists()
    own = [each for each in lines if each.startswith("own ")]
    assert own == [f"own {n}" for n in range(5000)]


@contextlib.contextmanager
def started(*codes: str, selection: str = "default", prefix: bool = False) -> Iterator[int]:
    """A running job. Yields the file descriptor of its stdout; its stderr is dropped."""
    reader, writer = os.pipe()
    with subprocess.Popen(
        light_job(*codes, selection=selection, prefix=prefix),
        env=clean_env(),
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.DEVNULL,
    ) as job:
        os.close(writer)
        try:
            yield reader
        finally:
            os.close(reader)
            job.wait(PATIENCE_S)
    assert job.returncode == 0


def read_until(reader: int, end: bytes) -> bytes:
    text = b""
    while not text.endswith(end):
        chunk = os.read(reader, 65536)
        assert chunk, text
        text += chunk
    return text


def waits_for(path: Path) -> str:
    return f"\nwhile not Path({str(path)!r}).exists(): time.sleep(0.01)\n"


def test_an_open_line_of_the_only_rank_is_shown_before_its_end(tmp_path: Path) -> None:
    code = f"os.write(1, b'a question: '){waits_for(tmp_path / 'go')}print('answered')"
    with started(code, BOTH, prefix=True) as reader:
        assert read_until(reader, b": ") == b"[rank 0 node1] a question: "
        (tmp_path / "go").touch()
        assert read_until(reader, b"\n") == b"answered\n"


def test_a_quiet_open_line_of_several_ranks_is_shown_and_later_whole(tmp_path: Path) -> None:
    code = f"os.write(1, b'half'){waits_for(tmp_path / 'go')}print(' and half')"
    with started(code, BOTH, selection="all", prefix=True) as reader:
        read_until(reader, b"[rank 0 node1] half\n")
        (tmp_path / "go").touch()
        read_until(reader, b"[rank 0 node1] half and half\n")


REDRAWS = """
for number in range(3):
    os.write(1, b"\\r%d of 3" % number)
    time.sleep(0.3)
os.write(1, b"\\r3 of 3\\n")
"""


def test_redraws_of_the_only_rank_pass() -> None:
    assert run(REDRAWS)[0] == b"\r0 of 3\r1 of 3\r2 of 3\r3 of 3\n"
    prefix = b"[rank 0 node1] "
    out, _ = run(REDRAWS, BOTH, selection="default", prefix=True)
    redrawn = [b"%d of 3" % number for number in range(4)]
    assert out == prefix + b"".join(b"\r" + prefix + each for each in redrawn) + b"\n"


def test_several_ranks_show_the_end_of_redraws() -> None:
    out, _ = run(REDRAWS, REDRAWS, prefix=True)
    assert sorted(out.splitlines()) == [b"[rank 0 node1] 3 of 3", b"[rank 1 node1] 3 of 3"]


def test_a_slow_reader_slows_the_rank_and_loses_nothing(tmp_path: Path) -> None:
    count = tmp_path / "count"
    code = f"""
with open({str(count)!r}, "wb", buffering=0) as file:
    for number in range(40_000):
        os.write(1, b"%d %s\\n" % (number, b"x" * 90))
        file.write(b".")
"""
    with started(code, BOTH) as reader:
        while (before := size_of(count)) == 0 or time.sleep(0.5) or size_of(count) != before:
            pass
        assert before < 20_000  # the rank waits
        text = read_until(reader, b"39999 " + b"x" * 90 + b"\n")
    assert [int(line.split()[0]) for line in text.splitlines()] == list(range(40_000))


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_the_files_hold_everything_from_the_first_line_on(tmp_path: Path) -> None:
    """Also what is not shown. A restart adds to them."""
    late = f"""
print("early", flush=True)
current().output.log_to(Path({str(tmp_path / "logs")!r}))
print("late", rank)
print("err", file=sys.stderr)
"""
    out, err = run(late, late, selection="none")
    run("pass", late, selection="none")
    assert (out, err) == (b"", b"")
    read = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert read == {
        "rank_00000.out": "early\nlate 0\n",
        "rank_00000.err": "err\n",
        "rank_00001.out": "early\nlate 1\n" * 2,
        "rank_00001.err": "err\n" * 2,
    }


def test_a_file_that_is_opened_late_says_how_much_it_lacks(tmp_path: Path) -> None:
    """It holds the first lines, and those that come once it is there."""
    code = f"""
for number in range(400):
    os.write(1, b"%999d\\n" % number)
for _ in range(2):
    current().output.log_to(Path({str(tmp_path)!r}))
while b"missing" not in Path({str(tmp_path / "rank_00000.out")!r}).read_bytes():
    time.sleep(0.01)
print("late")
"""
    out, _ = run(code)
    before, missing, after = re.split(
        rb"\nmpiddp: (\d+) bytes are missing here: they were printed before the folder was named.\n",
        (tmp_path / "rank_00000.out").read_bytes(),
    )
    assert out == before + out[len(before) : len(before) + int(missing)] + after
    assert len(before) >= 1 << 18
    assert after.endswith(b"late\n")


def test_a_file_that_cannot_be_written_is_named_and_loses_no_shown_line() -> None:
    """/dev/full is a disk without room."""
    code = """
real = os.open
os.open = lambda path, *rest: real("/dev/full", os.O_WRONLY)
current().output.log_to(Path("/tmp"))
print("shown")
"""
    out, err = run(code)
    shown, said = sorted(out.splitlines(), reverse=True)  # they come over two streams
    assert shown == b"shown"
    assert said.startswith(b"mpiddp: rank 0 on node1: its log of stdout has a gap: No space left")
    assert err == b""


def test_a_rank_that_cannot_reach_its_launcher_says_so_on_the_stream_of_its_mpi() -> None:
    code = "from mpiddp.cli import main\nmain(['run', '--', 'true'])"
    env = clean_env({"MPIDDP_CONTROL": "unix:/nowhere", "MPIDDP_CONTROL_SECRET": "ab"})
    done = subprocess.run(
        [sys.executable, "-c", SHORT_PATIENCE + code],
        env={**env, "MPIDDP_OUTPUT": "all"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    where = ("rank 0 on ", "on unix:/nowhere ")
    assert re.search(error("reach the launcher", *where), done.stderr), done.stderr


SHORT_PATIENCE = """
from mpiddp.runtime.job import connect
connect.CONNECT_TIMEOUT_S = 0.5
"""


class Terminal:
    """A screen on a terminal of its own, and what it has shown."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, is_shared: bool, columns: int = 80
    ) -> None:
        monkeypatch.setenv("TERM", "xterm")
        self._reader, self._writer = os.openpty()
        self.resize(columns)
        self.screen = Screen(self._writer, "stdout", is_shared=is_shared)

    def resize(self, columns: int) -> None:
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self._writer, termios.TIOCSWINSZ, size)

    def shown(self) -> str:
        """What it shows after the last call, without the codes that cut a line at the margin."""
        os.write(self._writer, b"\0")  # what was written before comes first
        text = read_until(self._reader, b"\0").decode().rstrip("\0").replace("\r\n", "\n")
        return re.sub(r"\x1b\[\?7[lh]|\x1b\[0m", "", text)


ERASED, UP = "\r\x1b[J", "\x1b[1A"
STATUS = ["step 7", "2 ranks"]


def test_on_a_terminal_open_lines_stay_below_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, is_shared=True)
    first, second = Source(0, b"[0] "), Source(1, b"[1] ")
    terminal.screen.show(first, b"\r10 %")
    assert terminal.shown() == "[0] 10 %"
    terminal.screen.show(second, b"a line\nopen")
    assert terminal.shown() == f"{ERASED}[1] a line\n[0] 10 %"
    terminal.screen.log("a sentence")
    assert terminal.shown() == f"{ERASED}mpiddp: a sentence\n[0] 10 %"
    terminal.screen.show(first, b"\r20 %")
    assert terminal.shown() == f"{ERASED}[0] 20 %"
    terminal.screen.show(first, b"\rdone\n")
    assert terminal.shown() == f"{ERASED}[0] done\n[1] open"
    terminal.screen.end(second)
    assert terminal.shown() == f"{ERASED}[1] open\n"


def test_the_status_stays_below_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, is_shared=False, columns=7)
    source, below = Source(0), "step 7\n2 rank"
    terminal.screen.show_status(STATUS)
    assert terminal.shown() == below
    terminal.screen.show(source, b"a\nb")  # a line that is open has the place for itself
    assert terminal.shown() == f"{UP}{ERASED}a\nb"
    terminal.screen.show_status(STATUS)
    terminal.screen.show(source, b"c\n")
    assert terminal.shown() == f"c\n{below}"
    terminal.screen.log("a sentence")
    assert terminal.shown() == f"{UP}{ERASED}mpiddp: a sentence\n{below}"
    terminal.screen.show_status([])
    assert terminal.shown() == f"{UP}{ERASED}"
    terminal.screen.show(source, b"d\n")
    assert terminal.shown() == "d\n"


def test_the_status_stands_below_the_open_line_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal(monkeypatch, is_shared=True)
    terminal.screen.show(Source(0, b"[0] "), b"\r10 %")
    terminal.screen.show_status(STATUS)
    assert terminal.shown() == f"[0] 10 %{ERASED}[0] 10 %\nstep 7\n2 ranks"
    terminal.screen.close()
    assert terminal.shown().endswith(f"\x1b[2A{ERASED}[0] 10 %")


def test_a_narrower_terminal_has_wrapped_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, is_shared=False, columns=20)
    terminal.screen.show_status(["12345678", "1234"])
    terminal.resize(4)
    terminal.shown()
    terminal.screen.show_status(STATUS)
    assert terminal.shown() == f"\x1b[2A{ERASED}ste\n2 r"


def test_what_a_shell_has_written_after_ctrl_z_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, is_shared=False)
    terminal.screen.show_status(STATUS)
    terminal.shown()
    now = time.monotonic()
    monkeypatch.setattr("mpiddp.launch.screen.time.monotonic", lambda: now + 5)
    terminal.screen.show_status(STATUS)
    assert terminal.shown() == "\rstep 7\n2 ranks"


def test_only_a_terminal_has_a_status() -> None:
    reader, writer = os.pipe()
    screen = Screen(writer, "stdout", is_shared=False)
    assert screen.columns == 0
    screen.show_status(STATUS)
    screen.show(Source(0), b"a\n")
    assert os.read(reader, 100) == b"a\n"


def test_a_line_of_the_launcher_ends_the_open_line_of_the_only_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal(monkeypatch, is_shared=False)
    source = Source(0)
    terminal.screen.show(source, b"a quest")
    terminal.screen.log("a sentence")
    terminal.screen.show(source, b"ion\n")
    assert terminal.shown() == "a quest\nmpiddp: a sentence\nion\n"
    terminal.screen.show(source, b"open")
    terminal.screen.close()
    assert terminal.shown() == "open\n"


def test_many_threads_write_whole_lines() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, True)
    shared = Screen(writer, "stdout", is_shared=True)
    os.close(writer)
    line = b"x" * 5000 + b"\n"

    def write(number: int) -> None:
        source = Source(number)
        for _ in range(50):
            shared.show(source, line[:100])
            shared.show(source, line[100:])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    text = b""
    while len(text) < 200 * len(line):
        text += os.read(reader, 65536)
    for thread in threads:
        thread.join()
    assert text == line * 200
    os.close(reader)


TORCH_PREFIX = """
own = "[rank%d]:" % rank
os.write(2, f"{own} Traceback\\n{own}   File\\n[rank7]: another\\n{own}[W121] c\\n".encode())
"""


@pytest.mark.parametrize("count", [1, 2])
def test_torchs_own_prefix_is_not_shown_beside_ours(count: int) -> None:
    _, stderr = run(*[TORCH_PREFIX] * count, prefix=True)
    for rank in range(count):
        own = f"[rank {rank} node1] ".encode()
        lines = [line.removeprefix(own) for line in stderr.splitlines() if line.startswith(own)]
        assert lines == [b"Traceback", b"  File", b"[rank7]: another", b"[W121] c"]


def test_torchs_own_prefix_is_shown_where_ours_is_not() -> None:
    assert b"[rank0]: Traceback\n" in run(TORCH_PREFIX, prefix=False)[1]


# --- what mpirun says about the end ---

RULE, DOUBLE = b"-" * 74 + b"\n", b"=" * 83 + b"\n"
WARNING = RULE + b"WARNING: no such component\n" + RULE
OPEN_MPI_5 = (
    RULE
    + b"prterun detected that one or more processes exited with non-zero status,\nthus\n"
    + RULE
)
OPEN_MPI_4 = (
    RULE
    + b"Primary job  terminated normally, but 1 process returned\na non-zero exit code.\n"
    + RULE
)
HYDRA = (
    b"\n" + DOUBLE + b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n" + DOUBLE
    + b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    + b"This typically refers to a problem with your application.\n"
    + b"Please see the FAQ page for debugging suggestions\n"
)  # fmt: skip


@pytest.mark.parametrize("end", [OPEN_MPI_5, OPEN_MPI_4, OPEN_MPI_4 + OPEN_MPI_5, HYDRA])
def test_only_the_message_about_the_end_is_left_out(end: bytes) -> None:
    before, after = b"text\n" + WARNING + b"- no rule\n\nmore\n", b"a later line\nand a last one"
    shown = without_end_message(before + end + after)
    assert shown.splitlines() in (
        (before + after).splitlines(),
        (before + b"\n" + after).splitlines(),
    )


@pytest.mark.parametrize(
    "text", [b"no newline", b"-", RULE + b"one rule", b"\n", WARNING, RULE * 3]
)
def test_other_text_of_mpirun_is_shown(text: bytes) -> None:
    assert without_end_message(text) == text
