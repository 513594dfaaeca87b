"""A checkpoint is a folder that appears complete, is verified when read, and is never overwritten.

All files are written into a hidden folder beside it: the data, a manifest with their sizes and SHA-256, and
COMPLETE with the SHA-256 of the manifest. Each is flushed to disk. Then one rename makes the folder a
checkpoint. torch.load does not detect a flipped bit; the manifest does. `mpiddp checkpoints` shows it.

    complete    COMPLETE is there and fits the manifest, so the save has ended
    intact      and every file has its size
    verified    and every file has its SHA-256

A sharded checkpoint also has shards.json, the same on every host, with the sizes and SHA-256 of the files of
shards on all hosts. So a host without a shared file system knows which files it lacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, flush, flush_folder, read_limited
from mpiddp.text import shown

COMPLETE = "COMPLETE"
MANIFEST = "manifest.json"
INDEX = "shards.json"
MAX_INDEX_BYTES = 1 << 30
_NAME = re.compile(r"step_([0-9]{8,18})")
_HIDDEN = ".unfinished-"


class BrokenCheckpoint(Exception):
    """The folder is a broken checkpoint. The message names the damage.

    Attributes:
        is_failure: a machine failed, a disk or a file server. The checkpoint may be intact.
    """

    def __init__(self, damage: str, *, is_failure: bool = False) -> None:
        super().__init__(damage)
        self.is_failure = is_failure

    def of(self, place: object) -> UserError | JobFailed:
        """The error of a command or a resume that needs the checkpoint at `place`."""
        return (JobFailed if self.is_failure else UserError)(f"{place}: {self}.")


@dataclass(frozen=True)
class Entry:
    """One file: its size, and its SHA-256 in hex digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Listing:
    """The files of a checkpoint by name, as its folder lists them."""

    here: dict[str, Entry]  # those of the manifest
    shards: dict[str, Entry]  # those of shards.json, on all hosts; {} if nothing is sharded
    save_id: str  # a hash that the folders of one save share

    @property
    def everywhere(self) -> dict[str, Entry]:
        """The files of all hosts."""
        return {**self.here, **self.shards}

    @property
    def lacking(self) -> list[str]:
        """The files of shards that the folder lacks, or has of another save. Other hosts may keep them."""
        return [name for name, entry in self.shards.items() if self.here.get(name) != entry]


def step_of(folder: Path) -> int:
    """The step in the folder's name. Raises ValueError if the name is not a checkpoint's."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder.name} is not named step_00000000")
    return int(match[1])


def name_of_step(step: int) -> str:
    return f"step_{step:08d}"


def list_steps(root: Path) -> list[Path]:
    """The checkpoint folders in `root`, oldest first, broken or not. Empty if `root` is missing."""
    if not root.is_dir():
        return []
    folders = (f for f in root.iterdir() if _NAME.fullmatch(f.name) and f.is_dir())
    return sorted(folders, key=step_of)


def find_checkpoints(given: Path) -> Path | None:
    """The folder of checkpoints in `given`, a run's folder, or `given` itself. None if neither has any."""
    return next((root for root in (given / "checkpoints", given) if list_steps(root)), None)


# Written


def hidden(root: Path, name: str) -> Path:
    """A folder in `root` that is no checkpoint."""
    return root / f"{_HIDDEN}{name}"


def remove_leftovers(root: Path) -> None:
    """Remove what killed runs have left. Only the process that holds the run's lock may call this."""
    for leftover in root.glob(f"{_HIDDEN}*"):
        _remove_hidden(leftover)


