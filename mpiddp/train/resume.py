"""Find the checkpoint to resume from: the newest valid one on any host, or the one that --resume names.

Each host searches its own disk, because it may be the only one that has the checkpoint. All ranks then
know which rank holds it and which hosts lack it.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.run_dir import RunDir, find_checkpoints
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import named_by
from mpiddp.protocol import RESTART_COUNT
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.log import log
from mpiddp.train import checkpoint
from mpiddp.train.checkpoint import Saved
from mpiddp.train.config import TrainConfig

RUN_AWAY_S, _RETRY_S = 600.0, 2.0  # while the file system of the run is not mounted
SEARCH_TIMEOUT_S = 1800.0  # to read every byte of a checkpoint on a slow disk


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from. All fields but `saved` are the same on every rank."""

    holder: int = 0  # the rank that has the checkpoint
    folder: Path | None = None  # on the holder's host; None: there is nothing to resume from
    lacking: tuple[int, ...] = ()  # one rank of each host whose --out should have it but does not
    saved: Saved | None = None  # its contents, only on the holder
    goes_back: bool = False  # the user has named one of this run's own checkpoints


@dataclass(frozen=True)
class _Found:
    """The search result of one host: its newest valid checkpoint, or the problem if it should have one."""

    folder: str = ""
    step: int = -1
    problem: str = ""
    broken: list[tuple[int, str]] = field(default_factory=list)  # newer ones: step and problem
    goes_back: bool = False  # the user has named one of this run's own checkpoints


def find(coordinator: Coordinator, config: TrainConfig, data: str, run: RunDir) -> Start:
    """Search all hosts, without writing anything. All ranks must call this.

    Args:
        data: the contents of the data set, see `Data`.

    Raises:
        SystemExit: --resume does not name a valid checkpoint of this configuration and this data, or
            contradicts the contents of the run's folder. Rank 0 has printed the error.
    """
    if config.go_on and os.environ.get(RESTART_COUNT, "0") != "0":
        _wait_for_run(run, coordinator, config.timeout)
    own: _Found | None = None
    with coordinator.all_or_none(timeout_s=SEARCH_TIMEOUT_S):
        if coordinator.world.local_rank == 0:
            with named_by("--out" if config.resume in ("auto", "never") else "--resume"):
                own = _search(config, run)
    gathered = coordinator.all_gather_json(asdict(own) if own else None, timeout_s=SEARCH_TIMEOUT_S)
    finds = {rank: _Found(**values) for rank, values in enumerate(gathered) if values}
    holder = max(finds, key=lambda rank: (finds[rank].step, -rank))
    best = finds[holder]
    for sentence in _warnings(finds, best, coordinator):
        log.info(sentence)
    if not best.folder:
        with coordinator.all_or_none():
            if own and own.problem:
                raise UserError(own.problem)
        return Start()

    folder = Path(best.folder)
    saved = None
    with coordinator.all_or_none():
        if coordinator.world.rank == holder:
            saved = checkpoint.read(folder, config, data)
    where = "" if holder == 0 else f" on {coordinator.hostnames[holder]}"
    progress = coordinator.all_gather_json(
        f"step {saved.progress.step}, epoch {saved.progress.epoch}" if saved else "",
        timeout_s=SEARCH_TIMEOUT_S,
    )[holder]
    log.info(f"resuming from {folder}{where}: {progress}")
    lacking = [rank for rank, found in finds.items() if found.step < best.step]
    is_own = config.resume == "auto" or (config.go_on and folder.parent == run.checkpoints)
    return Start(holder, folder, tuple(lacking if is_own else ()), saved, best.goes_back)


def _wait_for_run(run: RunDir, coordinator: Coordinator, timeout_s: float) -> None:
    """Wait until a host has the folder of the run that is restarted. Its file server may be away.

    All ranks must call this.

    Raises:
        JobFailed: no host has it after RUN_AWAY_S.
    """
    since = time.monotonic()
    says_so = False
    while True:
        is_here = coordinator.world.local_rank == 0 and _is_there(run.config)
        is_late = time.monotonic() - since > RUN_AWAY_S
        answers = coordinator.all_gather_json((is_here, is_late), timeout_s=timeout_s)
        if any(here for here, _ in answers):
            return
        if answers[0][1]:
            raise JobFailed(f"{run} is not there any more: no host can read {run.config.name}.")
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
    start: Start,
    step: int,
    run: RunDir,
    coordinator: Coordinator,
    writer_ranks: list[int],
) -> None:
    """If --resume names an older checkpoint of this run, rename the checkpoints of later steps.

    Otherwise a restart would resume from the newest of them. All ranks must call this.

    Args:
        step: the step that the run resumes from.
        writer_ranks: the ranks that write into the run's folder.

    Raises:
        SystemExit: they cannot be renamed. Rank 0 has printed the error.
    """
    root = run.checkpoints
    if not start.goes_back:
        return
    moved: list[Path] = []
    with coordinator.all_or_none():
        if coordinator.world.rank in writer_ranks:
            try:
                moved = directory.set_aside(root, step)
            except OSError as error:
                raise UserError(
                    f"{root}: cannot rename the newer checkpoints: {error.strerror}."
                ) from None
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


def _search(config: TrainConfig, run: RunDir) -> _Found:
    """Find the checkpoint of --resume on this host; with --go-on, the newest that this run has saved.

    Raises:
        UserError: the options are wrong, whatever the other hosts find.
    """
    root, resume = run.checkpoints, config.resume
    if config.go_on:
        own = _newest(root, "")
        if own.folder or resume == "never":
            return own
    existing = directory.list_steps(root)
    if resume == "never":
        files_of_a_run = (root, run.config, run.metrics, run.summary)
        if found_files := [path for path in files_of_a_run if path.exists()]:
            raise UserError(
                f"--resume never, but --out {run} already holds a run ({found_files[0].name}). "
                "Name another --out, or omit --resume to resume the run."
            )
        return _Found()
    if resume == "auto":
        return _newest(
            root, f"{root} contains no valid checkpoint. Name another --out." if existing else ""
        )
    given = Path(resume)
    expected = "Expected auto, never, a run's folder or a checkpoint's folder."
    if not given.exists():
        return _Found(problem=f"--resume {resume} not found (looked in {Path.cwd()}). {expected}")
    if checkpoints := find_checkpoints(given):
        found = _newest(checkpoints, f"--resume {resume}: contains no valid checkpoint.")
    elif directory.is_checkpoint(given):
        found = _given(given)
    else:
        return _Found(problem=f"--resume {resume}: contains no checkpoint. {expected}")
    is_own = bool(found.folder) and Path(found.folder).resolve().parent == root.resolve()
    if found.folder and not is_own and existing and not config.go_on:
        raise UserError(
            f"--resume {resume}, but --out {run} has its own {existing[-1].name}. "
            "Name another --out, or omit --resume to resume from that one."
        )
    return replace(found, goes_back=is_own)


def _newest(root: Path, problem: str) -> _Found:
    newest, broken = directory.survey(root)
    if newest is None:
        return _Found(problem=problem, broken=broken)
    return _Found(str(newest), directory.step_of(newest), broken=broken)


def _given(folder: Path) -> _Found:
    """The checkpoint that --resume names directly, whatever the name of its folder."""
    try:
        directory.verify(folder)
    except directory.BrokenCheckpoint as error:
        return _Found(problem=f"--resume {folder}: {error}.")
    return _Found(str(folder), step=0)
