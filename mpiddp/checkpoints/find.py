"""Find the checkpoint to resume from: the newest verified one on any host, or the one that the user names.

Each host searches its own disk, because it may be the only one that has the checkpoint. All ranks then
know which hosts have it, and which files each of them lacks. Nothing is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.directory import INDEX, BrokenCheckpoint, Entry, UnreadableCheckpoint
from mpiddp.checkpoints.ranks import Ranks
from mpiddp.checkpoints.run_dir import RunDir, find_checkpoints
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import named_by
from mpiddp.protocol.variables import is_restart
from mpiddp.runtime.log import log

RUN_AWAY_S, _RETRY_S = 600.0, 2.0  # while the file system of the run is not mounted
_EXPECTED = "Expected a run's folder or a checkpoint's folder."


@dataclass(frozen=True)
class Host:
    """A host that has the checkpoint: its first rank, its number, and the files of shards that it lacks."""

    rank: int
    node: int | None
    folder: str
    lacks: frozenset[str]


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from. The same on every rank."""

    hosts: tuple[Host, ...]  # that have it, all files together; the first has the folder below
    files: Mapping[str, Entry]  # of all hosts, by name
    save: str  # a hash that is the same on all hosts of this save, and on no other
    is_own: bool  # of this run
    leaves_newer: bool  # this run has later checkpoints, which it repeats
    nodes: frozenset[int | None]  # all hosts of the job

    @property
    def folder(self) -> Path:
        return Path(self.hosts[0].folder)

    def named(self, ranks: Ranks) -> str:
        """The checkpoint for the user: its path, and its host unless that is rank 0's."""
        first = self.hosts[0]
        return first.folder + (
            f" on {ranks.coordinator.hostnames[first.rank]}" if first.rank else ""
        )

    @property
    def is_sharded(self) -> bool:
        return INDEX in self.files

    def host_of(self, node: int | None) -> Host | None:
        return next((host for host in self.hosts if host.node == node), None)

    def has_all(self, node: int | None) -> bool:
        host = self.host_of(node)
        return host is not None and not host.lacks

    def lacking(self) -> list[str]:
        """The files that some host lacks."""
        if self.nodes > {host.node for host in self.hosts}:
            return list(self.files)
        return [name for name in self.files if any(name in host.lacks for host in self.hosts)]


@dataclass(frozen=True)
class _Search:
    """The result of one host: its newest verified checkpoint, or the problem if it should have one."""

    folder: str = ""
    step: int = -1
    problem: str = ""
    has_failed: bool = False  # the problem is a machine's
    broken: list[tuple[int, str]] = field(default_factory=list)  # newer ones: step and problem
    goes_back: bool = False  # the user has named one of this run's own checkpoints
    is_named: bool = False  # the user has named the checkpoint itself, not a folder of several
    is_own: bool = False  # it was found in the folder of this run
    node: int | None = None  # the host's number
    save: str = ""  # the hash of shards.json, else of the manifest: the same on all hosts of a save
    lacks: list[str] = field(default_factory=list)  # the files of shards that are not on this host


def newest(run: RunDir, ranks: Ranks, path: Path | None) -> Found | None:
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
    own, searches, holder, incomplete = _search_all(run, ranks, path)
    best = searches[holder]
    for sentence in _warnings(searches, best, ranks):
        log.info(sentence)
    if not best.folder:
        with ranks.together():
            if own and own.problem:
                raise (JobFailed if own.has_failed else UserError)(own.problem)
        return None
    same = {
        rank: each
        for rank, each in searches.items()
        if (each.step, each.save) == (best.step, best.save)
    }
    hosts = [
        Host(rank, each.node, each.folder, frozenset(each.lacks)) for rank, each in same.items()
    ]
    hosts.sort(key=lambda host: host.rank != holder)
    is_own = best.goes_back or best.is_own
    if path is not None and is_own and not best.goes_back:
        log.info(f"{path} is not used: {run} has checkpoints of its own")
    return Found(
        tuple(hosts),
        _files(Path(best.folder), holder, ranks),
        best.save,
        is_own,
        leaves_newer=best.goes_back or (is_own and any(step > best.step for step in incomplete)),
        nodes=frozenset(each.node for each in searches.values()),
    )


def _files(folder: Path, holder: int, ranks: Ranks) -> dict[str, Entry]:
    """The files of the checkpoint on all hosts. All ranks must call this."""
    own: dict[str, tuple[int, str]] = {}
    with ranks.together():
        if ranks.rank == holder:
            try:
                entries = directory.listing(folder).everywhere
            except UnreadableCheckpoint as error:
                raise JobFailed(f"{folder}: {error}.") from None
            except (BrokenCheckpoint, OSError) as error:  # it was verified a moment ago
                raise JobFailed(f"{folder} has changed: {error}.") from None
            own = {name: (entry.bytes, entry.sha256) for name, entry in entries.items()}
    gathered = ranks.gather(own)[holder]
    return {name: Entry(size, sha256) for name, (size, sha256) in gathered.items()}


