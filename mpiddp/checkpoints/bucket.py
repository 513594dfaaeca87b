"""A run in object storage: s3://, gs:// or any other address of fsspec. It is one more copy of the folder.

    bucket = Bucket("s3://models/runs/a")
    bucket.update(run, wishes)             # after each save: copies what is newer, removes what no wish keeps
    bucket.fetch(run, "step_00001000")     # for a resume or a reader: brings this checkpoint

A run writes its folder on a local disk, and copies it to the bucket, because objects can neither be renamed
nor locked, and a resume maps its tensors from verified files. This module alone knows fsspec.

A checkpoint in the bucket is whole if it has COMPLETE, which is copied last and removed first. What a bucket
lacks says nothing about the disk: it may have been away. So nothing local is ever removed for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mpiddp.checkpoints import folders
from mpiddp.checkpoints.folders import (
    CHECKPOINTS,
    COMPLETE,
    PINS,
    RECORDS,
    REWIND,
    BrokenCheckpoint,
    RunDir,
    step_of,
)
from mpiddp.checkpoints.retention import Wishes, remove_unless_held, surplus
from mpiddp.errors import UserError

ASIDE = "ASIDE"  # COMPLETE is named so in a checkpoint that is set aside


def split_address(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The address of the run, and the name of the checkpoint, or "", of an address that a user names."""
    run, found, name = (path := str(path).rstrip("/")).rpartition(f"/{CHECKPOINTS}")
    return (run, name[1:]) if found and (not name or name.startswith("/step_")) else (path, "")


