"""Find the checkpoint to resume from: the newest valid one on any host, or the one that the user names.

Each host searches its own disk, because it may be the only one that has the checkpoint. All ranks then
know which rank holds it and which hosts lack it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.agreement import PATIENCE_S, raised_by_all
from mpiddp.checkpoints.manifest import UnreadableCheckpoint
from mpiddp.checkpoints.run_dir import RunDir, find_checkpoints
from mpiddp.checkpoints.saved import Saved
from mpiddp.checkpoints.shards.fetch import Holder
from mpiddp.checkpoints.shards.index import INDEX
from mpiddp.checkpoints.shards.index import read as read_index
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, named_by
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.log import log

RUN_AWAY_S, _RETRY_S = 600.0, 2.0  # while the file system of the run is not mounted

Common = TypeVar("Common")


@dataclass(frozen=True)
class Source:
    """The checkpoint that the user wants to resume from."""

    path: Path | None = None  # of a checkpoint or a run; None: the newest of this run's folder
    must_be_new: bool = False  # the folder may not hold a run yet, except for `prefers_own`
    prefers_own: bool = False  # this run's own checkpoints come before `path`
    option: str = ""  # how the user has named the path: "--resume"
    expected: str = "Expected a run's folder or a checkpoint's folder."

    @property
    def named(self) -> str:
        return f"{self.option} {self.path}".strip()


@dataclass(frozen=True)
class Start(Generic[Common]):
    """The checkpoint that a run starts from. All fields but `saved` are the same on every rank."""

    holder: int = 0  # the rank that has the checkpoint
    folder: Path | None = None  # on the holder's host; None: there is nothing to resume from
    lacking: tuple[int, ...] = ()  # one rank of each host whose run should have it but does not
    saved: Saved[Common] | None = None  # its contents, only on the holder
    goes_back: bool = False  # the user has named one of this run's own checkpoints
    holders: tuple[
        Holder, ...
    ] = ()  # the hosts that have shards of it; empty if nothing is sharded
    skips_newer: bool = False  # this run has newer checkpoints that are not complete

    @property
    def leaves_newer(self) -> bool:
        """Whether the run has newer checkpoints of its own, see `set_newer_aside`."""
        return self.goes_back or self.skips_newer


@dataclass(frozen=True)
class _Found:
    """The search result of one host: its newest valid checkpoint, or the problem if it should have one."""

    folder: str = ""
    step: int = -1
    problem: str = ""
    has_failed: bool = False  # the problem is a machine's
    broken: list[tuple[int, str]] = field(default_factory=list)  # newer ones: step and problem
    goes_back: bool = False  # the user has named one of this run's own checkpoints
    is_named: bool = False  # the user has named the checkpoint itself, not a folder of several
    node: int | None = None  # the host's number
    save: str = ""  # the hash of shards.json, the same on all hosts of a save; "" if there is none
    lacks: list[str] = field(default_factory=list)  # the files of shards that are not on this host


def find(
    coordinator: Coordinator,
    run: RunDir,
    source: Source,
    read: Callable[[Path], Saved[Common]],
    describe: Callable[[Common], str],
) -> Start[Common]:
    """Search all hosts, without writing anything. All ranks must call this.

    Args:
        read: the contents of a verified checkpoint; raises UserError if it does not fit this run.
        describe: a phrase for the progress of a checkpoint: "step 5".

    Raises:
        UserError: `source` does not name a valid checkpoint that fits, or contradicts the contents of the
            run's folder.
        JobFailed: a disk has failed, and no host has a checkpoint that can be read.
    """
    own, finds, holder, incomplete = _search_all(coordinator, run, source)
    best = finds[holder]
    for sentence in _warnings(finds, best, coordinator):
        log.info(sentence)
    if not best.folder:
        with raised_by_all(coordinator):
            if own and own.problem:
                raise (JobFailed if own.has_failed else UserError)(own.problem)
        return Start()

    folder = Path(best.folder)
    saved = None
    with raised_by_all(coordinator):
        if coordinator.world.rank == holder:
            saved = read(folder)
    where = "" if holder == 0 else f" on {coordinator.hostnames[holder]}"
    described = describe(saved.common) if saved else ""
    progress = coordinator.all_gather_json(described, timeout_s=PATIENCE_S)[holder]
    log.info(f"resuming from {folder}{where}: {progress}")
    lacking = [rank for rank, found in finds.items() if found.step < best.step]
    holders = tuple(
        Holder(rank, found.node, found.folder, frozenset(found.lacks))
        for rank, found in finds.items()
        if best.save and (found.step, found.save) == (best.step, best.save)
    )
    is_newest = source.path is None and not source.must_be_new
    is_own = is_newest or (source.prefers_own and folder.parent == run.checkpoints)
    return Start(
        holder,
        folder,
        tuple(lacking if is_own else ()),
        saved,
        best.goes_back,
        holders,
        skips_newer=is_own and any(step > best.step for step in incomplete),
    )


def _search_all(
    coordinator: Coordinator, run: RunDir, source: Source
) -> tuple[_Found | None, dict[int, _Found], int, dict[int, str]]:
    """Search all hosts for the newest checkpoint of which all parts are there.

    Returns:
        What this host has found; what each host has found, by rank; the rank that holds the checkpoint; and
        the steps of newer checkpoints of which a part is missing, with that problem.
    """
    incomplete: dict[int, str] = {}
    while True:
        own: _Found | None = None
        with raised_by_all(coordinator):
            if coordinator.world.local_rank == 0:
                with named_by(source.option if source.path else run.option):
                    found = _with_shards(_search(source, run, incomplete))
                    own = replace(found, node=coordinator.world.node_rank)
        gathered = coordinator.all_gather_json(asdict(own) if own else None, timeout_s=PATIENCE_S)
        finds = {rank: _Found(**values) for rank, values in enumerate(gathered) if values}
        holder, missing = _newest_complete(finds)
        if not missing:
            return own, finds, holder, incomplete
        newest = finds[holder]
        problem = (
            f"checkpoint {Path(newest.folder).name}: {missing} is on none of these hosts, or is of "
            "another save"
        )
        if newest.is_named:
            with raised_by_all(coordinator):
                raise UserError(f"{source.named}: {problem}.")
        incomplete[newest.step] = problem


def _newest_complete(finds: dict[int, _Found]) -> tuple[int, str]:
    """The rank that holds the newest checkpoint, and a file of it that no host has, or ""."""
    newest = max(found.step for found in finds.values())
    candidates = {rank: found for rank, found in finds.items() if found.step == newest}
    missing = {}
    for rank, found in candidates.items():
        of_save = [set(each.lacks) for each in candidates.values() if each.save == found.save]
        missing[rank] = min(set.intersection(*of_save), default="")
    first = next(iter(missing))
    rank = next((rank for rank, file in missing.items() if not file), first)
    return rank, missing[rank]


def _with_shards(found: _Found) -> _Found:
    """Add the files of shards that this host lacks, if the checkpoint has any.

    Raises:
        UserError: its shards.json is foreign.
        JobFailed: a disk has failed.
    """
    if not found.folder:
        return found
    folder = Path(found.folder)
    try:
        index = read_index(folder)
        if index is None:
            return found
        files = directory.listed(folder)
    except UnreadableCheckpoint as error:
        raise JobFailed(f"{folder}: {error}.") from None
    except directory.BrokenCheckpoint as error:
        raise UserError(f"{folder}: {error}.") from None
    return replace(found, save=files[INDEX].sha256, lacks=index.lacking(files))


def wait_for_run(run: RunDir, file: Path, coordinator: Coordinator, timeout_s: float) -> None:
    """Wait until a host has `file` of the run that is restarted. Its file server may be away.

    All ranks must call this.

    Raises:
        JobFailed: no host has it after RUN_AWAY_S.
    """
    since = time.monotonic()
    says_so = False
    while True:
        is_here = coordinator.world.local_rank == 0 and _is_there(file)
        is_late = time.monotonic() - since > RUN_AWAY_S
        answers = coordinator.all_gather_json((is_here, is_late), timeout_s=timeout_s)
        if any(here for here, _ in answers):
            return
        if answers[0][1]:
            raise JobFailed(f"{run} is not there any more: no host can read {file.name}.")
        if not says_so:
            says_so = True
            log.info(f"{run} is not there; waiting for its file system …")
        time.sleep(_RETRY_S)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def set_newer_aside(
    step: int, run: RunDir, coordinator: Coordinator, writer_ranks: list[int]
) -> None:
    """Rename the run's checkpoints of later steps than the one that it resumes from.

    A restart would resume from the newest of them. All ranks must call this.

    Args:
        step: the step that the run resumes from.
        writer_ranks: the ranks that write into the run's folder.

    Raises:
        UserError, JobFailed: they cannot be renamed.
    """
    with raised_by_all(coordinator):
        if coordinator.world.rank in writer_ranks:
            rename_newer(step, run)


def rename_newer(step: int, run: RunDir) -> None:
    """The part of `set_newer_aside` of one rank that writes into the run's folder."""
    root = run.checkpoints
    try:
        moved = directory.set_aside(root, step)
    except OSError as error:
        sentence = f"{root}: cannot rename the newer checkpoints: {error.strerror}."
        raise cause_of(error, has_run=True)(sentence) from None
    for folder in moved:
        log.info(f"renamed to {folder.name}: its step is later than the one this run resumes from")


