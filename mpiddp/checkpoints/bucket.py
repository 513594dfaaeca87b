"""A run in object storage: s3://, gs:// or any other address of fsspec. It is one more copy of the folder.

    bucket = Bucket("s3://models/runs/a")
    bucket.update(run, wishes)             # after each save: copies what is newer, removes what no wish keeps
    bucket.fetch(run, "step_00001000")     # for a resume or a reader: brings this checkpoint

A run writes its folder on a local disk, and copies it to the bucket. A class in the place of `Path` would be
larger and less safe: objects can neither be renamed nor locked, so each function that relies on a rename or a
lock would need a second way. And a resume maps its tensors from verified files, which have to be local all
the same. So this module alone knows fsspec. Its packages raise errors of many types, and each becomes an
OSError.

A checkpoint in the bucket is whole if it has COMPLETE, which is copied last and removed first. What a bucket
lacks says nothing about the disk: it may have been away. So nothing local is ever removed for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from mpiddp.checkpoints import folder as folders
from mpiddp.checkpoints.folder import COMPLETE, BrokenCheckpoint, NewFolder, step_of
from mpiddp.checkpoints.retention import surplus
from mpiddp.checkpoints.wishes import METRICS, PINS, REWIND, WISHES, Wishes
from mpiddp.errors import UserError

# The files of a run's folder that the bucket has, too.
RECORDS = ("config.json", METRICS, "attempts.jsonl", "summary.json", WISHES)


def split_address(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The address of the run, and the name of the checkpoint, or "", of an address that a user names."""
    run, _, name = str(path).rstrip("/").partition("/checkpoints")
    return run, name.strip("/")


