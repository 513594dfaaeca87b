"""A checkpoint is a folder that appears complete, is verified when read, and is never overwritten.

    tree.pt                    the state without its tensors; what each rank has saved for itself
    model.safetensors          the tensors of the entry "model" that every host has
    shard_00001.safetensors    the boxes of rank 1 of everything else, see boxes.py
    shards.json                if there are shards: their sizes and SHA-256, the same on every host
    state.json                 the step, the program's configuration and more, see `Facts`
    manifest.json              the sizes and SHA-256 of all these, as far as this host has them
    COMPLETE                   the SHA-256 of the manifest

All are written into a hidden folder beside it, and flushed to the disk. Then one rename makes the folder a
checkpoint. torch.load does not detect a flipped bit; the manifest does. `mpiddp checkpoints` shows it.

    complete    COMPLETE is there and fits the manifest, so the save has ended
    intact      and every file has its size
    verified    and every file has its SHA-256
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mpiddp.errors import JobFailed, UserError, cause_of
from mpiddp.files import flush, read_limited
from mpiddp.text import shown

TREE = "tree.pt"
FACTS = "state.json"
INDEX = "shards.json"
MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"
SUFFIX = ".safetensors"
SHARDS = "shard_"  # begins the names of the files of shards, and no key of a state
_MAX_BYTES = 1 << 30  # of a file of JSON
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
class Facts:
    """What a checkpoint tells beside its state: the contents of state.json, which may have more.

    Attributes:
        step, config: those of the save.
        is_partial: some ranks had tensors that others did not.
        not_finite: why the state is not finite, or the latest loss; "" if both are.
        infinite: the tensors with infinities on purpose, such as masks; None before a save has told them.
        metrics: the latest value of the metric by which the best checkpoint is kept.
        keys: the entries of the state, in checkpoints of earlier versions.
    """

    step: int
    config: Mapping[str, Any]
    is_partial: bool = False
    not_finite: str = ""
    infinite: Sequence[str] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    keys: Sequence[str] = ()

    def write(self, new: Path) -> None:
        text = json.dumps({"written_by": "mpiddp.Checkpoints", **vars(self)}, indent=1)
        (new / FACTS).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Facts:
        """The facts of a state.json. Raises OSError; ValueError, TypeError, RecursionError if it is none."""
        found = json.loads(read_limited(path, _MAX_BYTES))
        return cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found})

    @classmethod
    def of(cls, folder: Path) -> Facts:
        """The facts of a checkpoint. A broken one has none, and counts as finite."""
        try:
            return cls.read(folder / FACTS)
        except (OSError, ValueError, TypeError, RecursionError):
            return cls(-1, {})


@dataclass(frozen=True)
class Listing:
    """The files of a checkpoint by name, as its folder lists them."""

    here: dict[str, Entry]  # those of the manifest
    shards: dict[str, Entry]  # those of shards.json, on all hosts; {} if nothing is sharded
    save_id: str  # a hash that the folders of one save share
    inode: str  # the same for all hosts that see this folder on one file system

    @property
    def lacking(self) -> list[str]:
        """The files of shards that the folder lacks. Other hosts may keep them."""
        return [name for name in self.shards if name not in self.here]


@functools.cache
def stem_of(key: str) -> str:
    """The name of the file of an entry, without its suffix: letters, digits, and % before anything else."""
    return quote(key, safe="")


def shard_of(rank: int) -> str:
    """The file of a rank's shards."""
    return f"{SHARDS}{rank:05d}{SUFFIX}"


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


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint, broken or not, by its name or by its files."""
    is_named = folder.is_dir() and _NAME.fullmatch(folder.resolve().name) is not None
    return is_named or any((folder / name).exists() for name in (MANIFEST, COMPLETE))


def checkpoints_at(given: Path) -> list[Path]:
    """The checkpoints at a path that a user names, oldest first. Raises UserError if there are none."""
    for root in (given / "checkpoints", given):
        if found := list_steps(root):
            return found
    if is_checkpoint(given):
        return [given.resolve()]
    is_there = given.exists()
    problem = "contains no checkpoints" if is_there else f"not found (looked in {Path.cwd()})"
    raise UserError(
        f"{given} {problem}. Expected a run's folder, a folder of checkpoints, or a checkpoint."
    )


# Written


def hidden(root: Path, name: str) -> Path:
    """The path of a hidden folder in `root`, which is not a checkpoint."""
    return root / f"{_HIDDEN}{name}"


def remove_leftovers(root: Path) -> None:
    """Remove what killed runs have left. Only the process that holds the run's lock may call this."""
    for leftover in root.glob(f"{_HIDDEN}*"):
        remove_hidden(leftover)


