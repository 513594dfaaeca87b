"""Hangs and crashes on this machine: the launcher names the rank, and prints its stacks.

Tests mpiddp/launch/supervise/.
python -m pytest tests/ranks/launch/test_hangs.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, launch, script


def test_a_rank_that_hangs_when_others_are_done(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os, time, mpiddp\n"
        "mpiddp.should_stop()\n"
        "if os.environ['RANK'] == '0': time.sleep(6000)\n",
    )
    done = launch("-H", "localhost:2", "--hang-timeout", "4", path)
    assert done.returncode == 1
    assert "mpiddp: rank 0 on" in done.stderr
    assert f'File "{path}", line 3, in <module>' in done.stderr
    assert done.stderr.endswith("mpiddp: the job hung and was stopped.\n")


# `mpiddp launch` that waits for the stacks of the ranks longer than any test takes.
WAITS_FOR_STACKS = (
    "import sys; from mpiddp import cli; from mpiddp.launch.supervise import control\n"
    f"control.STACKS_S = {10 * PATIENCE_S}; sys.exit(cli.main(sys.argv[1:]))"
)


def test_a_hang_is_reported_once_every_rank_has_sent_its_stacks(tmp_path: Path) -> None:
    """A rank that has finished sends none."""
    path = script(
        tmp_path,
        "import os, threading, mpiddp\n"
        "mpiddp.should_stop()\n"
        "if os.environ['RANK'] == '0': lock = threading.Lock(); lock.acquire(); lock.acquire()\n",
    )
    command = [sys.executable, "-c", WAITS_FOR_STACKS, "launch", "-H", "localhost:2"]
    done = subprocess.run(
        [*command, "--hang-timeout", "2", path],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1, done.stderr
    assert f'File "{path}", line 3, in <module>' in done.stderr
    assert done.stderr.endswith("mpiddp: the job hung and was stopped.\n")


def test_a_crash_in_native_code_prints_the_python_stack(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import ctypes, resource\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "ctypes.string_at(0)\n",
    )
    done = launch("-H", "localhost:1", path)
    assert done.returncode == 1
    assert "mpiddp: rank 0 on" in done.stderr
    assert "was killed by SIGSEGV." in done.stderr
    assert f'File "{path}", line 3 in <module>' in done.stderr


def test_the_verdict_names_the_log_with_the_traceback(tmp_path: Path) -> None:
    code = (
        "import sys; from mpiddp.train import train as loop\n"
        "def broken(*args, **options): raise RuntimeError('a bug')\n"
        "loop.train_step = broken\n"
        "from mpiddp.train.main import main; sys.exit(main(sys.argv[1:]))\n"
    )
    done = launch(
        *("-H", "localhost:1", script(tmp_path, code)),
        *("--use-syn", "--arch", "resnet20", "--batch-size", "4", "--out", f"{tmp_path}/run"),
    )
    log = f"{tmp_path}/run/logs/rank_00000.log"
    assert f"failed first: RuntimeError: a bug (its traceback: {log})." in done.stderr
