"""A rank's process that ends, or becomes another program, without a word to us: as under torchrun.

A process that ended with code 0 is no failure by itself. It is named if the others then fail or hang.

Tests mpiddp/runtime/job/session.py, mpiddp/launch/supervise/.
python -m pytest tests/ranks/launch/test_silent_ends.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from tests.support.mpis import mpirun_of
from tests.support.ranks import launch, script, torchrun

MPIS = ("openmpi5", "openmpi4", "mpich", "intelmpi")
BARE = "import os; os._exit(0)"
INIT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {os.environ['RANK']} sees {int(total)}\\n", end="", flush=True)
"""
AFTER_A_GROUP = f"{INIT}\nos._exit(0)\n"
BOTH = ["rank 0 sees 2", "rank 1 sees 2"]
ONE_EARLY = """
import os, sys, time
if os.environ["RANK"] == sys.argv[1]:
    os._exit(0)
time.sleep(5)  # longer than it takes the launcher to end a failed job
print("went on\\n", end="", flush=True)
"""


def seen(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if " sees " in line or line == "went on")


@pytest.fixture(scope="module")
def torchrun_sees(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """What a job under torchrun shows that ends with code 0. Each job runs once, for all MPIs."""

    @cache
    def run(text: str, *arguments: str) -> list[str]:
        theirs = torchrun(2, script(tmp_path_factory.mktemp("torchrun"), text), *arguments)
        assert theirs.returncode == 0, theirs.stderr
        return seen(theirs.stdout)

    return run


def by(mpi: str, *arguments: str) -> tuple[str, ...]:
    return ("--mpirun", mpirun_of(mpi), "-H", "localhost:2", *arguments)


# --- os._exit(0) ---


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("text", [BARE, AFTER_A_GROUP], ids=["bare", "after a group"])
def test_ranks_that_all_end_by_os_exit_0_are_a_success(
    tmp_path: Path, torchrun_sees: Callable[..., list[str]], text: str, mpi: str
) -> None:
    ours = launch(*by(mpi, script(tmp_path, text)))
    assert (ours.returncode, seen(ours.stdout)) == (0, torchrun_sees(text)), ours.stderr
    assert "mpiddp: " not in ours.stderr


@pytest.mark.parametrize("early", ["0", "1"])
def test_the_others_go_on_after_one_has_ended_by_os_exit_0(tmp_path: Path, early: str) -> None:
    job = script(tmp_path, ONE_EARLY)
    theirs = torchrun(2, job, early)
    ours = launch("-H", "localhost:2", job, early)
    assert (theirs.returncode, seen(theirs.stdout)) == (0, ["went on"])
    assert (ours.returncode, seen(ours.stdout)) == (0, ["went on"]), ours.stderr


FAILS_LATER = """
import os, time
import mpiddp
with mpiddp.process_group(backend="gloo"):
    if os.environ["RANK"] == "1":
        os._exit(0)
    time.sleep(5)  # longer than it takes the launcher to end a failed job
    print("went on\\n", end="", flush=True)
    raise RuntimeError("the other one is missing")
"""
HANGS_LATER = """
import os, time
import mpiddp
with mpiddp.process_group(backend="gloo"):
    mpiddp.should_stop()
    if os.environ["RANK"] == "1":
        os._exit(0)
    for _ in range(10):
        time.sleep(0.5)
        mpiddp.should_stop()
    print("went on\\n", end="", flush=True)
    time.sleep(10_000)
"""
CAUSE = r"^mpiddp: rank 1 on \S+ .*(?:ended|exited)"


@pytest.mark.parametrize(
    ("text", "options"),
    [(FAILS_LATER, ()), (HANGS_LATER, ("--hang-timeout", "3"))],
    ids=["fails", "hangs"],
)
def test_a_silent_end_is_the_cause_if_the_others_then_fail_or_hang(
    tmp_path: Path, text: str, options: tuple[str, ...]
) -> None:
    done = launch(*options, "-H", "localhost:2", script(tmp_path, text))
    assert done.returncode == 1, done.stderr
    assert seen(done.stdout) == ["went on"], done.stderr
    (verdict,) = re.findall(CAUSE + ".*$", done.stderr, re.MULTILINE)
    assert "killed" not in verdict  # its code was 0


SAVES_LAST = """
import os, sys
import torch, torch.distributed as dist
import mpiddp
dist.init_process_group("gloo")
checkpoints = mpiddp.Checkpoints(sys.argv[1])
checkpoints.resume()
checkpoints.save(1, {"weight": torch.zeros(30_000_000)})
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "os.execv('/bin/true', ['true'])"])
def test_a_save_under_way_is_completed_first(tmp_path: Path, end: str) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, SAVES_LAST + end), str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    directory.verify(tmp_path / "run/checkpoints/step_00000001")


IN_A_COLLECTIVE = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    if step == 3 and os.environ["RANK"] == "1":
        os._exit(0)
    dist.all_reduce(torch.ones(1))
"""


def test_a_silent_end_is_the_cause_if_a_collective_fails_by_it(tmp_path: Path) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, IN_A_COLLECTIVE))
    assert done.returncode == 1
    assert re.findall(CAUSE, done.stderr, re.MULTILINE), done.stderr