def _search_all(
    run: RunDir, ranks: Ranks, path: Path | None
) -> tuple[_Search | None, dict[int, _Search], int, dict[int, str]]:
    """Search all hosts for the newest checkpoint of which all parts are there.

    Returns:
        What this host has found; what each host has found, by rank; the rank that holds the checkpoint; and
        the steps of newer checkpoints of which a part is missing, with that problem.
    """
    incomplete: dict[int, str] = {}
    while True:
        own: _Search | None = None
        with ranks.together(), named_by(""):
            if ranks.is_first_of_host:
                found = _identified(_search(run, path, incomplete))
                own = replace(found, node=ranks.coordinator.world.node_rank)
        gathered = ranks.gather(asdict(own) if own else None)
        searches = {rank: _Search(**values) for rank, values in enumerate(gathered) if values}
        holder, missing = _newest_of_all(searches)
        if not missing:
            return own, searches, holder, incomplete
        best = searches[holder]
        problem = (
            f"checkpoint {Path(best.folder).name}: {missing} is on none of these hosts, or is of "
            "another save"
        )
        if best.is_named:
            with ranks.together():
                raise UserError(f"{path}: {problem}.")
        incomplete[best.step] = problem


def _newest_of_all(searches: dict[int, _Search]) -> tuple[int, str]:
    """The rank that holds the newest checkpoint, and a file of it that no host has, or ""."""
    step = max(each.step for each in searches.values())
    candidates = {rank: each for rank, each in searches.items() if each.step == step}
    missing = {}
    for rank, each in candidates.items():
        of_save = [set(other.lacks) for other in candidates.values() if other.save == each.save]
        missing[rank] = min(set.intersection(*of_save), default="")
    first = next(iter(missing))
    rank = next((rank for rank, file in missing.items() if not file), first)
    return rank, missing[rank]


def _identified(found: _Search) -> _Search:
    """Add the hash of the save, and the files of shards that this host lacks.

    Raises:
        UserError: its shards.json is foreign.
        JobFailed: a disk has failed.
    """
    if not found.folder:
        return found
    folder = Path(found.folder)
    try:
        listing = directory.listing(folder)
    except UnreadableCheckpoint as error:
        raise JobFailed(f"{folder}: {error}.") from None
    except BrokenCheckpoint as error:
        raise UserError(f"{folder}: {error}.") from None
    return replace(found, save=listing.save, lacks=listing.lacking)


def _warnings(searches: dict[int, _Search], best: _Search, ranks: Ranks) -> list[str]:
    """One sentence for each broken checkpoint at least as new as the one to resume from.

    Hosts that share a file system see the same checkpoints, so a sentence appears only once.
    """
    newest = Path(best.folder) if best.folder else None
    sentences: dict[str, str] = {}
    for rank, found in searches.items():
        for step, problem in found.broken:
            names_host = (ranks.coordinator.world.num_nodes or 1) > 1
            host = f" ({ranks.coordinator.hostnames[rank]})" if names_host else ""
            rest = "another host has a verified copy"
            if step > best.step:
                rest = consequence(step, newest)
            sentences.setdefault(problem, f"{problem}{host}; {rest}.")
    return list(sentences.values())


def consequence(broken: int, newest: Path | None) -> str:
    """A phrase for the consequence of a broken checkpoint of step `broken`; `newest` is a verified one."""
    if newest is None:
        return "no older one is verified"
    return f"resuming from {newest.name} ({broken - directory.step_of(newest)} steps lost)"


def _search(run: RunDir, path: Path | None, skip: dict[int, str]) -> _Search:
    """Find the checkpoint on this host.

    Args:
        skip: the problems of checkpoints that no host can resume from, by their steps.

    Raises:
        OSError: a folder cannot be read.
    """
    root = run.checkpoints
    goes_back = path is not None and path.resolve().parent == root.resolve()
    if path is None or is_restart(os.environ) or not goes_back:
        problem = ""
        if path is None and directory.list_steps(root):
            problem = f"{root} contains no verified checkpoint. Name another folder."
        own = replace(_newest_in(root, problem, skip), is_own=True)
        if path is None or own.folder or own.has_failed:
            return own
    if not path.exists():
        return _Search(problem=f"{path} not found (looked in {Path.cwd()}). {_EXPECTED}")
    if checkpoints := find_checkpoints(path):
        return _newest_in(checkpoints, f"{path}: contains no verified checkpoint.", skip)
    if not directory.is_checkpoint(path):
        return _Search(problem=f"{path}: contains no checkpoint. {_EXPECTED}")
    try:
        directory.verify(path)
    except BrokenCheckpoint as error:
        has_failed = isinstance(error, UnreadableCheckpoint)
        return _Search(problem=f"{path}: {error}.", has_failed=has_failed)
    step = directory.step_of(path) if goes_back else 0
    return _Search(str(path), step, is_named=True, goes_back=goes_back)


def _newest_in(root: Path, problem: str, skip: dict[int, str]) -> _Search:
    verified, errors = directory.survey(root, skip)
    broken = [(step, str(error)) for step, error in errors]
    if verified is not None:
        return _Search(str(verified), directory.step_of(verified), broken=broken)
    for _, error in errors:
        if isinstance(error, UnreadableCheckpoint):
            return _Search(problem=f"{root}: {error}.", has_failed=True, broken=broken)
    return _Search(problem=problem, broken=broken)


def wait_for_run(folder: Path, ranks: Ranks) -> None:
    """Wait until a host has the folder of the run that is restarted. Its file server may be away.

    All ranks must call this.

    Raises:
        JobFailed: no host has it after RUN_AWAY_S.
    """
    since = time.monotonic()
    says_so = False
    while True:
        is_here = ranks.is_first_of_host and _is_there(folder)
        is_late = time.monotonic() - since > RUN_AWAY_S
        answers = ranks.gather((is_here, is_late))
        if any(here for here, _ in answers):
            return
        if answers[0][1]:
            raise JobFailed(
                f"{folder.parent} is not there any more: no host can read {folder.name}."
            )
        if not says_so:
            says_so = True
            log.info(f"{folder.parent} is not there; waiting for its file system …")
        time.sleep(_RETRY_S)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