def local_path(address: str | os.PathLike[str]) -> Path:
    """The folder of this user that has the local copy of a run at this address."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "mpiddp", quote(str(address).rstrip("/"), safe=""))


class Bucket:
    """A run's folder in object storage."""

    def __init__(self, address: str) -> None:
        """Raises UserError if the packages for such an address are missing."""
        if address.startswith("file:"):
            raise UserError(f"{address}: a run on a disk has a path, such as runs/a.")
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UserError(f"{address} needs fsspec.", fix="pip install s3fs, or gcsfs") from None
        try:
            files, self._root = url_to_fs(address.rstrip("/"), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UserError(f"{address}: {error}.") from None
        self.address, self._files = address, _Files(files, address)

    def names(self) -> list[str]:
        """The names of the checkpoints, whole or not, the oldest first. Raises OSError."""
        paths = map(Path, self._list(CHECKPOINTS, kind="directory"))
        return [path.name for path in folders.steps_among(paths)]

    def is_whole(self, name: str) -> bool:
        return bool(self.read(CHECKPOINTS, name, COMPLETE))

    def size_of(self, name: str) -> int:
        """The bytes of a checkpoint. Raises OSError."""
        return int(self._files.du(self._at(CHECKPOINTS, name)))

    def fetch(self, run: Path, name: str) -> Path:
        """The local folder of a checkpoint, which is downloaded if it is not there. Raises OSError."""
        local = run / CHECKPOINTS / name
        local.parent.mkdir(parents=True, exist_ok=True)
        with (local.parent / ".fetching").open(
            "ab"
        ) as one_by_one:  # the ranks of a host, or of a shared home
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(one_by_one, fcntl.LOCK_EX)
            if self._has(local) and folders.is_verified(local) and _is_whole(local):
                return local
            # Beside the run, as in an evaluator, each one would stay for ever.
            for old in folders.list_steps(local.parent) if not RunDir(run).owner.exists() else ():
                if self._has(old):
                    remove_unless_held(old)
            new = folders.NewFolder(local)
            new.path.mkdir()
            try:
                for file in self._list(CHECKPOINTS, name):
                    self._files.get_file(self._at(CHECKPOINTS, name, file), str(new.path / file))
                new.publish()
            finally:
                new.discard()
        return local

    def fetch_records(self, run: Path) -> None:
        """Bring the small files of the run's folder. Raises OSError."""
        run.mkdir(parents=True, exist_ok=True)
        for file in {*RECORDS} & {*self._list()}:
            self._files.get_file(self._at(file), str(run / file))

    def update(self, run: Path, wishes: Wishes, *, whole: Path | None = None) -> None:
        """Copy the checkpoints that are newer than those of the bucket, and remove there what no wish keeps.

        `whole`: a checkpoint whose other shards the other ranks have copied before. Raises OSError.
        """
        for checkpoint in reversed(folders.list_steps(run / CHECKPOINTS)):
            if self._has(checkpoint):
                break
            if checkpoint == whole or _is_whole(checkpoint):
                self._remove(checkpoint.name, COMPLETE)
                self.push_shards(checkpoint)
                self._put(checkpoint / COMPLETE, CHECKPOINTS, checkpoint.name)
        for step in wishes.pins:
            self.write(f"{PINS}/{folders.name_of_step(step)}", "")
        for file in RECORDS:
            if (run / file).is_file():
                self._put(run / file)
        wishes = replace(wishes, pins=self.pins())
        names = [Path(name) for name in self.names()]
        for path in surplus(names, [], wishes, lambda path: self.is_whole(path.name)):
            self._remove(path.name)

    def push_shards(self, checkpoint: Path) -> None:
        """Copy the files of a checkpoint but for the one that makes it whole. Raises OSError."""
        for path in checkpoint.iterdir():
            if path.name != COMPLETE:
                self._put(path, CHECKPOINTS, checkpoint.name)

    def set_aside(self, step: int) -> None:
        """Let the checkpoints of later steps count no more. Raises OSError."""
        for name in self.names():
            if step_of(Path(name)) > step and self.is_whole(name):
                complete, aside = (self._at(CHECKPOINTS, name, n) for n in (COMPLETE, ASIDE))
                self._files.mv(complete, aside)

    def pins(self) -> set[int]:
        return {step_of(pin) for pin in folders.steps_among(map(Path, self._list(PINS)))}

    def read(self, *parts: str) -> bytes:
        """The contents of a file of the run's folder, b"" if it is missing. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return bytes(self._files.cat_file(self._at(*parts)))
        return b""

    def write(self, file: str, content: str) -> str:
        """Write a small file into the run's folder, such as a pin. Returns its address. Raises OSError."""
        self._files.pipe_file(self._at(file), content.encode())
        return f"{self.address}/{file}"

    def end_rewind(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(REWIND))

    def _at(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _put(self, path: Path, *folder: str) -> None:
        self._files.put_file(str(path), self._at(*folder, path.name))

    def _has(self, local: Path) -> bool:
        """Whether the bucket has the checkpoint of this folder, whole."""
        with contextlib.suppress(FileNotFoundError):
            content = (local / COMPLETE).read_bytes()
            return content == self.read(CHECKPOINTS, local.name, COMPLETE)
        return False

    def _list(self, *parts: str, kind: str = "file") -> list[str]:
        """The names of the files in a folder of the run, [] if it is missing."""
        rows: list[dict[str, str]] = []
        with contextlib.suppress(FileNotFoundError):
            rows = self._files.ls(self._at(*parts), detail=True)
        names = [row["name"].rstrip("/").rpartition("/")[2] for row in rows if row["type"] == kind]
        return sorted(filter(None, names))

    def _remove(self, name: str, file: str = "") -> None:
        """Remove a file of a checkpoint; or all of it, whole or not, beginning with COMPLETE."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(CHECKPOINTS, name, file or COMPLETE))
        if not file and self._files.exists(self._at(CHECKPOINTS, name)):
            self._files.rm(self._at(CHECKPOINTS, name), recursive=True)


class _Files:
    """A file system of fsspec, each of whose errors is an OSError that names the address."""

    def __init__(self, files: Any, address: str) -> None:
        self._files, self._address = files, address

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return getattr(self._files, name)(*arguments, **options)
            except FileNotFoundError:
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise  # the local disk is full
                reason = " ".join(str(error).split()) or type(error).__name__
                raise OSError(errno.EIO, reason, self._address) from error

        return call


def _is_whole(checkpoint: Path) -> bool:
    """Whether this disk has all shards of a checkpoint. Sizes are not compared."""
    try:
        return not folders.list_files(checkpoint).lacking
    except BrokenCheckpoint:
        return False
