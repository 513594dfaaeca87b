"""A checkpoint is a folder that appears complete, is verified when read, and is never overwritten.

    tree.pt                    the state without its tensors; what each rank has saved for itself
    model.safetensors          the tensors of the entry "model" that every host has
    shard_00001.safetensors    the boxes of rank 1 of everything else, see boxes.py
    shards.json                if there are shards: their sizes and SHA-256, the same on every host
    about.json                 the step, the program's configuration and more, see `About`
    manifest.json              the sizes and SHA-256 of all these, as far as this host has them
    COMPLETE                   the SHA-256 of the manifest

All are written into a hidden folder, and flushed to the disk. Then one rename makes this folder the
checkpoint. The manifest is there because torch.load does not detect a flipped bit.

    complete    COMPLETE has the SHA-256 of the manifest, so the save has ended
    intact      and every file has its size
    verified    and every file has its SHA-256
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from mpiddp.errors import JobFailed, UserError, cause_of
from mpiddp.files import flush, read_limited
from mpiddp.text import from_here, shown

# The names in a run's folder. Its copy in object storage has the same.
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"  # what `mpiddp.log_metrics` has recorded
ATTEMPTS = "attempts.jsonl"  # how each start of the run began and ended
CONFIG, SUMMARY = "config.json", "summary.json"  # the options and the results of `mpiddp train`
WISHES = "wishes.json"  # keep, keep_every and best of its script, and the scores of each metric
PINS = "pins"  # pins/step_00001000: no run removes this checkpoint, by `mpiddp checkpoints pin`
REWIND = "REWIND"  # the step of the next resume, by `mpiddp checkpoints rewind`
RECORDS = (METRICS, ATTEMPTS, CONFIG, SUMMARY, WISHES)  # what a copy has beside the checkpoints

TREE = "tree.pt"
ABOUT = "about.json"
INDEX = "shards.json"
MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"
SUFFIX = ".safetensors"
SHARDS = "shard_"  # begins the names of the files of shards, and no key of a state
MAX_BYTES = 1 << 30  # a file of JSON is never larger
_OLD = ".old"  # ends the name of a checkpoint that is set aside
_NAME = re.compile(rf"step_([0-9]{{8,18}})({re.escape(_OLD)}[0-9]*)?")
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a mount without locks raises these
_HIDDEN = ".unfinished-"


class RunDir:
    """The paths that a run writes: its records, logs and checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / METRICS
        self.attempts = path / ATTEMPTS
        self.owner = path / "owner.json"
        self.logs = path / "logs"
        self.checkpoints = path / CHECKPOINTS

    def __str__(self) -> str:
        return from_here(self.path)


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
class About:
    """The facts of a checkpoint, as about.json has them. A new fact is a line here, with a default.

    All hosts that write must have the same facts, because a checkpoint is known by a hash of this file as well.

    Attributes:
        step, config: of the run when it saved the checkpoint.
        partial: the paths in the state that only some ranks had, as those of a pipeline's stage.
    """

    step: int
    config: Mapping[str, Any]
    partial: Sequence[Sequence[Any]] = ()

    def write(self, new: Path) -> None:
        (new / ABOUT).write_text(json.dumps(vars(self), indent=1), encoding="utf-8")

    @classmethod
    def parse(cls, content: bytes) -> About:
        """Those of about.json. Raises ValueError, TypeError or RecursionError for that of another program."""
        table = json.loads(content)
        return cls(**{name: table[name] for name in cls.__match_args__ if name in table})


@dataclass(frozen=True)
class Listing:
    """The files of a checkpoint by name, as its folder lists them."""

    here: dict[str, Entry]  # the files that this folder has to have
    shards: dict[str, Entry]  # the files of shards of all hosts; {} if nothing is sharded
    save_id: str  # a hash that the copies of one checkpoint on all hosts share
    inode: str  # the same for all hosts that see this folder on one file system

    @property
    def lacking(self) -> list[str]:
        """The files of shards that only other hosts have."""
        return [name for name in self.shards if name not in self.here]


