"""In a container, a process of Slurm itself is asked whether it may launch.

python -m pytest tests/unit/hosts/test_slurm_in_a_container.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from mpiddp.hosts.allocations import in_slurm_terminal
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT


def test_in_a_container_the_process_itself_is_asked() -> None:
    """The task may have another pid there. No process has this one: Linux counts to 2**22."""
    task = {"SLURM_PTY_PORT": "33333", "SLURM_PROCID": "0", "SLURM_TASK_PID": str(2**22 + 1)}
    text = f"import mpiddp.hosts.allocations as s; print(s.in_slurm_terminal({task}))"
    without = [sys.executable, "-c", text]
    on_terminal = [sys.executable, "-c", f"import pty; pty.spawn({without})"]
    for command, answer in ((on_terminal, "True"), (without, "False")):
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=PATIENCE_S,
        )
        assert done.stdout.strip() == answer, done.stderr


def test_only_task_0_of_a_step_with_a_terminal_may_launch() -> None:
    """setsid gives the task a terminal of its own."""
    ours, theirs = os.openpty()
    task = subprocess.Popen(["setsid", "--ctty", "sleep", "600"], stdin=theirs)
    try:
        deadline = time.monotonic() + PATIENCE_S
        env = {"SLURM_PTY_PORT": "33333", "SLURM_PROCID": "0", "SLURM_TASK_PID": str(task.pid)}
        while not in_slurm_terminal(env):
            assert time.monotonic() < deadline
        assert not in_slurm_terminal(env | {"SLURM_PROCID": "1"})
        assert not in_slurm_terminal({name: env[name] for name in env if "PTY" not in name})
    finally:
        task.kill()
        task.wait(PATIENCE_S)
        os.close(ours)
        os.close(theirs)
