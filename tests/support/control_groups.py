"""A control group of the kernel, v2 or v1: a limit of memory for what a test runs.

with memory_limited(3 << 29) as enter:
    done = here.run(*enter, sys.executable, "train.py")

It needs root.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import lacking

_MOUNT = Path("/sys/fs/cgroup")
_ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'  # 0 is the process that writes


@contextmanager
def memory_limited(limit_bytes: int) -> Iterator[list[str]]:
    """The words before a command that give it, and all that it starts, so much memory and no swap.

    At the end of the block, no process may be left in the group. Without control groups, the test is skipped.
    """
    is_v2 = (_MOUNT / "cgroup.controllers").exists()
    parent = _MOUNT if is_v2 else _MOUNT / "memory"
    limits = (
        ("memory.max", "memory.swap.max")
        if is_v2
        else ("memory.limit_in_bytes", "memory.swappiness")
    )
    group = parent / f"mpiddp-test-{os.getpid()}"
    try:
        if is_v2:
            (parent / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
    except OSError as error:
        lacking(f"needs root, and a control group of memory below {parent}: {error}")
    try:
        (group / limits[0]).write_text(str(limit_bytes))
        if (group / limits[1]).exists():  # not every kernel can swap
            (group / limits[1]).write_text("0")
        yield ["sh", "-c", _ENTER, str(group)]
    finally:
        group.rmdir()