@functools.cache
def stem_of(key: str) -> str:
    """The name of the file of an entry, without its suffix. Special characters become %2F, for example."""
    return quote(key, safe="")


def shard_of(rank: int) -> str:
    return f"{SHARDS}{rank:05d}{SUFFIX}"


def step_of(folder: Path) -> int:
    """The step in the folder's name, or in the facts of a copy with another name; -1 if they are broken."""
    if match := _NAME.fullmatch(folder.name):
        return int(match[1])
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        return int(About.parse(read_limited(folder / ABOUT, MAX_BYTES)).step)
    return -1


def name_of_step(step: int) -> str:
    return f"step_{step:08d}"


def is_set_aside(folder: Path) -> bool:
    """Whether the run has gone back to an earlier step, so that it does not resume from this one."""
    return _OLD in folder.name


def steps_among(folders: Iterable[Path], *, set_aside: bool = False) -> list[Path]:
    """Those that are named as a checkpoint, oldest first; with `set_aside`, as one that is set aside."""
    named = (f for f in folders if _NAME.fullmatch(f.name) and is_set_aside(f) == set_aside)
    return sorted(named, key=lambda f: (step_of(f), len(f.name), f.name))


def list_steps(root: Path, *, set_aside: bool = False) -> list[Path]:
    """The checkpoint folders in `root`, see `steps_among`, broken or not. Empty if `root` is missing."""
    if not root.is_dir():
        return []
    return [f for f in steps_among(root.iterdir(), set_aside=set_aside) if f.is_dir()]


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a checkpoint, broken or not, by its name or by its files."""
    is_named = folder.is_dir() and _NAME.fullmatch(folder.resolve().name) is not None
    return is_named or any((folder / name).exists() for name in (MANIFEST, COMPLETE))


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints at a path that a user names, oldest first. Raises UserError if there are none."""
    for root in (path / CHECKPOINTS, path):
        if folders := list_steps(root):
            return folders
    if is_checkpoint(path):
        return [path.resolve()]
    is_there = path.exists()
    problem = "contains no checkpoints" if is_there else f"not found (looked in {Path.cwd()})"
    raise UserError(
        f"{path} {problem}. Expected a run's folder, a folder of checkpoints, or a checkpoint."
    )


# Written


def hidden(root: Path, name: str) -> Path:
    return root / f"{_HIDDEN}{name}"


def remove_leftovers(root: Path) -> None:
    """Remove what killed runs have left. Only the owner of the run's folder may call this."""
    for leftover in root.glob(f"{_HIDDEN}*"):
        remove_hidden(leftover)


class NewFolder:
    """A hidden folder, which one rename makes the checkpoint `final`: it appears whole, or not at all."""

    def __init__(self, final: Path, name: str = "") -> None:
        """`name`: of the hidden folder, if other ranks write into it, too."""
        self.final = final
        self.path = hidden(final.parent, name or f"{final.name}-{os.urandom(4).hex()}")

    def seal(self, hashes: Mapping[str, str]) -> None:
        """Add the manifest and COMPLETE. A file whose SHA-256 is not in `hashes`, by its name, is read."""
        manifest = {
            file.name: {
                "bytes": file.stat().st_size,
                "sha256": hashes.get(file.name) or _sha256(file),
            }
            for file in sorted(self.path.iterdir())
        }
        text = json.dumps(manifest, indent=1).encode()
        (self.path / MANIFEST).write_bytes(text)
        (self.path / COMPLETE).write_text(hashlib.sha256(text).hexdigest(), encoding="utf-8")

    def publish(self) -> None:
        """Flush all files to the disk, and rename the folder. One of that name stays until then."""
        for file in (*self.path.iterdir(), self.path):
            flush(file)
        before = set_aside(self.final) if self.final.exists() else None
        self.path.rename(self.final)
        flush(self.final.parent)
        if before:
            remove_hidden(hide(before))

    def discard(self) -> None:
        remove_hidden(self.path)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint to .old, .old2 or so on, so that it no longer counts. Returns its new path."""
    names = (f"{folder.name}{_OLD}{number if number > 1 else ''}" for number in itertools.count(1))
    return folder.rename(next(p for p in map(folder.with_name, names) if not p.exists()))


def hide(folder: Path) -> Path:
    """Rename a checkpoint before its removal, so that a half-removed one never looks like a checkpoint."""
    return folder.rename(NewFolder(folder).path)


def remove_hidden(folder: Path) -> None:
    """Remove a folder. What cannot be removed, such as a file that is open over NFS, remains for now."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.unlink()  # a link to a folder, or a file, which rmtree does not remove


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# Read


