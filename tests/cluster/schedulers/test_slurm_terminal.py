"""Which tasks of Slurm may launch: the shell of `srun --pty`, and no task that is started in it.

tests/cluster/schedulers/test_slurm_job.py has a real one. Tests mpiddp/hosts/slurm_terminal.py.
python -m pytest tests/cluster/schedulers/test_slurm_terminal.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.errors import error
from tests.support.ranks import launch

SCRIPT = "examples/message_passing.py"


@pytest.fixture
def task_pids() -> Iterator[dict[str, str]]:
    """Two processes as slurmstepd starts tasks: one on a terminal of its own, and one without."""
    text = "echo $$; exec sleep 1017"
    on_terminal = [sys.executable, "-c", f"import pty; pty.spawn(['sh', '-c', {text!r}])"]
    with ExitStack() as stack:
        pids = {}
        for name, command in (("terminal", on_terminal), ("none", ["sh", "-c", text])):
            task = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.enter_context(task)
            stack.callback(task.kill)
            assert task.stdout is not None
            pids[name] = task.stdout.readline().strip()
        yield pids


def test_only_the_shell_of_srun_pty_may_launch(task_pids: dict[str, str]) -> None:
    """It is task 0 of a step, with a terminal. srun in that shell passes SLURM_PTY_PORT on to its tasks."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    step |= {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    shell = step | {"SLURM_PTY_PORT": "33333", "SLURM_TASK_PID": task_pids["terminal"]}
    allowed = launch("-n", "1", "--dry-run", SCRIPT, **shell)
    assert allowed.returncode == 0, allowed.stderr
    for others in (
        step,
        shell | {"SLURM_PROCID": "1"},
        shell | {"SLURM_TASK_PID": task_pids["none"]},
    ):
        refused = launch("-n", "1", "--dry-run", SCRIPT, **others)
        task = f"SLURM_PROCID={others['SLURM_PROCID']} "
        assert re.search(error("launch starts", task, "2 ranks"), refused.stderr)
        assert refused.returncode == 2