@contextlib.contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """A hidden folder, which is renamed to `final` at the end of the body, or removed."""
    new = _new_hidden(final)
    try:
        new.mkdir()  # here, since a signal may raise as it returns
        yield new
        new.rename(final)
        flush(final.parent)
    except BaseException:
        remove_hidden(new)
        raise


def probe_rename(root: Path) -> None:
    """Rename a folder with a file, as each save does. Raises OSError where a mount cannot do that."""
    probe = _new_hidden(root / "probe")
    probe.mkdir()
    (probe / COMPLETE).touch()
    try:
        remove_hidden(hide(probe))
    except OSError as error:
        remove_hidden(probe)
        words = f"its file system cannot rename folders ({error.strerror})"
        raise OSError(error.errno, words) from None


def complete(new: Path, final: Path, hashes: Mapping[str, str]) -> None:
    """Make the hidden folder `new` the checkpoint `final`, in the place of one of that name."""
    seal(new, hashes)
    if final.exists():
        remove_hidden(hide(final))
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


def hide(folder: Path) -> Path:
    """Rename a checkpoint, before its removal: a half-removed one never looks like a checkpoint."""
    return folder.rename(_new_hidden(folder))


def remove_hidden(folder: Path) -> None:
    """Remove what can be removed. Files of another user, or open over NFS, remain until the next start."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.unlink()  # a file, or a link to a checkpoint kept elsewhere


def _new_hidden(folder: Path) -> Path:
    """A new hidden name, beside the folder, that no checkpoint has."""
    return hidden(folder.parent, f"{folder.name}-{os.urandom(4).hex()}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# Read


def verify(folder: Path, *, with_hashes: bool = True, share: tuple[int, int] = (0, 1)) -> Listing:
    """Verify every byte against the manifest; without hashes, only that each file has its full size.

    `share` (index, count): hash only these of the files, because other ranks hash the others. Returns what
    the folder lists. Raises BrokenCheckpoint if a file is missing, truncated or changed.
    """
    listed = listing(folder)
    index, count = share
    largest_first = sorted(listed.here.items(), key=lambda each: (-each[1].bytes, each[0]))
    for number, (name, entry) in enumerate(largest_first):
        path = folder / name
        with reading(folder, name):
            if not path.is_file():
                raise BrokenCheckpoint(folder, f"{name} is missing")
            if (size := path.stat().st_size) != entry.bytes:
                raise BrokenCheckpoint(folder, f"{name} has {size} bytes instead of {entry.bytes}")
            if with_hashes and number % count == index and _sha256(path) != entry.sha256:
                raise BrokenCheckpoint(folder, f"{name} does not match its SHA-256")
    return listed


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
    found = (folder / COMPLETE).stat()
    inode = f"{found.st_ino} {found.st_ctime_ns}"
    here = _entries(folder, MANIFEST, manifest)
    if INDEX not in here:
        return Listing(here, {}, save_id, inode)
    shards = _entries(folder, INDEX, _read(folder, INDEX), "files")
    for name, entry in shards.items():
        if here.get(name, entry) != entry:
            raise BrokenCheckpoint(folder, f"{name} is of another save")
        if (folder / name).exists():  # a pull brings those of other hosts
            here[name] = entry
    return Listing(here, shards, here[INDEX].sha256, inode)


def _read(folder: Path, name: str) -> bytes:
    with reading(folder, name):
        return read_limited(folder / name, _MAX_BYTES)


@contextlib.contextmanager
def reading(folder: Path, name: str) -> Iterator[None]:
    """Raise an error of the file as damage: it may lie on a bad sector, or on a file server that is gone."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        damage = f"{INDEX} is missing" if name == INDEX else "the save was never completed"
        raise BrokenCheckpoint(folder, damage) from None
    except OSError as error:
        damage = f"{name} cannot be read: {error.strerror}"
        is_failure = cause_of(error) is JobFailed
        raise BrokenCheckpoint(folder, damage, is_failure=is_failure) from None


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
