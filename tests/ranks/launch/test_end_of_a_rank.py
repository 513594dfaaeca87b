"""Exit code 0 means that every rank ended well: its threads and its handlers of atexit too.

Tests mpiddp/runtime/job/session.py, mpiddp/launch/supervise/attempt.py.
python -m pytest tests/ranks/launch/test_end_of_a_rank.py
"""

from __future__ import annotations

from pathlib import Path
from socket import gethostname

import pytest

from tests.support.mpis import mpirun_of
from tests.support.ranks import launch, script

# What rank 1 does after the end of its main part.
ENDS = """
import atexit, ctypes, os, sys, threading, time

def late():
    time.sleep(0.5)
    how = sys.argv[1]
    if how == "killed":
        os.kill(os.getpid(), 9)
    if how == "exits":
        os._exit(3)
    if how == "crashes":
        ctypes.string_at(0)
    if how == "raises":
        raise RuntimeError("in a thread")

if os.environ["RANK"] == "1":
    if sys.argv[1] == "exits in atexit":
        atexit.register(os._exit, 3)
    elif sys.argv[1] == "raises in atexit":
        atexit.register(lambda: 1 / 0)
    elif sys.argv[1] == "crashes in a destructor":
        libc = ctypes.CDLL("libc.so.6")
        libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
    else:
        threading.Thread(target=late).start()
"""


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("killed", "was killed by SIGKILL"),
        ("exits", "ended first, with exit code 3"),
        ("crashes", "was killed by SIGSEGV"),
        ("exits in atexit", "ended first, with exit code 3"),
    ],
)
def test_a_rank_that_dies_after_its_main_part_is_a_failure(
    tmp_path: Path, how: str, sentence: str
) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, ENDS), how)
    assert done.returncode == 1, done.stderr
    assert f"mpiddp: rank 1 on {gethostname()} {sentence}." in done.stderr


@pytest.mark.parametrize("how", ["raises", "raises in atexit"])
def test_an_error_in_a_thread_or_in_atexit_exits_0_as_under_python(
    tmp_path: Path, how: str
) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, ENDS), how)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4", "mpich", "intelmpi"])
def test_a_crash_in_a_destructor_is_named(tmp_path: Path, mpi: str) -> None:
    """Under every MPI: the agent sees the signal itself."""
    options = ["--mpirun", mpirun_of(mpi), "-H", "localhost:2"]
    done = launch(*options, script(tmp_path, ENDS), "crashes in a destructor")
    assert done.returncode == 1, done.stderr
    assert f"mpiddp: rank 1 on {gethostname()} was killed by SIG" in done.stderr


RECORDED = """
import os, sys, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise RuntimeError("a bug of rank 1")
    time.sleep(1000)

try:
    main()
except RuntimeError:
    if sys.argv[1] == "os._exit":
        os._exit(3)
    sys.exit(3)
"""


@pytest.mark.parametrize("end", ["os._exit", "sys.exit"])
def test_the_error_that_record_wrote_is_in_the_verdict(tmp_path: Path, end: str) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, RECORDED), end)
    assert done.returncode == 1
    (verdict,) = [line for line in done.stderr.splitlines() if line.startswith("mpiddp: rank 1")]
    assert "RuntimeError: a bug of rank 1" in verdict
