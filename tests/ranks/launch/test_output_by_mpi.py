"""What ranks print under each MPI and srun: lines arrive whole, a killed rank loses nothing, files hold all.

Tests mpiddp/runtime/launcher/output.py, mpiddp/launch/streams/output.py under real starters.
python -m pytest tests/ranks/launch/test_output_by_mpi.py
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import threading
from pathlib import Path

import pytest

from mpiddp.protocol.messages import OUTPUT_PROCESS
from tests.support.errors import error
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.printing import LAST_WORDS, PARTS, PRINTS, TALKS, check
from tests.support.ranks import LAUNCH, launch, script
from tests.support.stopping import piped

MPIS = ("openmpi5", *PACKAGES)
SHOWN = {"MPIDDP_LOG_RANKS": "", "MPIDDP_PREFIX": ""}  # the defaults, which other tests leave


@pytest.mark.parametrize("mpi", MPIS)
def test_lines_are_whole_and_a_killed_rank_loses_none(mpi: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    options = ["--mpirun", mpirun_of(mpi), "--log-ranks", "all", "--log-dir", str(logs)]
    where = ["-H", "localhost:3", "--prefix", "always"]
    (tmp_path / "done").mkdir()
    job = script(tmp_path, PRINTS)
    done = launch(*options, *where, job, str(tmp_path / "done"), OF_TEST=job)
    assert done.returncode == 1, done.stderr
    check(done.stdout, done.stderr, [os.uname().nodename] * 3)
    assert re.search("^mpiddp: rank 2 on .*", done.stderr, re.MULTILINE)
    for rank in range(3):
        text = (logs / f"rank_{rank:05d}.out").read_text() + (
            logs / f"rank_{rank:05d}.err"
        ).read_text()
        assert text.count(f"<{rank} ") == PARTS
        assert text.count("last words") == (LAST_WORDS if rank == 2 else 0)
    assert output_processes(job) == []


def output_processes(job: str) -> list[int]:
    """The running output processes whose environment has the variable OF_TEST=JOB. A zombie has none."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            is_output = comm.read_text() == f"{OUTPUT_PROCESS}\n"
            if is_output and f"OF_TEST={job}".encode() in (comm.parent / "environ").read_bytes():
                found.append(int(comm.parent.name))
    return found


def test_by_default_stdout_of_rank_0_and_stderr_of_all_ranks_are_shown(tmp_path: Path) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, TALKS), **SHOWN)
    assert done.returncode == 0, done.stderr
    host = os.uname().nodename
    assert done.stdout == f"[rank 0 {host}] out 0 True\n"  # Open MPI gives ranks a terminal
    shown = sorted(line for line in done.stderr.splitlines() if "err" in line)
    assert shown == [f"[rank 0 {host}] err 0", f"[rank 1 {host}] err 1"]


def test_a_training_writes_its_output_into_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = "-m mpiddp train --use-syn --backend gloo --arch resnet20 --batch-size 4 --epochs 1"
    done = launch("-H", "localhost:1", *job.split(), "--steps-per-epoch", "1", "--out", str(run))
    assert done.returncode == 0, done.stderr
    assert (run / "logs" / "rank_00000.out").read_text() == done.stdout
    assert "test accuracy" in done.stdout


# The folder of the first Checkpoints is the run's.
IN_A_RUN = """
import sys, mpiddp
world = mpiddp.init(backend="gloo")
print("early", world.rank, flush=True)
for folder in sys.argv[1:3]:
    mpiddp.Checkpoints(folder).resume()
print("late", world.rank, file=sys.stderr, flush=True)
if world.rank == 1:
    raise RuntimeError("a bug")
"""


