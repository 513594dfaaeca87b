"""The processes below an agent that are not of its program. Each has an owner, and a limit.

process                              owner           its end
serves torch's stores                `StoreServer`   with the agent, whose socket it reads
the hot spare, a script's Python     `RankAttempt`   it becomes the next script, or is killed with the agent
removes the program's container      `Child`         within `child.REMOVES_S` of the program's end
of the shell that the agent has      the user        –
replaced by exec
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterable
from typing import Any


class Helpers:
    """Those of one agent, by their pids."""

    def __init__(self, of_the_user: Iterable[int] = ()) -> None:
        self.pids = {*of_the_user}

    def start(self, argv: list[str], **how: Any) -> int:
        """Start one in a session of its own. Returns its pid."""
        process = subprocess.Popen(argv, start_new_session=True, **how)
        process.returncode = 0  # this object does not wait for it, but `runtime.child.reap`
        self.pids.add(process.pid)
        return process.pid

    def have_ended(self, pids: Collection[int]) -> None:
        """Forget them: the kernel may give their pids to processes of the program."""
        self.pids.difference_update(pids)
