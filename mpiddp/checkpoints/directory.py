"""A checkpoint is a folder that appears complete, is verified when read, and is never overwritten.

All files are written into a hidden folder beside it: the data, a manifest with their sizes and SHA-256, and
COMPLETE with the SHA-256 of the manifest. Each is flushed to disk. Then one rename makes the folder a
checkpoint. torch.load does not detect a flipped bit; the manifest does.

    complete    COMPLETE is there and fits the manifest, so the save has ended
    intact      and every file has its size
    verified    and every file has its SHA-256

A sharded checkpoint also has shards.json, the same on every host, with the sizes and SHA-256 of the files of
shards on all hosts. So a host without some of them, as it may be without a shared file system, knows what it
lacks, and a file of another save is found out.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import JobFailed
from mpiddp.paths import cause_of, flush, flush_folder, read_limited
from mpiddp.text import shown

COMPLETE = "COMPLETE"
MANIFEST = "manifest.json"
INDEX = "shards.json"
_MAX_BYTES, MAX_INDEX_BYTES = 16 << 20, 1 << 30
_LONGEST_NAME = 255  # bytes
_NAME = re.compile(r"step_([0-9]{8,18})")
_UNFINISHED = ".unfinished-"
# Writes files into a folder, and may return the SHA-256 of those that it has hashed.
WriteFiles = Callable[[Path], Mapping[str, str] | None]


class BrokenCheckpoint(Exception):
    """The folder is a broken checkpoint. The message names the damage."""


class UnreadableCheckpoint(BrokenCheckpoint):
    """A machine failed: a disk, or a file server. The checkpoint may be intact."""


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
    save: str  # a hash that the folders of one save share

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


def consequence(broken: int, newest: Path | None) -> str:
    """A phrase for the consequence of a broken checkpoint of step `broken`; `newest` is a verified one."""
    if newest is None:
        return "no older one is verified"
    return f"resuming from {newest.name} ({broken - step_of(newest)} steps lost)"


def file_of(rank: int) -> str:
    """The file of a rank's shards."""
    return f"shard_{rank:05d}.pt"


def list_steps(root: Path) -> list[Path]:
    """The checkpoint folders in `root`, oldest first, broken or not. Empty if `root` is missing."""
    if not root.is_dir():
        return []
    folders = (f for f in root.iterdir() if _NAME.fullmatch(f.name) and f.is_dir())
    return sorted(folders, key=step_of)


def write(
    root: Path, step: int, write_files: WriteFiles, *, replaces_verified: bool = False
) -> Path:
    """Write the checkpoint of `step` into `root`; `write_files` writes its files into a given folder.

    A verified checkpoint of that step stays, unless `replaces_verified`; a broken one is replaced. Only one
    process at a time may write into `root`. `write_files` may return the SHA-256 of files that it has
    hashed already. Those files are not read again.

    Raises:
        OSError: the disk is full or read-only, … No incomplete checkpoint is left visible.
    """
    final = root / f"step_{step:08d}"
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{_UNFINISHED}*"):
        _remove_hidden(leftover)
    if final.exists() and not replaces_verified and is_verified(final):
        return final
    write_folder(final, write_files)
    return final


