"""The checkpoints that a user names by a path, or by an address in object storage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpiddp.checkpoints import folders
from mpiddp.checkpoints.folders import CHECKPOINTS, WISHES
from mpiddp.checkpoints.retention import Wishes, pinned_in, read_file
from mpiddp.errors import UserError

if TYPE_CHECKING:
    from mpiddp.checkpoints.bucket import Bucket


def is_address(path: str | os.PathLike[str]) -> bool:
    return "://" in str(path)


class Place(NamedTuple):
    """Checkpoints of a run, on a disk or in a bucket.

    Attributes:
        checkpoints: their folders on this disk, the oldest first. What a bucket has may not be there yet.
        aside: those that are set aside on this disk.
        run, bucket: the folder of their run, and its bucket, if they are there.
    """

    checkpoints: list[Path]
    aside: list[Path]
    run: Path
    bucket: Bucket | None = None

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Place:
        """Raises UserError if there are no checkpoints; OSError."""
        if not is_address(path):
            checkpoints = folders.checkpoints_at(Path(path))
            root, is_one = checkpoints[0].parent, folders.is_checkpoint(Path(path))
            aside = [] if is_one else folders.list_steps(root, set_aside=True)
            return cls(checkpoints, aside, root.parent)
        from mpiddp.checkpoints.bucket import Bucket, local_path, split_address

        address, name = split_address(path)
        bucket, run = Bucket(address), local_path(address)
        names = filter(bucket.is_whole, [name] if name else bucket.names())
        if not (checkpoints := [run / CHECKPOINTS / name for name in names]):
            raise UserError(f"{path} contains no checkpoints.")
        return cls(checkpoints, [], run, bucket)

    def wishes(self) -> Wishes:
        """Which of them the run keeps. Raises OSError."""
        if self.bucket:
            return Wishes.parse(self.bucket.read(WISHES), self.bucket.pins())
        return Wishes.parse(read_file(self.run, WISHES), pinned_in(self.run))

    def write(self, file: str, content: str) -> str:
        """Write a small file into the run's folder. Returns its path. Raises OSError."""
        if self.bucket:
            return self.bucket.write(file, content)
        path = self.run / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return str(path)

    def fetch(self, checkpoint: Path) -> Path:
        """Bring one of them to its folder, and return this. Raises OSError."""
        return self.bucket.fetch(self.run, checkpoint.name) if self.bucket else checkpoint
