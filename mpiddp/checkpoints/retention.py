"""Which checkpoints of a run stay: pruned, held by a reader, or set aside."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mpiddp.checkpoints.folder import (
    COMPLETE,
    PINNED,
    list_steps,
    not_finite,
    remove,
    step_of,
    unreadable,
)

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a mount without a lock manager


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay, besides pinned ones and the newest finite one."""

    newest: int = 2  # verified ones
    every: int | None = None  # the first one at or after each so many steps
    lowest: Mapping[int, float] | None = None  # by step; the checkpoint of the lowest one stays

    def spared(self, folders: list[Path]) -> set[Path]:
        """Those that stay although they are old. `folders`: the oldest first."""
        spared, before = {each for each in folders if (each / PINNED).exists()}, 0
        for folder in folders if self.every else ():
            if self.every and step_of(folder) // self.every > before // self.every:
                spared.add(folder)
            before = step_of(folder)
        values = [
            (self.lowest[max(at)], step_of(folder), folder)
            for folder in folders
            if self.lowest and (at := [step for step in self.lowest if step <= step_of(folder)])
        ]
        return spared | {folder for *_, folder in sorted(values)[:1]}


def prune(root: Path, keep: Retention, *, is_good: Callable[[Path], bool]) -> list[Path]:
    """Remove the checkpoints that are older than the newest good ones, and return the removed ones.

    The newest good one that is finite stays, however old it is, and so does one that a reader holds.
    """
    kept, has_finite = 0, False
    removed = []
    folders = list_steps(root)
    spared = keep.spared(folders)
    for folder in reversed(folders):
        stays = folder in spared
        if kept < keep.newest or (not stays and not has_finite and not not_finite(folder)):
            good = is_good(folder)
            stays |= kept < keep.newest or good
            kept += good
            has_finite |= good and not not_finite(folder)
        if not stays and _remove_unless_held(folder):
            removed.append(folder)
    return removed


def hold(folder: Path) -> BinaryIO:
    """Keep runs from removing the checkpoint until the file is closed.

    Raises BrokenCheckpoint; FileNotFoundError or BlockingIOError if its run removes it just now.
    """
    try:
        file = (folder / COMPLETE).open("rb")
    except OSError as error:
        folder.stat()
        raise unreadable(folder, COMPLETE, error) from None
    try:
        _lock(file, fcntl.LOCK_SH)
        if (folder / COMPLETE).stat().st_ino != os.fstat(file.fileno()).st_ino:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except BaseException:
        file.close()
        raise
    return file


def _remove_unless_held(folder: Path) -> bool:
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):  # a broken checkpoint
            file = opened.enter_context((folder / COMPLETE).open("r+b"))
            try:
                _lock(file, fcntl.LOCK_EX)
            except BlockingIOError:
                return False
        remove(folder)
    return True


def _lock(file: BinaryIO, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def set_aside(root: Path, step: int) -> list[Path]:
    """Rename the checkpoints of steps after `step`, so that they no longer count. Returns the new paths."""
    moved = []
    for folder in list_steps(root):
        if step_of(folder) > step:
            names = (folder.with_name(f"{folder.name}.old-{n}") for n in itertools.count(1))
            moved.append(folder.rename(next(name for name in names if not name.exists())))
    return moved