@pytest.mark.parametrize("is_named", [False, True])
def test_a_script_writes_its_output_into_its_run(tmp_path: Path, is_named: bool) -> None:
    run, other, named = (tmp_path / name for name in ("run", "other", "named"))
    options = ["--log-dir", str(named)] if is_named else []
    job = [script(tmp_path, IN_A_RUN), str(run), str(other)]
    done = launch("-H", "localhost:2", "--log-ranks", "none", *options, *job)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    logs = named if is_named else run / "logs"
    for rank in range(2):
        assert (logs / f"rank_{rank:05d}.out").read_text() == f"early {rank}\n"
        assert f"late {rank}\n" in (logs / f"rank_{rank:05d}.err").read_text()
    assert "RuntimeError: a bug\n" in (logs / "rank_00001.err").read_text()
    assert f"RuntimeError: a bug (its traceback: {logs}/rank_00001.err)." in done.stderr
    assert (run / "logs").exists() != is_named
    assert not (other / "logs").exists()


def test_a_log_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "logs"
    done = launch("-H", "localhost:1", "--log-dir", str(folder), script(tmp_path, TALKS))
    assert done.returncode == 2
    assert done.stdout == ""
    sentence = error(":", f"--log-dir {folder}: Not a directory")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--log-ranks", "0,7"],
            error("is no rank", "--log-ranks 0,7: ", "rank 7", "ranks 0 to 1"),
        ),
        (["--log-ranks", "x"], error("expected all", "--log-ranks x: ", "0,5")),
        (["--prefix", "x"], error("--prefix", "--prefix x: ", "auto, always or never")),
    ],
)
def test_a_wrong_option_is_one_sentence(tmp_path: Path, options: list[str], sentence: str) -> None:
    done = launch("-H", "localhost:2", *options, script(tmp_path, TALKS))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


MANY = 100_000


@pytest.mark.slow
def test_of_many_lines_none_is_lost(tmp_path: Path) -> None:
    """Of 8 ranks, which wait at their end until the memory of the launcher is read."""
    seen = tmp_path / "seen"
    text = f"seq {MANY}; while [ ! -e {shlex.quote(str(seen))} ]; do sleep 0.1; done"
    options = ["-H", "localhost:8", "--log-ranks", "all", "--prefix", "always"]
    with piped([*LAUNCH, *options, "--", "sh", "-c", text]) as job:
        stop = threading.Timer(PATIENCE_S, job.kill)
        stop.start()
        assert job.stdout is not None
        lines = [0] * 8
        for line in itertools.islice(job.stdout, 8 * MANY):
            prefix, _, number = line.partition("] ")
            rank = int(prefix.split()[1])
            lines[rank] += 1
            assert int(number) == lines[rank], line
        status = Path(f"/proc/{job.pid}/status").read_text()
        seen.touch()
        rest, stderr = job.communicate(timeout=PATIENCE_S)
        stop.cancel()
    assert (job.returncode, rest) == (0, ""), stderr
    assert lines == [MANY] * 8
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    assert int(peak[1]) < 100_000


# Stops this rank's own output process, which has the rank's environment.
STOPS_ITS_OUTPUT = """
import os, signal
from pathlib import Path
job = f"MPIDDP_JOB={os.environ['MPIDDP_JOB']}".encode()
for comm in Path("/proc").glob("[0-9]*/comm"):
    try:
        is_own = job in (comm.parent / "environ").read_bytes()
        if is_own and comm.read_text() == "mpiddp-output\\n":
            os.kill(int(comm.parent.name), signal.SIGSTOP)
    except OSError:
        pass
print("never shown")
"""


def test_an_output_process_that_hangs_delays_the_end_for_seconds_only(tmp_path: Path) -> None:
    job = script(tmp_path, STOPS_ITS_OUTPUT)
    done = launch("-H", "localhost:1", job, OF_TEST=job)
    assert done.returncode == 0, done.stderr
    host = os.uname().nodename
    assert done.stderr == (
        f"mpiddp: the last output of rank 0 on {host} has not arrived; it may be missing here.\n"
    )
    assert output_processes(job) == []