def verify(folder: Path, *, with_hashes: bool = True, share: tuple[int, int] = (0, 1)) -> Listing:
    """Compare the size and the SHA-256 of each file with the manifest, and return what the folder lists.

    `share`: an index and a count, if so many ranks divide the hashing among them. Raises BrokenCheckpoint.
    """
    listed = list_files(folder)
    index, count = share
    largest_first = sorted(listed.here.items(), key=lambda row: (-row[1].bytes, row[0]))
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
    try:
        verify(folder, with_hashes=with_hashes)
    except BrokenCheckpoint:
        return False
    return True


class Hold(io.FileIO):
    """Keeps runs from removing the checkpoint, until the close, or as long as anything refers to this.

    Raises BrokenCheckpoint; FileNotFoundError or BlockingIOError if its run removes it just now.
    """

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        try:
            with reading(folder, COMPLETE):
                super().__init__(folder / COMPLETE)
        except BrokenCheckpoint:
            folder.stat()
            raise
        lock(self, fcntl.LOCK_SH)
        if (folder / COMPLETE).stat().st_ino != os.fstat(self.fileno()).st_ino:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))

    def close(self) -> None:
        # The lock would outlive the close of a file that a DataLoader's worker has inherited.
        if not self.closed and os.getpid() == self._pid:
            lock(self, fcntl.LOCK_UN)
        super().close()

    __del__ = close


def lock(file: BinaryIO, kind: int) -> None:
    """Lock it, if its file system has locks. Raises BlockingIOError if another process has the lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def list_files(folder: Path) -> Listing:
    """The files that the folder lists. This reads no tensors. Raises BrokenCheckpoint."""
    expected, manifest = _read(folder, COMPLETE), _read(folder, MANIFEST)
    save_id = hashlib.sha256(manifest).hexdigest()
    if save_id.encode() != expected:
        raise BrokenCheckpoint(folder, f"{MANIFEST} does not match its SHA-256")
    stat = (folder / COMPLETE).stat()
    inode = f"{stat.st_ino} {stat.st_ctime_ns}"
    here = _entries(folder, MANIFEST, manifest)
    if INDEX not in here:
        return Listing(here, {}, save_id, inode)
    shards = _entries(folder, INDEX, _read(folder, INDEX), "files")
    for name, entry in shards.items():
        # `mpiddp hosts pull` brings shards of other hosts, for example.
        if (folder / name).exists():
            here[name] = entry
    return Listing(here, shards, here[INDEX].sha256, inode)


def _read(folder: Path, name: str) -> bytes:
    with reading(folder, name):
        return read_limited(folder / name, MAX_BYTES)


@contextlib.contextmanager
def reading(folder: Path, name: str) -> Iterator[None]:
    """Raise an error of the file as damage, because a bad sector or a lost file server may cause it."""
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
        entries = {name: Entry(**row) for name, row in rows}
        if not all(type(entry.bytes) is int for entry in entries.values()):
            raise TypeError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BrokenCheckpoint(folder, f"{file} is not a table of files") from None
    for name in entries:
        if "/" in name:  # it could lead out of the folder
            raise BrokenCheckpoint(
                folder, f'{file} lists "{shown(name)}", which is not the name of a file'
            )
    return entries