@contextlib.contextmanager
def writing(final: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A new checkpoint, which appears as the folder `final` at the end of the body, or not at all.

    Yields:
        The hidden folder to write into, and a dict for the SHA-256 of the files that are hashed already.

    Raises:
        OSError: the disk is full or read-only, … Nothing is left visible.
    """
    new, hashes = _new_hidden(final), dict[str, str]()
    new.mkdir()
    try:
        yield new, hashes
        complete(new, final, hashes)
    except BaseException:
        _remove_hidden(new)
        raise


def complete(new: Path, final: Path, hashes: Mapping[str, str]) -> None:
    """Make the hidden folder `new` the checkpoint `final`, in the place of one of that name.

    Args:
        hashes: the SHA-256 of files, by name. The others are read and hashed here.

    Raises:
        OSError: the disk is full or read-only, … Nothing has become visible.
    """
    manifest = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashes.get(path.name) or _sha256(path)}
        for path in sorted(new.iterdir())
    }
    (new / MANIFEST).write_text(json.dumps(manifest, indent=1))
    (new / COMPLETE).write_text(_sha256(new / MANIFEST))
    for path in new.iterdir():
        flush(path)
    flush_folder(new)
    if final.exists():
        _remove(final)
    new.rename(final)
    flush_folder(final.parent)


def prune(root: Path, keep: int, *, is_good: Callable[[Path], bool]) -> list[Path]:
    """Remove the checkpoints that are older than the newest `keep` good ones, and return the removed ones."""
    kept = 0
    removed = []
    for folder in reversed(list_steps(root)):
        if kept < keep:
            kept += is_good(folder)
        else:
            _remove(folder)
            removed.append(folder)
    return removed


def set_aside(root: Path, step: int) -> list[Path]:
    """Rename the checkpoints of steps after `step`, so that they no longer count, and return the new paths.

    Raises:
        OSError: a checkpoint cannot be renamed.
    """
    moved = []
    for folder in list_steps(root):
        if step_of(folder) > step:
            names = (folder.with_name(f"{folder.name}.old-{n}") for n in itertools.count(1))
            moved.append(folder.rename(next(name for name in names if not name.exists())))
    return moved


# Read


def verify(folder: Path) -> None:
    """Verify every byte against the manifest.

    Raises:
        BrokenCheckpoint: a file is missing, truncated or changed.
    """
    _check(folder, with_hashes=True)


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint, broken or not, by its name or by its manifest."""
    return folder.resolve() in list_steps(folder.resolve().parent) or any(
        (folder / name).exists() for name in (MANIFEST, COMPLETE)
    )


def is_verified(folder: Path) -> bool:
    """Whether every file of the folder is verified and of one save. It may lack files of shards."""
    try:
        verify(folder)
        missing_shards(folder)
    except BrokenCheckpoint:
        return False
    return True


def is_intact(folder: Path) -> bool:
    """Whether all files exist with their full size. `is_verified` also verifies every byte."""
    try:
        _check(folder, with_hashes=False)
    except BrokenCheckpoint:
        return False
    return True


def newest_verified(root: Path) -> Path | None:
    """The newest verified checkpoint in `root`."""
    return next(filter(is_verified, reversed(list_steps(root))), None)


def missing_shards(folder: Path) -> list[str]:
    """The files of shards that the folder lacks. Reads no file of tensors.

    Raises:
        BrokenCheckpoint: it has one of another save, or is not complete.
    """
    found = listing(folder)
    for name in found.lacking:
        if name in found.here:
            raise BrokenCheckpoint(f"checkpoint {folder.name}: {name} is of another save")
    return found.lacking


def listing(folder: Path) -> Listing:
    """What the folder lists.

    Raises:
        BrokenCheckpoint: it is not complete, or its manifest names a file outside of its folder.
    """
    with _naming(folder):
        expected = _read(folder / COMPLETE)
        manifest = _read(folder / MANIFEST)
        save_id = hashlib.sha256(manifest).hexdigest()
        if save_id.encode() != expected:
            raise BrokenCheckpoint(f"{MANIFEST} does not match its SHA-256")
        here = _entries(_json(manifest, MANIFEST), MANIFEST)
        if INDEX not in here:
            return Listing(here, {}, save_id)
        shards = _json(_read(folder / INDEX), INDEX).get("files")
        return Listing(here, _entries(shards, INDEX), here[INDEX].sha256)


def _check(folder: Path, *, with_hashes: bool) -> None:
    entries = listing(folder).here
    with _naming(folder):
        for name, entry in entries.items():
            path = folder / name
            if not path.is_file():
                raise BrokenCheckpoint(f"{name} is missing")
            if (size := path.stat().st_size) != entry.bytes:
                raise BrokenCheckpoint(f"{name} has {size} bytes instead of {entry.bytes}")
            try:
                fits = not with_hashes or _sha256(path) == entry.sha256
            except OSError as error:
                error.filename = str(path)  # an error of read() names no file
                raise
            if not fits:
                raise BrokenCheckpoint(f"{name} does not match its SHA-256")


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Name the checkpoint in the errors of the body, among them those of its disk."""
    try:
        yield
    except BrokenCheckpoint as error:
        damage, is_failure = str(error), error.is_failure
    except OSError as error:  # a bad sector, or a file server that is gone
        name = Path(os.fsdecode(error.filename)).name if error.filename else "a file"
        damage = f"{name} cannot be read: {error.strerror}"
        is_failure = cause_of(error) is JobFailed
    else:
        return
    raise BrokenCheckpoint(f"checkpoint {folder.name}: {damage}", is_failure=is_failure)


def _read(path: Path) -> bytes:
    try:
        return read_limited(path, MAX_INDEX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        if path.name == INDEX:
            raise BrokenCheckpoint(f"{INDEX} is missing") from None
        raise BrokenCheckpoint("the save was never completed") from None
    except OSError as error:
        error.filename = str(path)
        raise


def _json(content: bytes, file: str) -> dict[str, object]:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise BrokenCheckpoint(f"{file} is not a table of files")
    return table


def _entries(table: object, file: str) -> dict[str, Entry]:
    """The files in a table of `file`."""
    try:
        entries = {
            name: Entry(int(each["bytes"]), str(each["sha256"]))
            for name, each in dict(table).items()  # type: ignore[call-overload]
        }
    except (ValueError, LookupError, TypeError, OverflowError):
        raise BrokenCheckpoint(f"{file} is not a table of files") from None
    for name in entries:
        if name in ("", ".", "..") or {"/", "\0"} & set(name):  # it could lead out of the folder
            raise BrokenCheckpoint(f'{file} lists "{shown(name)}", which is not the name of a file')
    return entries


def _remove(folder: Path) -> None:
    """Remove a checkpoint. Rename it first, so that a half-removed folder never looks like a checkpoint."""
    _remove_hidden(folder.rename(_new_hidden(folder)))


def _remove_hidden(folder: Path) -> None:
    """Remove what can be removed. Files of another user, or open over NFS, remain until the next start."""
    if (
        folder.is_symlink() or folder.is_file()
    ):  # a link to a checkpoint that the user keeps elsewhere
        with contextlib.suppress(OSError):
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _new_hidden(folder: Path) -> Path:
    """A new hidden name, beside the folder, that no checkpoint has."""
    return hidden(folder.parent, f"{folder.name}-{os.urandom(4).hex()}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
