"""Real ranks for tests, started by the mpirun in this interpreter's folder."""

import atexit
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpiddp import world
from mpiddp.hosts.allocations import SCHEDULERS
from mpiddp.world import RANK_SOURCES
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
TORCH = (*world.TORCH, "MASTER_ADDR", "MASTER_PORT")
LAUNCH = (sys.executable, "-m", "mpiddp", "launch")
# The variables of a job that runs the tests. With PYTHONUNBUFFERED, a line and its newline are two writes, and
# lines of two ranks mix.
OF_A_JOB = {
    *TORCH,
    "PYTHONUNBUFFERED",
    *(name for row in (*RANK_SOURCES, *SCHEDULERS) for name in row.proof),
}
_PATTERNS = [p for row in RANK_SOURCES for p in (*row.sets, row.of_a_rank)] + [
    row.sets for row in SCHEDULERS
]
SET_BY_A_JOB = re.compile("|".join(["MPIDDP_", *_PATTERNS]))
CTRL_C_AGAIN_S = 0.35  # after a Ctrl-C; sooner, a second would count as the same
# Most tests read the output of every rank. tests/promises/test_output.py tests the default.
ALL_OUTPUT = {"MPIDDP_LOG_RANKS": "all", "MPIDDP_PREFIX": "never"}
_SESSIONS = Path(f"/tmp/mpiddp-tests-{os.getpid()}")
atexit.register(shutil.rmtree, _SESSIONS, ignore_errors=True)


def find_mpirun() -> str:
    neighbour = Path(sys.executable).with_name("mpirun")
    path = str(neighbour) if neighbour.exists() else shutil.which("mpirun")
    assert path, "no mpirun beside this python and none on PATH: run ./run.sh test"
    return path


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without the variables of a launcher that runs the tests, plus `extra`.

    `mpiddp launch` shows the output of all ranks, as they wrote it.
    """
    env = {k: v for k, v in os.environ.items() if k not in OF_A_JOB and not SET_BY_A_JOB.match(k)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **ALL_OUTPUT, **(extra or {})}
    return env


def mpirun_command(ranks: int, *python_args: str) -> list[str]:
    """`mpirun -np RANKS python PYTHON_ARGS…`, on any number of cores."""
    command = [find_mpirun(), "--allow-run-as-root", "--bind-to", "none", "--oversubscribe"]
    # Several test processes run mpiruns at once, which disturb each other in one session folder.
    command += ["--mca", "prte_local_tmpdir_base", str(_SESSIONS)]
    return [*command, "-np", str(ranks), sys.executable, *python_args]


def run_command(
    command: Sequence[str], cwd: Path = ROOT, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with the variables `extra`, and capture its output."""
    return subprocess.run(
        command, env=clean_env(extra), cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S
    )


def script(folder: Path, text: str) -> str:
    """Write a script with this text into the folder, and return its path."""
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def own_lines(stderr: str) -> list[str]:
    """The lines of stderr without mpirun's banner about an exit code."""
    lines, in_banner = [], False
    for line in stderr.splitlines():
        if line.startswith("-" * 20):
            in_banner = not in_banner
        elif not in_banner and line.strip():
            lines.append(line)
    return lines
