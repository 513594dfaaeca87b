"""In a container, a process of Slurm itself is asked whether it may launch.

python -m pytest tests/unit/hosts/test_slurm_in_a_container.py
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT


def test_in_a_container_the_process_itself_is_asked() -> None:
    """The task may have another pid there. No process has this one: Linux counts to 2**22."""
    task = {"SLURM_PTY_PORT": "33333", "SLURM_PROCID": "0", "SLURM_TASK_PID": str(2**22 + 1)}
    text = f"import mpiddp.hosts.slurm as s; print(s.in_slurm_terminal({task}))"
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
