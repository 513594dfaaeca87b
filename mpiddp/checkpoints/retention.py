"""Which checkpoints of a run are removed, and which are set aside.

    prune(root, Wishes.read(run), is_good=is_verified)

A reader holds a checkpoint by a lock of its file COMPLETE, which ends with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Sequence
from pathlib import Path

from mpiddp.checkpoints import folder as folders
from mpiddp.checkpoints.folder import COMPLETE, step_of
from mpiddp.checkpoints.wishes import Wishes


def surplus(
    checkpoints: Sequence[Path],
    aside: Sequence[Path],
    wishes: Wishes,
    is_good: Callable[[Path], bool],
) -> list[Path]:
    """The checkpoints, and those set `aside`, that no wish keeps. Both come the oldest first.

    A checkpoint counts for `keep` if it `is_good`, which is asked only until enough of them are good.
    """
    spared = wishes.spared([step_of(folder) for folder in checkpoints])
    num_kept, rest = 0, []
    for folder in reversed(checkpoints):
        if num_kept < wishes.keep:
            num_kept += is_good(folder)
        elif step_of(folder) not in spared:
            rest.append(folder)
    rest += [folder for folder in aside[: -wishes.keep] if step_of(folder) not in wishes.pins]
    return rest


def prune(root: Path, wishes: Wishes, *, is_good: Callable[[Path], bool]) -> list[Path]:
    """Remove what no wish keeps, unless a reader holds it, and return what was removed."""
    aside = folders.list_steps(root, set_aside=True)
    rest = surplus(folders.list_steps(root), aside, wishes, is_good)
    return [folder for folder in rest if _remove_unless_held(folder)]


def _remove_unless_held(folder: Path) -> bool:
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):  # a broken checkpoint may lack COMPLETE
            file = opened.enter_context((folder / COMPLETE).open("r+b"))
            try:
                folders.lock(file, fcntl.LOCK_EX)
            except BlockingIOError:
                return False
        hidden = folders.hide(folder)
    folders.remove_hidden(hidden)  # after the close: over NFS, an open file would keep its folder
    return True
