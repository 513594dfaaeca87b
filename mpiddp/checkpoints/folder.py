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
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import JobFailed, UserError, cause_of, read_limited
from mpiddp.text import shown

COMPLETE = "COMPLETE"
MANIFEST = "manifest.json"
INDEX = "shards.json"
FACTS = "state.json"
PINNED = "PINNED"  # a file of the user, who keeps the checkpoint by it
_MAX_INDEX_BYTES = 1 << 30
_NAME = re.compile(r"step_([0-9]{8,18})")
_HIDDEN = ".unfinished-"


class BrokenCheckpoint(Exception):
    """The folder is a broken checkpoint. The message names it and the damage.

    With `is_failure`, a machine failed, a disk or a file server, and the checkpoint may be intact.
    """

    def __init__(self, folder: Path, damage: str, *, is_failure: bool = False) -> None:
        super().__init__(f"checkpoint {folder.name}: {damage}")
        self.is_failure = is_failure


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
        """The files of shards that the folder lacks. Other hosts may keep them."""
        return [name for name in self.shards if name not in self.here]


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
def appearing(final: Path) -> Iterator[Path]:
    """A hidden folder, which is renamed to `final` at the end of the body, or removed."""
    new = _new_hidden(final)
    new.mkdir()
    try:
        yield new
        new.rename(final)
        flush(final.parent)
    except BaseException:
        _remove_hidden(new)
        raise


def probe_rename(root: Path) -> None:
    """Rename a folder with a file, as each save does. Raises OSError where a mount cannot do that."""
    probe = hidden(root, f"probe-{os.urandom(4).hex()}")
    with appearing(probe) as new:
        (new / COMPLETE).touch()
    _remove_hidden(probe)


def complete(new: Path, final: Path, hashes: Mapping[str, str]) -> None:
    """Make the hidden folder `new` the checkpoint `final`, in the place of one of that name."""
    seal(new, hashes)
    if final.exists():
        remove(final)
    new.rename(final)
    flush(final.parent)