CATCHES = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    if step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        sys.exit(1)
"""


@pytest.mark.parametrize("mpi", ["openmpi5", "mpich"])  # MPICH does not tell of signals
def test_a_killed_rank_is_the_cause_if_the_others_catch_the_error_and_leave(
    tmp_path: Path, mpi: str
) -> None:
    options = ("--mpirun", mpirun_of(mpi), "-H", "localhost:3")
    done = launch(*options, script(tmp_path, CATCHES))
    assert done.returncode == 1
    verdict = r"^mpiddp: rank 1 on \S+ (was killed by SIGKILL|ended first, without an error)"
    assert re.findall(verdict, done.stderr, re.MULTILINE), done.stderr


# --- os.execv ---

START_AGAIN = f"""
import os, sys, time
if "STARTED_AGAIN" not in os.environ and os.environ["RANK"] in sys.argv[1]:
    os.environ["STARTED_AGAIN"] = "1"
    os.execve(sys.executable, [sys.executable, *sys.argv], env=os.environ)
if os.environ["RANK"] == "0":
    open(sys.argv[2], "w").close()
while not os.path.exists(sys.argv[2]):  # a group of the others would begin at rank 0's earlier store
    time.sleep(0.01)
{INIT}
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", ["01", "0"])
def test_a_rank_that_starts_itself_again_joins_again(tmp_path: Path, ranks: str) -> None:
    job = script(tmp_path, START_AGAIN)
    theirs = torchrun(2, job, ranks, str(tmp_path / "theirs"))
    ours = launch("-H", "localhost:2", job, ranks, str(tmp_path / "ours"))
    assert theirs.returncode == 0, theirs.stderr
    assert (ours.returncode, seen(ours.stdout)) == (0, BOTH), ours.stderr
    assert "mpiddp: " not in ours.stderr


FAILS_AFTER_EXEC = """
import os, sys
if "STARTED_AGAIN" not in os.environ:
    os.environ["STARTED_AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
if os.environ["RANK"] == "1":
    sys.exit(3)
"""


def test_a_rank_that_fails_after_exec_is_named_with_its_code(tmp_path: Path) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, FAILS_AFTER_EXEC))
    assert done.returncode == 1
    assert "as another program (os.exec). Then " in done.stderr
    assert re.search(r"exit code 3|Exit code: +3", done.stderr), done.stderr


# --- os.closerange ---

CLOSES_ALL = f"""
{INIT}
dist.destroy_process_group()
os.closerange(int(sys.argv[1]), 1_000_000)
if sys.argv[2] == "becomes another program":
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1)"])
if sys.argv[2] == "forks" and os.fork() == 0:
    time.sleep(1)
    os._exit(0)
"""
# MPICH's library sends mpirun a last message as the process ends, and says that it cannot.
OF_MPICH = "system msg for write_line failure : Bad file descriptor"


@pytest.mark.parametrize(
    ("mpi", "first", "then"),
    [
        *((mpi, "3", "ends") for mpi in MPIS),
        ("mpich", "0", "ends"),
        ("openmpi5", "3", "becomes another program"),
        ("mpich", "3", "becomes another program"),
        ("openmpi5", "3", "forks"),
    ],
)
def test_a_script_may_close_all_files_at_its_end(
    tmp_path: Path, torchrun_sees: Callable[..., list[str]], mpi: str, first: str, then: str
) -> None:
    torchrun_sees(CLOSES_ALL, first, then)
    ours = launch(*by(mpi, script(tmp_path, CLOSES_ALL), first, then))
    assert (ours.returncode, seen(ours.stdout)) == (0, BOTH), ours.stderr
    assert "Bad file descriptor" not in ours.stderr.replace(OF_MPICH, "")
    assert "mpiddp: " not in ours.stderr


CLOSES_EARLY = """
import os, signal, sys, mpiddp
mpiddp.progress(1)
os.closerange(3, 1_000_000)
paths = [f"{sys.argv[1]}/{number}.txt" for number in range(60)]
files = [open(path, "w") for path in paths]
mpiddp.should_stop()
mpiddp.announce(max_ranks=1)  # a message
os.kill(os.getpid(), signal.SIGURG)  # as the launcher does for a stack
print(sum(os.path.getsize(path) for path in paths), flush=True)
"""


def test_no_stack_is_written_into_a_file_of_the_script(tmp_path: Path) -> None:
    """Which has the number of the connection that the script has closed."""
    done = launch("-H", "localhost:1", script(tmp_path, CLOSES_EARLY), str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


# --- what the other ranks print ---


def test_the_end_of_rank_0_makes_the_others_print_no_frames(tmp_path: Path) -> None:
    done = launch("-H", "localhost:3", script(tmp_path, ONE_EARLY), "0")
    assert "frame #" not in done.stderr
    assert "TCPStore" not in done.stderr