def write_folder(final: Path, write_files: WriteFiles) -> None:
    """Write a checkpoint that appears complete as the folder `final`, in the place of one of that name.

    Raises:
        OSError: as `write`.
    """
    unfinished = _new_hidden(final)
    unfinished.mkdir()
    try:
        known = write_files(unfinished) or {}
        manifest = {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": known.get(path.name) or _sha256(path),
            }
            for path in sorted(unfinished.iterdir())
        }
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
        (unfinished / COMPLETE).write_text(_sha256(unfinished / MANIFEST))
        for path in unfinished.iterdir():
            flush(path)
        flush_folder(unfinished)
        if final.exists():
            _remove(final)
        unfinished.rename(final)
        flush_folder(final.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def verify(folder: Path) -> None:
    """Verify every byte against the manifest.

    Raises:
        BrokenCheckpoint: a file is missing, truncated or changed.
    """
    _check(folder, lambda path, entry: _sha256(path) == entry.sha256)


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
        _check(folder, lambda path, entry: True)
    except BrokenCheckpoint:
        return False
    return True


def missing_shards(folder: Path) -> list[str]:
    """The files of shards that the folder lacks. Reads no file of tensors.

    Raises:
        BrokenCheckpoint: it has one of another save, or is not complete.
    """
    try:
        found = listing(folder)
        for name in found.lacking:
            if name in found.here:
                raise BrokenCheckpoint(f"{name} is of another save")
    except BrokenCheckpoint as error:
        raise type(error)(f"checkpoint {folder.name}: {error}") from None
    return found.lacking


def survey(
    root: Path, skip: Mapping[int, str] | None = None
) -> tuple[Path | None, list[tuple[int, BrokenCheckpoint]]]:
    """The newest verified checkpoint, and the step and the damage of every newer, broken one.

    Args:
        skip: the damage of further checkpoints, by their steps.
    """
    complaints: list[tuple[int, BrokenCheckpoint]] = []
    for folder in reversed(list_steps(root)):
        if skip and step_of(folder) in skip:
            complaints.append((step_of(folder), BrokenCheckpoint(skip[step_of(folder)])))
            continue
        try:
            verify(folder)
        except BrokenCheckpoint as error:
            complaints.append((step_of(folder), error))
            continue
        return folder, complaints
    return None, complaints


def prune(root: Path, keep: int, *, counts: Callable[[Path], bool] = is_intact) -> list[Path]:
    """Remove the checkpoints that are older than the newest `keep`, and return the removed ones.

    Only a checkpoint for which `counts` is true counts as one of the `keep`. The default compares
    sizes only, because a training prunes after every save.
    """
    kept = 0
    removed = []
    for folder in reversed(list_steps(root)):
        if kept < keep:
            kept += counts(folder)
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


def _check(folder: Path, fits: Callable[[Path, Entry], bool]) -> None:
    try:
        for name, entry in listed(folder).items():
            _check_file(folder / name, entry, fits)
    except BrokenCheckpoint as error:
        raise type(error)(f"checkpoint {folder.name}: {error}") from None


def listing(folder: Path) -> Listing:
    """What the folder lists. Raises BrokenCheckpoint."""
    manifest = _manifest(folder)
    here = _entries(_table(manifest, MANIFEST), MANIFEST)
    if INDEX not in here:
        return Listing(here, {}, hashlib.sha256(manifest).hexdigest())
    try:
        content = read_limited(folder / INDEX, MAX_INDEX_BYTES)
    except OSError as error:
        raise _unreadable(folder / INDEX, error) from None
    shards = _table(content, INDEX).get("files")
    if not isinstance(shards, dict):
        raise BrokenCheckpoint(f"{INDEX} is not a table of shards")
    return Listing(here, _entries(shards, INDEX), here[INDEX].sha256)


def listed(folder: Path) -> dict[str, Entry]:
    """The files of the folder, by name, from its manifest.

    Raises:
        BrokenCheckpoint: it is not complete, or its manifest names a file outside of its folder.
    """
    return _entries(_table(_manifest(folder), MANIFEST), MANIFEST)


def _manifest(folder: Path) -> bytes:
    """The manifest of a complete folder. Raises BrokenCheckpoint."""
    expected = _read_own(folder / COMPLETE)
    manifest = _read_own(folder / MANIFEST)
    if hashlib.sha256(manifest).hexdigest().encode() != expected:
        raise BrokenCheckpoint(f"{MANIFEST} does not match its SHA-256")
    return manifest


def _table(content: bytes, file: str) -> dict[str, object]:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        raise BrokenCheckpoint(f"{file} is not JSON that can be read") from None
    if not isinstance(table, dict):
        raise BrokenCheckpoint(f"{file} is not a table of files")
    return table


def _entries(values: Mapping[str, object], file: str) -> dict[str, Entry]:
    """The files in a table of `file`."""
    return {_checked_name(name, file): _entry(name, each, file) for name, each in values.items()}


def _checked_name(name: str, file: str) -> str:
    """A name that cannot lead out of the checkpoint's folder."""
    try:
        is_name = name not in ("", ".", "..") and not {"/", "\0"} & set(name)
        is_name = is_name and len(os.fsencode(name)) <= _LONGEST_NAME
    except UnicodeEncodeError:  # half a character
        is_name = False
    if not is_name:
        raise BrokenCheckpoint(f'{file} lists "{shown(name)}", which is not the name of a file')
    return name


def _entry(name: str, values: object, file: str) -> Entry:
    if isinstance(values, dict):
        size, sha256 = values.get("bytes"), values.get("sha256")
        is_sha256 = isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)
        if type(size) is int and 0 <= size < 1 << 63 and is_sha256:
            return Entry(size, str(sha256))
    raise BrokenCheckpoint(f"{file} has no size and SHA-256 of {shown(name)}")


def _read_own(path: Path) -> bytes:
    """The contents of COMPLETE or of the manifest. A save writes these two last."""
    try:
        return read_limited(path, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenCheckpoint("the save was never completed") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _check_file(path: Path, entry: Entry, fits: Callable[[Path, Entry], bool]) -> None:
    try:
        if not path.is_file():
            raise BrokenCheckpoint(f"{path.name} is missing")
        if (size := path.stat().st_size) != entry.bytes:
            raise BrokenCheckpoint(f"{path.name} has {size} bytes instead of {entry.bytes}")
        if not fits(path, entry):
            raise BrokenCheckpoint(f"{path.name} does not match its SHA-256")
    except OSError as error:  # a bad sector, or a file server that is gone
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> BrokenCheckpoint:
    kind = UnreadableCheckpoint if cause_of(error) is JobFailed else BrokenCheckpoint
    return kind(f"{path.name} cannot be read: {error.strerror}")


def _remove(folder: Path) -> None:
    """Remove a checkpoint. Rename it first, so that a half-removed folder never looks like a checkpoint."""
    _remove_hidden(folder.rename(_new_hidden(folder)))


def _remove_hidden(folder: Path) -> None:
    """Remove what can be removed. Files of another user, or open over NFS, remain until a later save."""
    if folder.is_symlink():  # to a checkpoint that the user keeps elsewhere
        with contextlib.suppress(OSError):
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def hidden(root: Path, name: str) -> Path:
    """A folder in `root` that is no checkpoint. The next save removes it."""
    return root / f"{_UNFINISHED}{name}"


def _new_hidden(folder: Path) -> Path:
    """A new hidden name, beside the folder, that no checkpoint has."""
    return hidden(folder.parent, f"{folder.name}-{os.urandom(4).hex()}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