def local_path(address: str | os.PathLike[str]) -> Path:
    """The folder of this user that has the local copy of a run at this address."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "mpiddp", quote(split_address(address)[0], safe=""))


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
            self._files, self._root = url_to_fs(address.rstrip("/"), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UserError(f"{address}: {error}.") from None
        self.address = address

    def names(self) -> list[str]:
        """The names of the checkpoints, the oldest first, and then of those set aside. Raises OSError."""
        with self._errors():
            paths = [Path(name) for name in self._list("checkpoints", kind="directory")]
            rows = folders.steps_among(paths) + folders.steps_among(paths, set_aside=True)
            return [path.name for path in rows]

    def is_whole(self, name: str) -> bool:
        with self._errors():
            return bool(self._files.exists(self._at(name, COMPLETE)))

    def size_of(self, name: str) -> int:
        """The bytes of a checkpoint. Raises OSError."""
        with self._errors():
            return int(self._files.du(self._at(name)))

    def fetch(self, run: Path, name: str) -> Path:
        """The local folder of a checkpoint, which is downloaded if it is not there. Raises OSError."""
        local = run / "checkpoints" / name
        with self._errors():
            if not (self._is_same(local) and _is_whole(local)):
                new = NewFolder(local)
                new.path.mkdir(parents=True)
                try:
                    for file in self._list("checkpoints", name):
                        self._files.get_file(self._at(name, file), str(new.path / file))
                    new.publish()
                finally:
                    new.discard()
        return local

    def fetch_records(self, run: Path) -> None:
        """Bring the small files of the run's folder, with its wishes and its pins. Raises OSError."""
        with self._errors():
            run.mkdir(parents=True, exist_ok=True)
            for file in {*RECORDS} & {*self._list()}:
                self._files.get_file(f"{self._root}/{file}", str(run / file))
            for name in self._list(PINS):
                (run / PINS).mkdir(exist_ok=True)
                (run / PINS / name).touch()

    def update(self, run: Path, wishes: Wishes, *, whole: Path | None = None) -> None:
        """Copy the checkpoints that are newer than those of the bucket, and remove there what no wish keeps.

        `whole`: a checkpoint whose other shards the other ranks have copied before. Raises OSError.
        """
        with self._errors():
            for checkpoint in reversed(folders.list_steps(run / "checkpoints")):
                if self._is_same(checkpoint):
                    break
                if checkpoint == whole or _is_whole(checkpoint):
                    self._remove_file(self._at(checkpoint.name, COMPLETE))
                    self._push_files(checkpoint)
                    self._files.put_file(
                        str(checkpoint / COMPLETE), self._at(checkpoint.name, COMPLETE)
                    )
            for step in wishes.pins:
                self.write(f"{PINS}/{folders.name_of_step(step)}", "")
            for file in RECORDS:
                if (run / file).is_file():
                    self._files.put_file(str(run / file), f"{self._root}/{file}")
            wishes = replace(wishes, pins=self.pins())
            paths = [Path(name) for name in self.names()]
            here, aside = (
                [p for p in paths if folders.is_set_aside(p) == a] for a in (False, True)
            )
            for path in surplus(here, aside, wishes, lambda path: self.is_whole(path.name)):
                self._remove(path.name)

    def push_shards(self, checkpoint: Path) -> None:
        """Copy the files of another rank than the one that completes the checkpoint. Raises OSError."""
        with self._errors():
            self._push_files(checkpoint)

    def set_aside(self, step: int) -> None:
        """Rename the checkpoints of later steps. Each is whole under one of the names. Raises OSError."""
        names = self.names()
        for name in names:
            is_later = not folders.is_set_aside(Path(name)) and step_of(Path(name)) > step
            if not is_later or not self.is_whole(name):
                continue
            aside = next(aside for aside in folders.aside_names(name) if aside not in names)
            with self._errors():
                content = self._files.cat_file(self._at(name, COMPLETE))
                self._remove_file(self._at(name, COMPLETE))
                for file in self._list("checkpoints", name):
                    self._files.cp_file(self._at(name, file), self._at(aside, file))
                self._files.pipe_file(self._at(aside, COMPLETE), content)
                self._remove(name)

    def wishes(self) -> Wishes:
        """Those of the run. Raises OSError."""
        with self._errors():
            has_wishes = WISHES in self._list()
            content = self._files.cat_file(f"{self._root}/{WISHES}") if has_wishes else b"{}"
            return Wishes.parse(content, self.pins())

    def pins(self) -> set[int]:
        with self._errors():
            return {step_of(pin) for pin in folders.steps_among(map(Path, self._list(PINS)))}

    def write(self, file: str, content: str) -> str:
        """Write a small file into the run's folder, such as a pin. Returns its address. Raises OSError."""
        with self._errors():
            self._files.pipe_file(f"{self._root}/{file}", content.encode())
        return f"{self.address}/{file}"

    def rewound_to(self) -> int:
        """The step to which `mpiddp checkpoints rewind` takes the next resume; -1 without one."""
        with self._errors():
            return (
                int(self._files.cat_file(f"{self._root}/{REWIND}"))
                if REWIND in self._list()
                else -1
            )

    def end_rewind(self) -> None:
        with self._errors():
            self._remove_file(f"{self._root}/{REWIND}")

    def _at(self, name: str, file: str = "") -> str:
        return f"{self._root}/checkpoints/{name}/{file}".rstrip("/")

    def _is_same(self, local: Path) -> bool:
        """Whether the bucket has the checkpoint of this folder, whole."""
        try:
            content: bytes = self._files.cat_file(self._at(local.name, COMPLETE))
            return content == (local / COMPLETE).read_bytes()
        except FileNotFoundError:
            return False

    def _push_files(self, checkpoint: Path) -> None:
        for path in checkpoint.iterdir():
            if path.name != COMPLETE:
                self._files.put_file(str(path), self._at(checkpoint.name, path.name))

    def _list(self, *parts: str, kind: str = "file") -> list[str]:
        """The names of the files in a folder of the run, [] if it is missing."""
        try:
            rows = self._files.ls("/".join((self._root, *parts)), detail=True)
        except FileNotFoundError:
            return []
        names = [row["name"].rstrip("/").rpartition("/")[2] for row in rows if row["type"] == kind]
        return sorted(filter(None, names))

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, whole or not."""
        self._remove_file(self._at(name, COMPLETE))
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
            if isinstance(error, OSError) and (
                error.errno == errno.ENOSPC or error.filename == self.address
            ):
                raise  # the local disk is full, or an inner call has named the bucket
            reason = " ".join(str(error).split()) or type(error).__name__
            raise OSError(errno.EIO, reason, self.address) from error


def _is_whole(checkpoint: Path) -> bool:
    """Whether this disk has all shards of a checkpoint. Sizes are not compared."""
    try:
        return not folders.list_files(checkpoint).lacking
    except BrokenCheckpoint:
        return False