def _warnings(finds: dict[int, _Found], best: _Found, coordinator: Coordinator) -> list[str]:
    """One sentence for each broken checkpoint at least as new as the one to resume from.

    Hosts that share a file system see the same checkpoints, so a sentence appears only once.
    """
    newest = Path(best.folder) if best.folder else None
    sentences: dict[str, str] = {}
    for rank, found in finds.items():
        for step, problem in found.broken:
            host = (
                f" ({coordinator.hostnames[rank]})"
                if (coordinator.world.num_nodes or 1) > 1
                else ""
            )
            is_lost = step > best.step
            rest = (
                directory.consequence(step, newest)
                if is_lost
                else "another host has an intact copy"
            )
            sentences.setdefault(problem, f"{problem}{host}; {rest}.")
    return list(sentences.values())


def _search(source: Source, run: RunDir, skip: dict[int, str]) -> _Found:
    """Find the checkpoint of the source on this host; if it prefers its own, the newest of this run.

    Args:
        skip: the problems of checkpoints that no host can resume from, by their steps.

    Raises:
        UserError: the source is wrong, whatever the other hosts find.
    """
    root = run.checkpoints
    if source.prefers_own:
        own = _newest(root, "", skip)
        if own.folder or own.has_failed or source.must_be_new:
            return own
    existing = directory.list_steps(root)
    if source.must_be_new:
        files_of_a_run = (root, run.config, run.metrics, run.summary)
        if found_files := [path for path in files_of_a_run if path.exists()]:
            raise UserError(
                f"{source.option} never, but {run.named} already holds a run "
                f"({found_files[0].name}). "
                f"Name another {run.option}, or omit {source.option} to resume the run."
            )
        return _Found()
    given = source.path
    if given is None:
        empty = f"{root} contains no valid checkpoint. Name {run.another}."
        return _newest(root, empty if existing else "", skip)
    if not given.exists():
        return _Found(
            problem=f"{source.named} not found (looked in {Path.cwd()}). {source.expected}"
        )
    if checkpoints := find_checkpoints(given):
        found = _newest(checkpoints, f"{source.named}: contains no valid checkpoint.", skip)
    elif directory.is_checkpoint(given):
        found = _given(given, source)
    else:
        return _Found(problem=f"{source.named}: contains no checkpoint. {source.expected}")
    is_own = bool(found.folder) and Path(found.folder).resolve().parent == root.resolve()
    if found.folder and not is_own and existing and not source.prefers_own:
        raise UserError(
            f"{source.named}, but {run.named} has its own {existing[-1].name}. "
            f"Name {run.another}, or omit {source.option or 'the path'} to resume from that one."
        )
    return replace(found, goes_back=is_own)


def _newest(root: Path, problem: str, skip: dict[int, str]) -> _Found:
    newest, errors = directory.survey(root, skip)
    broken = [(step, str(error)) for step, error in errors]
    if newest is not None:
        return _Found(str(newest), directory.step_of(newest), broken=broken)
    for _, error in errors:
        if isinstance(error, UnreadableCheckpoint):
            return _Found(problem=f"{root}: {error}.", has_failed=True, broken=broken)
    return _Found(problem=problem, broken=broken)


def _given(folder: Path, source: Source) -> _Found:
    """The checkpoint that the source names directly, whatever the name of its folder."""
    try:
        directory.verify(folder)
    except directory.BrokenCheckpoint as error:
        has_failed = isinstance(error, UnreadableCheckpoint)
        return _Found(problem=f"{source.named}: {error}.", has_failed=has_failed)
    return _Found(str(folder), step=0, is_named=True)
