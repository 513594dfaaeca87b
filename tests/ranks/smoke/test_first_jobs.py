"""The first jobs of a user: a script on every slot, its exit code, a killed rank, Ctrl-C.

Tests mpiddp/launch/.
python -m pytest tests/ranks/smoke/test_first_jobs.py
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from socket import gethostname

import pytest

from tests.support.first_jobs import PRINT_IDENTITY, SLEEP, started
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import CTRL_C_AGAIN_S, ROOT, launch, own_lines, script
from tests.support.running import running

MPIS = ("openmpi5", *PACKAGES)


OTHERS = "The other ranks were stopped."


@pytest.mark.parametrize("mpi", MPIS)
def test_a_script_runs_with_its_arguments_on_every_slot(tmp_path: Path, mpi: str) -> None:
    done = launch(
        *("--mpirun", mpirun_of(mpi), "-H", "localhost:2"),
        *(script(tmp_path, PRINT_IDENTITY), "--lr", "5", "--quick"),
    )
    assert done.returncode == 0, done.stderr
    facts = sorted(json.loads(line) for line in done.stdout.splitlines())
    arguments = [["--lr", "5", "--quick"], str(ROOT)]
    assert facts == [[[0, 2, 0, 2, 0], *arguments], [[1, 2, 1, 2, 0], *arguments]]


@pytest.mark.parametrize(("code", "expected"), [(3, 1), (2, 2), (75, 75)])
def test_exit_codes(tmp_path: Path, code: int, expected: int) -> None:
    path = script(tmp_path, f"raise SystemExit({code})")
    done = launch("-H", "localhost:2", path)
    assert done.returncode == expected
    printed = {
        3: [f"mpiddp: rank N on {gethostname()} ended first, with exit code 3. {OTHERS}"],
        75: [f"mpiddp: to resume: mpiddp launch -H localhost:2 {path}"],
    }
    sentences = [re.sub("rank [01]", "rank N", line) for line in own_lines(done.stderr)]
    assert sentences == printed.get(code, [])


def test_a_killed_rank_is_named_by_its_signal(tmp_path: Path) -> None:
    text = "import os; os.kill(os.getpid(), 9)"
    done = launch("-H", "localhost:1", script(tmp_path, text))
    assert done.returncode == 1
    assert own_lines(done.stderr) == [f"mpiddp: rank 0 on {gethostname()} was killed by SIGKILL."]


@pytest.mark.parametrize(  # every MPI is interrupted in test_launch_hosts.py
    ("mpi", "how"),
    [
        ("openmpi5", "interrupted"),
        ("openmpi5", "ignores_sigterm"),
        ("mpich", "ignores_sigterm"),
    ],
)
def test_one_ctrl_c_stops_the_job_and_a_second_kills_it(tmp_path: Path, mpi: str, how: str) -> None:
    path = script(tmp_path, SLEEP)
    options = ["--mpirun", mpirun_of(mpi), "--grace", "300", "-H", "localhost:2"]
    with started([*options, path, how]) as launcher:
        launcher.send_signal(signal.SIGINT)
        if how == "ignores_sigterm":
            assert launcher.stdout is not None
            assert [launcher.stdout.readline() for _ in range(2)] == ["received\n"] * 2
            time.sleep(CTRL_C_AGAIN_S)
            launcher.send_signal(signal.SIGINT)
        start = time.monotonic()
        stderr = launcher.communicate(timeout=PATIENCE_S)[1]
    assert time.monotonic() - start < 100  # the grace period is 300 s
    assert launcher.returncode == 130
    # mpirun's own last line may lack a newline.
    assert stderr.endswith("mpiddp: interrupted: the job was stopped.\n"), stderr
    assert running(path) == []
