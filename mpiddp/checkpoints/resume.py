"""Find the checkpoint to resume from, and bring its files to each host.

Each host searches its own disk, because it may be the only one that has the newest verified checkpoint. All
ranks then know which hosts have it, and which files each of them lacks. The search writes nothing.

Files travel, objects do not: after `bring`, every rank reads the checkpoint from its own host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.directory import (
    INDEX,
    BrokenCheckpoint,
    Entry,
    Listing,
    UnreadableCheckpoint,
)
from mpiddp.checkpoints.ranks import Ranks, broadcast_files
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.run_dir import RunDir, find_checkpoints, replacing
from mpiddp.checkpoints.state import HashedFile
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import from_here, named_by
from mpiddp.protocol.variables import is_restart
from mpiddp.runtime.log import log
from mpiddp.text import counted

_EXPECTED = "Expected a run's folder or a checkpoint's folder."
# The problems of checkpoints of which a part is on no host, by whether this run has made them and their step.
Incomplete = dict[tuple[bool, int], str]


@dataclass(frozen=True)
class Host:
    """The result of one host: its newest verified checkpoint, or the problem if it should have one."""

    rank: int  # the host's first
    node: int | None  # the host's number
    folder: str = ""
    step: int = -1
    problem: str = ""
    has_failed: bool = False  # the problem is a machine's
    broken: list[tuple[int, str]] = field(default_factory=list)  # newer ones: step and problem
    goes_back: bool = False  # the user has named one of this run's own checkpoints
    is_named: bool = False  # the user has named the checkpoint itself, not a folder of several
    is_own: bool = False  # it was found in the folder of this run
    save: str = ""  # the hash of shards.json, else of the manifest: the same on all hosts of a save
    lacks: frozenset[str] = frozenset()  # the files of shards that are not on this host


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from. The same on every rank."""

    hosts: tuple[Host, ...]  # that have it, all files together
    files: Mapping[str, Entry]  # of all hosts, by name
    lacking: list[str]  # the files that some host of the job lacks
    leaves_newer: bool  # this run has later checkpoints, which it repeats

    @property
    def folder(self) -> Path:
        return Path(self.hosts[0].folder)

    def named(self, ranks: Ranks) -> str:
        """The checkpoint for the user: its path, and its host unless that is rank 0's."""
        first = self.hosts[0]
        return from_here(first.folder) + (
            f" on {ranks.coordinator.hostnames[first.rank]}" if first.rank else ""
        )

    @property
    def is_own(self) -> bool:
        """Whether it is a checkpoint of this run."""
        return self.hosts[0].goes_back or self.hosts[0].is_own

    @property
    def is_sharded(self) -> bool:
        return INDEX in self.files

    def host_of(self, node: int | None) -> Host | None:
        return next((host for host in self.hosts if host.node == node), None)


def newest(run: Run, path: Path | None = None) -> Found | None:
    """Search all hosts. All ranks must call this.

    Args:
        path: a checkpoint, or a folder of a run. Of another run: it counts until this run has a checkpoint
            of its own. Of this run: the user goes back to it, but a restart does not go back again.

    Returns:
        None if there is nothing to resume from.

    Raises:
        UserError: there is no verified checkpoint at the path, or none of several in the run's folder.
        JobFailed: a disk has failed, and no host has a checkpoint that can be read.
    """
    ranks = run.ranks
    hosts, best, incomplete, own_files = _search_all(run, path)
    for sentence in _warnings(hosts, best, ranks):
        log.info(sentence)
    if not best.folder:
        with ranks.together():
            for own in hosts:
                if own.rank == ranks.rank and own.problem:
                    raise (JobFailed if own.has_failed else UserError)(own.problem)
        return None
    same = [host for host in hosts if (host.step, host.save) == (best.step, best.save)]
    same.sort(key=lambda host: host.rank != best.rank)
    if path is not None and best.is_own:
        log.info(f"{path} is not used: {run.dir} has checkpoints of its own")
    rows = [(name, entry.bytes, entry.sha256) for name, entry in own_files.items()]
    rows = ranks.gather(rows if ranks.rank == best.rank else [])[best.rank]
    files = {name: Entry(size, sha256) for name, size, sha256 in rows}
    others = len(same) < len(hosts)
    lacking = [name for name in files if others or any(name in host.lacks for host in same)]
    has_incomplete = best.is_own and any(own and step > best.step for own, step in incomplete)
    return Found(tuple(same), files, lacking, leaves_newer=best.goes_back or has_incomplete)