def seal(new: Path, hashes: Mapping[str, str]) -> None:
    """Add the manifest and COMPLETE, and flush all files to the disk.

    `hashes` has the SHA-256 of files, by name. The others are read and hashed here.
    """
    manifest = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashes.get(path.name) or _sha256(path)}
        for path in sorted(new.iterdir())
    }
    (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    (new / COMPLETE).write_text(_sha256(new / MANIFEST), encoding="utf-8")
    for path in (*new.iterdir(), new):
        flush(path)


def flush(path: Path) -> None:
    """fsync a file, or a folder's list of names. Some file systems (SMB, some of FUSE) have no such thing."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        cannot = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF)
        if error.errno not in cannot or not path.is_dir():
            raise


# Read


def verify(folder: Path, *, with_hashes: bool = True, share: tuple[int, int] = (0, 1)) -> Listing:
    """Verify every byte against the manifest; without hashes, only that each file has its full size.

    `share` (index, count): hash only these of the files, because other ranks hash the others. Returns what
    the folder lists. Raises BrokenCheckpoint if a file is missing, truncated or changed.
    """
    listed = listing(folder)
    index, count = share
    largest_first = sorted(listed.here.items(), key=lambda each: (-each[1].bytes, each[0]))
    own = {name for name, _ in largest_first[index::count]}
    for name, entry in listed.here.items():
        path = folder / name
        try:
            if not path.is_file():
                raise BrokenCheckpoint(folder, f"{name} is missing")
            if (size := path.stat().st_size) != entry.bytes:
                raise BrokenCheckpoint(folder, f"{name} has {size} bytes instead of {entry.bytes}")
            if with_hashes and name in own and _sha256(path) != entry.sha256:
                raise BrokenCheckpoint(folder, f"{name} does not match its SHA-256")
        except OSError as error:
            raise unreadable(folder, name, error) from None
    return listed


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint, broken or not, by its name or by its manifest."""
    return folder.resolve() in list_steps(folder.resolve().parent) or any(
        (folder / name).exists() for name in (MANIFEST, COMPLETE)
    )


def checkpoints_at(given: Path) -> list[Path]:
    """The checkpoints at a path that a user names, oldest first. Raises UserError if there are none."""
    if root := find_checkpoints(given):
        return list_steps(root)
    if is_checkpoint(given):
        return [given.resolve()]
    found = "contains no checkpoints" if given.exists() else "does not exist"
    raise UserError(
        f"{given} {found}. Expected a run's folder, a folder of checkpoints, or a checkpoint."
    )


def best_first(folders: list[Path]) -> list[Path]:
    """The newest finite one first, the oldest that is not finite last. `folders`: oldest first."""
    newest_first = list(reversed(folders))
    return sorted(newest_first, key=lambda each: bool(not_finite(each)))


def identity(folder: Path) -> str:
    """The same for all hosts that see this folder on one file system. Raises BrokenCheckpoint."""
    try:
        found = (folder / COMPLETE).stat()
    except OSError as error:
        raise unreadable(folder, COMPLETE, error) from None
    return f"{found.st_ino} {found.st_ctime_ns}"


def not_finite(folder: Path) -> str:
    """Why the state is not finite, as it was saved; "" if it is, or cannot be read."""
    try:
        facts = json.loads(read_limited(folder / FACTS, (folder / FACTS).stat().st_size))
        return str(facts.get("not_finite", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def is_verified(folder: Path, *, with_hashes: bool = True) -> bool:
    """Whether `verify` finds no damage. The folder may lack files of shards."""
    try:
        verify(folder, with_hashes=with_hashes)
    except BrokenCheckpoint:
        return False
    return True


def listing(folder: Path) -> Listing:
    """What the folder lists. Reads no file of tensors. Raises BrokenCheckpoint."""
    expected, manifest = _read(folder, COMPLETE), _read(folder, MANIFEST)
    save_id = hashlib.sha256(manifest).hexdigest()
    if save_id.encode() != expected:
        raise BrokenCheckpoint(folder, f"{MANIFEST} does not match its SHA-256")
    here = _entries(folder, MANIFEST, manifest)
    if INDEX not in here:
        return Listing(here, {}, save_id)
    shards = _entries(folder, INDEX, _read(folder, INDEX), "files")
    for name, entry in shards.items():
        if here.get(name, entry) != entry:
            raise BrokenCheckpoint(folder, f"{name} is of another save")
        if (folder / name).exists():  # a pull brings those of other hosts
            here[name] = entry
    return Listing(here, shards, here[INDEX].sha256)


def unreadable(folder: Path, name: str, error: OSError) -> BrokenCheckpoint:
    """The damage of a file on a bad sector, or on a file server that is gone."""
    damage = f"{name} cannot be read: {error.strerror}"
    return BrokenCheckpoint(folder, damage, is_failure=cause_of(error) is JobFailed)


def _read(folder: Path, name: str) -> bytes:
    try:
        size = (folder / name).stat().st_size  # a read allocates its limit
        return read_limited(folder / name, min(size, _MAX_INDEX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        damage = f"{INDEX} is missing" if name == INDEX else "the save was never completed"
        raise BrokenCheckpoint(folder, damage) from None
    except OSError as error:
        raise unreadable(folder, name, error) from None


def _entries(folder: Path, file: str, content: bytes, key: str = "") -> dict[str, Entry]:
    """The files in the table `key` of `file`, or in all of it."""
    try:
        table = json.loads(content)
        rows = (table[key] if key else table).items()
        entries = {name: Entry(**each) for name, each in rows}
        if not all(type(each.bytes) is int for each in entries.values()):
            raise TypeError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BrokenCheckpoint(folder, f"{file} is not a table of files") from None
    for name in entries:
        if "/" in name:  # it could lead out of the folder
            raise BrokenCheckpoint(
                folder, f'{file} lists "{shown(name)}", which is not the name of a file'
            )
    return entries


def remove(folder: Path) -> None:
    """Remove a checkpoint. Rename it first, so that a half-removed folder never looks like a checkpoint."""
    _remove_hidden(folder.rename(_new_hidden(folder)))


def _remove_hidden(folder: Path) -> None:
    """Remove what can be removed. Files of another user, or open over NFS, remain until the next start."""
    if folder.is_symlink() or folder.is_file():  # a link to a checkpoint kept elsewhere
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
