"""`run_on_hosts` on this machine: its answers, its timeout, and that no shell interprets its arguments.

tests/promises/test_start.py tests other hosts, over a real ssh.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import NO_PROGRAM, Answer, run_on_hosts
from tests.support.patience import PATIENCE_S
from tests.support.ranks import run_program

HERE = Host("localhost")


def run_here(program: str, input: str, timeout_s: float = PATIENCE_S) -> Answer:
    return run_on_hosts([HERE], program, input, timeout_s=timeout_s)[HERE]


def test_the_answer_has_output_and_exit_code() -> None:
    program = "import os, sys\nprint(os.getcwd())\nprint('why', file=sys.stderr)\nsys.exit(3)\n"
    assert run_here(sys.executable, program) == Answer(3, "/\n", "why\n")


def test_an_input_that_is_larger_than_a_pipe() -> None:
    answer = run_here(sys.executable, f"text = {'x' * 500_000!r}\nprint(len(text), text)\n")
    assert answer == Answer(0, f"500000 {'x' * 500_000}\n", "")


FEW_FILES = """
import resource
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import run_on_hosts
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
hosts = [Host(f"127.0.0.{number}") for number in range(1, 101)]
answers = run_on_hosts(hosts, "cat", "here", timeout_s=600)
print(len(answers), {(answer.exit_code, answer.stdout) for answer in answers.values()})
"""


def test_a_hundred_hosts_with_64_open_files() -> None:
    """`ulimit -n 64`: as many hosts at a time as the limit allows."""
    done = run_program(FEW_FILES)
    assert (done.stdout, done.stderr) == ("100 {(0, 'here')}\n", "")


ONE_HANGS = """
import resource, sys
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import run_on_hosts
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
hosts = [Host(f"127.0.0.{number}") for number in range(1, 21)]
program = f"mkdir {sys.argv[1]}/first 2>/dev/null && exec sleep 1000; echo here"
answers = run_on_hosts(hosts, "sh", program, timeout_s=5.0)
print(sorted(answer.stdout for answer in answers.values()) == ["", *["here\\n"] * 19])
"""


def test_a_host_that_hangs_takes_no_time_from_later_ones(tmp_path: Path) -> None:
    done = run_program(ONE_HANGS, str(tmp_path))
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_no_shell_interprets_the_program_or_its_input(tmp_path: Path) -> None:
    for program in ("$(touch made)", "; touch made #", "`touch made`", "' ; touch made '"):
        path = program.replace("made", str(tmp_path / "made"))
        assert run_here(path, "touch made\n").exit_code == NO_PROGRAM
    folder = tmp_path / "with blank; and $HOME"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    assert run_here(str(folder / "python"), "print('$HOME')\n").stdout == "$HOME\n"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_hosts_run_in_parallel(tmp_path: Path) -> None:
    """Each of two programs waits for a file that only the other one makes."""
    hosts = [Host("localhost"), Host("127.0.0.1")]
    program = f"""
import os, time
from pathlib import Path
Path({str(tmp_path)!r}, str(os.getpid())).touch()
while len(os.listdir({str(tmp_path)!r})) < 2:
    time.sleep(0.01)
"""
    answers = run_on_hosts(hosts, sys.executable, program, timeout_s=PATIENCE_S)
    assert answers == dict.fromkeys(hosts, Answer(0, "", ""))


def test_a_program_that_times_out_is_killed_and_its_output_kept(tmp_path: Path) -> None:
    program = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)\n"
    answer = run_here(sys.executable, program, timeout_s=3.0)
    assert answer.exit_code is None
    assert not Path("/proc", answer.stdout.strip()).exists()


def test_background_processes_of_a_program_are_not_waited_for() -> None:
    """For example a connection that ssh keeps open for reuse, which keeps stderr open."""
    start = time.monotonic()
    answer = run_here("sh", "sleep 1000 >/dev/null & echo $!\n", timeout_s=100.0)
    Path("/proc", answer.stdout.strip(), "status").read_text()  # it still runs
    assert time.monotonic() - start < 50
    assert answer.exit_code == 0
    assert run_here("sh", f"kill {answer.stdout}").exit_code == 0