def _search_all(
    run: Run, path: Path | None
) -> tuple[list[Host], Host, Incomplete, Mapping[str, Entry]]:
    """Search all hosts for the newest checkpoint of which all parts are there.

    Returns:
        What each host has found; the one that holds the checkpoint; newer ones that are incomplete; and the
        files that this host's checkpoint lists.
    """
    ranks = run.ranks
    incomplete: Incomplete = {}
    while True:
        own, listing = None, Listing({}, {}, "")
        with ranks.together(), named_by(""):
            if ranks.is_first_of_host:
                found = _search(Host(ranks.rank, ranks.node_rank), run.dir, path, incomplete)
                if found.folder:
                    listing = _listing(Path(found.folder))
                own = asdict(found) | {"save": listing.save, "lacks": listing.lacking}
        hosts = [
            Host(**{**values, "lacks": frozenset(values["lacks"])})
            for values in ranks.gather(own)
            if values
        ]
        best, missing = _newest_of_all(hosts)
        if not missing:
            return hosts, best, incomplete, listing.everywhere
        problem = (
            f"checkpoint {Path(best.folder).name}: {missing} is on none of these hosts, or is of "
            "another save"
        )
        if best.is_named:
            with ranks.together():
                raise UserError(f"{path}: {problem}.")
        incomplete[best.is_own, best.step] = problem


def _newest_of_all(hosts: list[Host]) -> tuple[Host, str]:
    """The host that holds the newest checkpoint, and a file of it that no host has, or "".

    One of this run precedes those of another, also on hosts that do not have it.
    """

    def preference(host: Host) -> tuple[bool, int]:
        return bool(host.folder) and host.is_own, host.step

    highest = max(map(preference, hosts))
    candidates = [host for host in hosts if preference(host) == highest]
    missing = []
    for host in candidates:
        of_save = [other.lacks for other in candidates if other.save == host.save]
        missing.append(min(frozenset.intersection(*of_save), default=""))
    number = next((number for number, file in enumerate(missing) if not file), 0)
    return candidates[number], missing[number]


def _listing(folder: Path) -> Listing:
    """What a checkpoint that is verified lists.

    Raises:
        UserError: its shards.json is foreign.
        JobFailed: a disk has failed.
    """
    try:
        return directory.listing(folder)
    except UnreadableCheckpoint as error:
        raise JobFailed(f"{folder}: {error}.") from None
    except BrokenCheckpoint as error:
        raise UserError(f"{folder}: {error}.") from None


def _warnings(hosts: list[Host], best: Host, ranks: Ranks) -> list[str]:
    """One sentence for each broken checkpoint at least as new as the one to resume from.

    Hosts that share a file system see the same checkpoints, so a sentence appears only once.
    """
    newest = Path(best.folder) if best.folder else None
    sentences: dict[str, str] = {}
    for found in hosts:
        for step, problem in found.broken:
            names_host = (ranks.coordinator.world.num_nodes or 1) > 1
            host = f" ({ranks.coordinator.hostnames[found.rank]})" if names_host else ""
            rest = "another host has a verified copy"
            if step > best.step:
                rest = directory.consequence(step, newest)
            sentences.setdefault(problem, f"{problem}{host}; {rest}.")
    return list(sentences.values())


def _search(here: Host, run: RunDir, path: Path | None, skip: Incomplete) -> Host:
    """Find the checkpoint on this host.

    Args:
        here: this host, which has found nothing yet.
        skip: checkpoints that no host can resume from.

    Raises:
        OSError: a folder cannot be read.
    """
    root = run.checkpoints
    goes_back = path is not None and path.resolve().parent == root.resolve()
    if path is not None and goes_back:
        path = root / path.resolve().name  # it may be a link, whose name says nothing
    if path is None or is_restart(os.environ) or not goes_back:
        problem = ""
        if path is None and directory.list_steps(root):
            problem = f"{root} contains no verified checkpoint. Name another folder."
        own = _newest_in(replace(here, is_own=True), root, problem, skip)
        if path is None or own.folder or own.has_failed:
            return own
    if not path.exists():
        return replace(here, problem=f"{path} not found (looked in {Path.cwd()}). {_EXPECTED}")
    if checkpoints := find_checkpoints(path):
        return _newest_in(
            here,
            checkpoints,
            f"{path}: contains no verified checkpoint.",
            skip,
        )
    if not directory.is_checkpoint(path):
        return replace(here, problem=f"{path}: contains no checkpoint. {_EXPECTED}")
    try:
        directory.verify(path)
    except BrokenCheckpoint as error:
        has_failed = isinstance(error, UnreadableCheckpoint)
        return replace(here, problem=f"{path}: {error}.", has_failed=has_failed)
    if goes_back and path not in directory.list_steps(root):
        name = "step_ and 8 digits"
        return replace(
            here,
            problem=f"{path}: the name of a checkpoint here is {name}. Rename it.",
        )
    step = directory.step_of(path) if goes_back else 0
    return replace(here, folder=str(path), step=step, is_named=True, goes_back=goes_back)


