"""A run in object storage: s3://, gs:// or any other address of fsspec.

    bucket = Bucket("s3://models/runs/a")
    bucket.pull(run.dir)                     # at the start, the local folder becomes what the bucket has
    bucket.push(checkpoint, is_last=True)    # after each save

A run writes its folder on a local disk, and copies it to the bucket. A class in the place of `Path` would be
larger and less safe: objects can neither be renamed nor locked, so each function that relies on a rename or a
lock would need a second way. And a resume maps its tensors from verified files, which have to be local all
the same. So this module alone knows fsspec. Its packages raise errors of many types, and each becomes an
OSError.

A checkpoint in the bucket is whole if it has COMPLETE, which is copied last and removed first. A checkpoint
that is pulled is verified as on any disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from mpiddp.checkpoints.folder import COMPLETE, NewFolder, list_steps, remove
from mpiddp.errors import UserError

OWNER = "owner.json"  # names the process that writes the local folder


def is_address(path: str | os.PathLike[str]) -> bool:
    return "://" in str(path)


def local_path(path: str | os.PathLike[str]) -> Path:
    """A local path as it is; of an address of a run, or of a checkpoint, that of this user's local copy."""
    if not is_address(path):
        return Path(path)
    run, slash, name = str(path).rstrip("/").partition("/checkpoints/")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "mpiddp", quote(run, safe=""), f"{slash}{name}".lstrip("/"))


def pull(path: str | os.PathLike[str]) -> None:
    """Bring the local copy of this address up to date, if it is one. Raises UserError, OSError."""
    if is_address(path):
        run, _, name = str(path).rstrip("/").partition("/checkpoints/")
        Bucket(run).pull(local_path(run), name)


class Bucket:
    """A run's folder in object storage."""

    def __init__(self, address: str) -> None:
        """Raises UserError if the packages for such an address are missing."""
        if address.startswith("file:"):
            raise UserError(f"{address}: a run on a disk has a path, such as runs/a.")
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise UserError(f"{address} needs fsspec: pip install s3fs, or gcsfs.") from None
        try:
            self._files, root = url_to_fs(address.rstrip("/"), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UserError(f"{address}: {error}.") from None
        self._address, self._root = address, root

    def pull(self, run: Path, only: str = "") -> None:
        """Make the local folder what the bucket has: its whole checkpoints, and the files next to them.

        `only`: this checkpoint; the rest stays as it is. Raises OSError.
        """
        root = run / "checkpoints"
        root.mkdir(parents=True, exist_ok=True)
        with self._errors():
            names = [name for name in self._names() if not only or name == only]
            whole = [name for name in names if self._files.exists(f"{self._at(name)}/{COMPLETE}")]
            for local in () if only else _all(root):
                if local.name not in whole:  # its upload has failed, or another host has removed it
                    remove(local)
            for name in whole:
                files = self._list(self._at(name))
                if not self._is_same(name, files, root / name):
                    new = NewFolder(root / name)
                    new.path.mkdir()
                    for file in files:
                        self._files.get_file(f"{self._at(name)}/{file}", str(new.path / file))
                    new.publish()
            for file in () if only else self._list(self._root):
                self._files.get_file(f"{self._root}/{file}", str(run / file))

    def push(self, checkpoint: Path, *, is_last: bool) -> None:
        """Copy the files of a checkpoint. If it `is_last`, the other ranks have copied theirs.

        Then the checkpoint becomes whole, and the files next to it follow. Raises OSError.
        """
        target = self._at(checkpoint.name)
        with self._errors():
            if is_last:
                self._remove_file(f"{target}/{COMPLETE}")
            for path in checkpoint.iterdir():
                if path.name != COMPLETE:
                    self._files.put_file(str(path), f"{target}/{path.name}")
            if is_last:
                self._files.put_file(str(checkpoint / COMPLETE), f"{target}/{COMPLETE}")
                for path in checkpoint.parent.parent.iterdir():
                    if path.is_file() and path.name != OWNER:
                        self._files.put_file(str(path), f"{self._root}/{path.name}")

    def prune(self, root: Path) -> None:
        """Remove the checkpoints that the local folder no longer has. Raises OSError."""
        local = {path.name for path in _all(root)}
        with self._errors():
            for name in self._names():
                if name not in local:
                    self._remove(name)

    def rename(self, name: str, new_name: str) -> None:
        """Rename a checkpoint, which is whole under one of the names, or under none. Raises OSError."""
        old, new = self._at(name), self._at(new_name)
        with self._errors():
            if self._files.exists(f"{old}/{COMPLETE}"):
                self._remove(new_name)
                content = self._files.cat_file(f"{old}/{COMPLETE}")
                self._remove_file(f"{old}/{COMPLETE}")
                for file in self._list(old):
                    self._files.cp_file(f"{old}/{file}", f"{new}/{file}")
                self._files.pipe_file(f"{new}/{COMPLETE}", content)
                self._remove(name)

    def _at(self, name: str) -> str:
        return f"{self._root}/checkpoints/{name}"

    def _names(self) -> list[str]:
        """The checkpoints, whole or not."""
        return self._list(f"{self._root}/checkpoints", kind="directory")

    def _list(self, path: str, kind: str = "file") -> list[str]:
        try:
            rows = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return []
        names = [row["name"].rstrip("/").rpartition("/")[2] for row in rows if row["type"] == kind]
        return sorted(filter(None, names))

    def _is_same(self, name: str, files: list[str], local: Path) -> bool:
        """Whether the local folder has these files of the checkpoint."""
        if not all((local / file).exists() for file in files):
            return False
        content: bytes = self._files.cat_file(f"{self._at(name)}/{COMPLETE}")
        return content == (local / COMPLETE).read_bytes()

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, whole or not."""
        self._remove_file(f"{self._at(name)}/{COMPLETE}")
        if self._files.exists(self._at(name)):
            self._files.rm(self._at(name), recursive=True)

    def _remove_file(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # the local disk is full
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise OSError(errno.EIO, reason, self._address) from error


def _all(root: Path) -> list[Path]:
    return [*list_steps(root), *list_steps(root, set_aside=True)]
