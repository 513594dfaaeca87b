"""The shell of `srun --pty bash`: task 0 of its step, and the only one with a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def in_slurm_terminal(env: Mapping[str, str]) -> bool:
    """Whether Slurm's task with these variables is the shell of `srun --pty`.

    SLURM_PTY_PORT alone does not prove it: an srun in that shell passes it on to all of its tasks. Those have
    no terminal. The task is asked for it, and not this process, because a notebook's kernel has none either.
    """
    if "SLURM_PTY_PORT" not in env or env.get("SLURM_PROCID") != "0":
        return False
    return _has_terminal(env.get("SLURM_TASK_PID") or "self")


def _has_terminal(process: str) -> bool:
    try:
        stat = Path("/proc", process, "stat").read_bytes()
    except OSError:  # a container, in which the task has another pid
        return process != "self" and _has_terminal("self")
    # "pid (name) state ppid pgrp session tty_nr …". The name may contain any bytes, including parentheses.
    return stat.rpartition(b")")[2].split()[4] != b"0"
