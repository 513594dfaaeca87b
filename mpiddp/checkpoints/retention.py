"""Which checkpoints of a run are kept: the newest, some by the user's wish, and those that are being read.

    prune(root, Retention(newest=2, every=10_000), is_good=is_verified)

A reader holds a checkpoint by a lock of its file COMPLETE, which ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mpiddp.checkpoints import folder as folders
from mpiddp.checkpoints.folder import COMPLETE, About, BrokenCheckpoint, step_of

PINNED = "PINNED"  # a file of the user, who keeps the checkpoint by it
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a mount without locks raises these


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept, besides pinned ones and the newest finite one."""

    newest: int = 2  # number of verified checkpoints, and of checkpoints that are set aside
    every: int | None = None  # steps: the first checkpoint at or after each multiple stays
    best: tuple[str, str] | None = None  # a metric, and "min" or "max" for the best finite one

    def spared(self, checkpoints: list[Path], scores: Mapping[int, float]) -> set[Path]:
        """The checkpoints that stay although newer ones are verified.

        `checkpoints`: the oldest first. `scores`: by step, the values of the metric of `best`.
        """
        spared = {folder for folder in checkpoints if (folder / PINNED).exists()}
        if self.every is not None:
            first = {step_of(folder) // self.every: folder for folder in reversed(checkpoints)}
            spared |= {folder for multiple, folder in first.items() if multiple > 0}
        if self.best is not None:
            scored = [folder for folder in checkpoints if step_of(folder) in scores]
            finite = [folder for folder in scored if not About.of(folder).not_finite]
            sign = 1 if self.best[1] == "min" else -1
            spared |= {*sorted(finite, key=lambda folder: sign * scores[step_of(folder)])[:1]}
        return spared


def prune(
    root: Path,
    keep: Retention,
    *,
    is_good: Callable[[Path], bool],
    scores: Mapping[int, float] | None = None,
) -> list[Path]:
    """Remove the checkpoints that are older than the newest good ones, and return the removed ones.

    The newest good one that is finite stays, however old it is, and so does one that a reader holds.
    """
    num_kept, has_finite = 0, False
    surplus = []
    checkpoints = folders.list_steps(root)
    spared = keep.spared(checkpoints, scores or {})
    for folder in reversed(checkpoints):
        stays, is_finite = folder in spared, not About.of(folder).not_finite
        if num_kept < keep.newest or (is_finite and not has_finite):
            good = is_good(folder)
            stays |= good or num_kept < keep.newest
            num_kept += good
            has_finite |= good and is_finite
        if not stays:
            surplus.append(folder)
    aside = folders.list_steps(root, set_aside=True)[: -keep.newest]
    surplus += [folder for folder in aside if not (folder / PINNED).exists()]
    return [folder for folder in surplus if _remove_unless_held(folder)]


def hold(folder: Path) -> BinaryIO:
    """Keep runs from removing the checkpoint until the file is closed.

    Raises BrokenCheckpoint; FileNotFoundError or BlockingIOError if its run removes it just now.
    """
    try:
        with folders.reading(folder, COMPLETE):
            file = (folder / COMPLETE).open("rb")
    except BrokenCheckpoint:
        folder.stat()
        raise
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
        with contextlib.suppress(OSError):  # a broken checkpoint may lack COMPLETE
            file = opened.enter_context((folder / COMPLETE).open("r+b"))
            try:
                _lock(file, fcntl.LOCK_EX)
            except BlockingIOError:
                return False
        hidden = folders.hide(folder)
    folders.remove_hidden(hidden)  # after the close: over NFS, an open file would keep its folder
    return True


def _lock(file: BinaryIO, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def set_aside(root: Path, step: int, chosen: Path | None = None) -> list[Path]:
    """Rename the checkpoints of later steps, so that they no longer count. Returns their new paths.

    A step has one checkpoint that is set aside: an older one is removed. `chosen` was set aside, and becomes
    the checkpoint of `step` again.
    """
    swapped = chosen and chosen.rename(chosen.with_suffix(".again"))
    moved = []
    for folder in folders.list_steps(root):
        if step_of(folder) > step or (swapped and step_of(folder) == step):
            old = folder.with_name(f"{folder.name}.old")
            if old.exists():
                folders.remove(old)
            moved.append(folder.rename(old))
    if swapped:
        swapped.rename(root / folders.name_of_step(step))
    return moved