def _newest_in(here: Host, root: Path, problem: str, skip: Incomplete) -> Host:
    of_this = {step: why for (is_own, step), why in skip.items() if is_own == here.is_own}
    verified, errors = directory.survey(root, of_this)
    broken = [(step, str(error)) for step, error in errors]
    if verified is not None:
        step = directory.step_of(verified)
        return replace(here, folder=str(verified), step=step, broken=broken)
    for _, error in errors:
        if isinstance(error, UnreadableCheckpoint):
            return replace(here, problem=f"{root}: {error}.", has_failed=True, broken=broken)
    return replace(here, problem=problem, broken=broken)


# Brought to the hosts that lack it


def bring(run: Run, found: Found) -> dict[str, Path]:
    """Bring the checkpoint's files to the hosts that lack them. A collective: every rank must call it.

    A whole checkpoint of this run becomes one of each host's, with its records. Others, and shards, go
    into a hidden folder that the next save removes.

    Returns:
        Where this host has each file, by its name.

    Raises:
        JobFailed: a host cannot read or store a file.
    """
    ranks, root = run.ranks, run.dir.checkpoints
    own = found.host_of(ranks.node_rank)
    here = {name: Path(own.folder) / name for name in found.files if own and name not in own.lacks}
    lacking = found.lacking
    if not lacking:
        return here
    keeps = _keeps(run, found)
    if found.is_own:
        _send_records(run, found, keeps=keeps)
    becomes_own = found.is_own and not found.is_sharded
    if becomes_own:
        received = root / found.folder.name
    else:
        received = directory.hidden(root, f"received-{found.hosts[0].save[:16]}")
        what = f"{counted(len(lacking), 'file')}{' of shards' if found.is_sharded else ''}"
        log.info(f"sending {what} to the hosts that lack them")
    files = []
    for name in lacking:
        host = next(host for host in found.hosts if name not in host.lacks)
        files.append((host.rank, Path(host.folder) / name, found.files[name].bytes))
    pieces = broadcast_files(files, ranks)
    problem = ""
    try:
        if keeps and becomes_own:
            root.mkdir(parents=True, exist_ok=True)
            directory.write_folder(received, lambda new: _receive(new, pieces, found))
        elif keeps:
            received.mkdir(parents=True, exist_ok=True)
            _receive(received, pieces, found)
    except (OSError, BrokenCheckpoint) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"{received}: cannot keep the files of other hosts: {reason}."
    if why := _finish(pieces):
        problem = f"{found.folder}: cannot send its files: {why}."
    with ranks.together():
        if problem:
            raise JobFailed(problem)
    return {name: here.get(name, received / name) for name in found.files}


def _keeps(run: Run, found: Found) -> bool:
    """Whether this rank stores the files for hosts that lack some."""
    own = found.host_of(run.ranks.node_rank)
    lacks = run.ranks.gather(own is None or bool(own.lacks))
    writer_of = run.file_systems.writer_of
    return any(lacks[rank] and writer == run.ranks.rank for rank, writer in enumerate(writer_of))


def _send_records(run: Run, found: Found, *, keeps: bool) -> None:
    """Copy the records of the run to the hosts that lack them. One that cannot keep them is warned."""
    ranks, holder = run.ranks, found.hosts[0].rank
    records = run.dir.metrics
    size = 0
    if ranks.rank == holder:
        with contextlib.suppress(OSError):  # a run may have none
            size = records.stat().st_size
    pieces = broadcast_files([(holder, records, ranks.gather(size)[holder])], ranks)
    problem = ""
    if keeps and ranks.rank != run.file_systems.writer_of[holder]:  # there they are already
        try:
            with replacing(records) as copy:
                for _, piece in pieces:
                    copy.write(piece)
        except OSError as error:
            problem = f"cannot keep a copy of {records.name}: {error}"
    if why := _finish(pieces):
        problem = f"cannot send {records.name}: {why}."
    ranks.warn(problem)


def _finish(pieces: Iterator[tuple[str, memoryview]]) -> str:
    """Take part in the remaining broadcasts. Returns the reason if this rank cannot read a file, else ""."""
    try:
        for _ in pieces:
            pass
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _receive(
    folder: Path, pieces: Iterator[tuple[str, memoryview]], found: Found
) -> dict[str, str]:
    """Write the pieces of files into the folder, and compare their SHA-256 with those that were saved.

    Raises:
        BrokenCheckpoint: a file has arrived damaged.
        OSError: the disk is full, …
    """
    hashes: dict[str, str] = {}
    for name, of_file in groupby(pieces, key=itemgetter(0)):
        file = HashedFile(folder / name)
        for _, piece in of_file:
            file.write(piece)
        hashes[name] = file.close()
    for name, digest in hashes.items():
        if digest != found.files[name].sha256:
            raise BrokenCheckpoint(f"{name} arrived damaged: its SHA-256 differs")
    return hashes
