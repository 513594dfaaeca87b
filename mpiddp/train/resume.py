"""What --resume goes on from: the newest valid checkpoint over all hosts, wherever it lies.

Each host looks at its own disk, for it may be the only one that has it; all ranks then know which rank
holds what is gone on from, and which hosts lack it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.run_dir import RunDir, find_checkpoints
from mpiddp.errors import UserError
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.log import log
from mpiddp.train import checkpoint
from mpiddp.train.checkpoint import Saved
from mpiddp.train.config import TrainConfig

LOOK_TIMEOUT_S = 1800.0  # to read every byte of a checkpoint on a slow disk


@dataclass(frozen=True)
class Start:
    """Where a run starts; but for `saved` the same on every rank."""

    holder: int = 0  # the rank that has the checkpoint
    folder: Path | None = None  # on the holder's host; None: there is nothing to go on from
    lacking: tuple[int, ...] = ()  # one rank of each host whose --out should have it, and has not
    saved: Saved | None = None  # its contents, on the holder alone
    goes_back: bool = False  # to one of this run's own that the user has named


@dataclass(frozen=True)
class _Found:
    """What one host has: its newest valid checkpoint, or why it has none where that is wrong."""

    folder: str = ""
    step: int = -1
    problem: str = ""
    broken: list[tuple[int, str]] = field(default_factory=list)  # newer ones: step and complaint
    goes_back: bool = False  # it is the run's own, and the user has named it


def find(coordinator: Coordinator, config: TrainConfig, data: str, run: RunDir) -> Start:
    """Look on all hosts. Nothing is written. All ranks must call this.

    Args:
        data: the contents of the data set, see `Data`.

    Raises:
        SystemExit: --resume names what is no valid checkpoint of this configuration and this data, or
            does not fit what the run's folder holds; rank 0 has said so.
    """
    own: _Found | None = None
    with coordinator.all_or_none(timeout_s=LOOK_TIMEOUT_S):
        if coordinator.world.local_rank == 0:
            own = _look(config, run)
    gathered = coordinator.all_gather_json(asdict(own) if own else None, timeout_s=LOOK_TIMEOUT_S)
    finds = {rank: _Found(**values) for rank, values in enumerate(gathered) if values}
    holder = max(finds, key=lambda rank: (finds[rank].step, -rank))
    best = finds[holder]
    for sentence in _complaints(finds, best, coordinator):
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
        timeout_s=LOOK_TIMEOUT_S,
    )[holder]
    log.info(f"going on from {folder}{where}: {progress}")
    lacking = [rank for rank, found in finds.items() if found.step < best.step]
    is_own = config.resume == "auto" or (config.go_on and folder.parent == run.checkpoints)
    return Start(holder, folder, tuple(lacking if is_own else ()), saved, best.goes_back)


def set_newer_aside(
    start: Start,
    step: int,
    run: RunDir,
    coordinator: Coordinator,
    writer_ranks: list[int],
) -> None:
    """Where --resume names an older checkpoint of this run, those of later steps count no more.

    Else the newest of them would be what a restart goes on from, and the last one the result. All
    ranks must call this.

    Args:
        step: where the run goes on.
        writer_ranks: the ranks that write into the run's folder.

    Raises:
        SystemExit: they cannot be renamed; rank 0 has said so.
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
                    f"{root}: newer checkpoints cannot be renamed: {error.strerror}."
                ) from None
    for folder in moved:
        log.info(f"set aside as {folder.name}: it is of a later step than this run goes on from")


def _complaints(finds: dict[int, _Found], best: _Found, coordinator: Coordinator) -> list[str]:
    """A sentence for each broken checkpoint that is newer than what is gone on from, or equals it.

    Hosts that share a file system see the same ones: each is told once.
    """
    newest = Path(best.folder) if best.folder else None
    sentences: dict[str, str] = {}
    for rank, found in finds.items():
        for step, complaint in found.broken:
            host = (
                f" ({coordinator.hostnames[rank]})"
                if (coordinator.world.num_nodes or 1) > 1
                else ""
            )
            is_lost = step > best.step
            rest = directory.consequence(step, newest) if is_lost else "another host has it whole"
            sentences.setdefault(complaint, f"{complaint}{host}; {rest}.")
    return list(sentences.values())


def _look(config: TrainConfig, run: RunDir) -> _Found:
    """What this host has of what --resume means, or with --go-on of what this run has saved since.

    Raises:
        UserError: what another host may have would not mend it.
    """
    root, resume = run.checkpoints, config.resume
    if config.go_on:
        own = _newest(root, "")
        if own.folder or resume == "never":
            return own
    existing = directory.list_steps(root)
    if resume == "never":
        traces = (root, run.config, run.metrics, run.summary)
        if left := [path for path in traces if path.exists()]:
            raise UserError(
                f"--resume never, but --out {run} holds a run already ({left[0].name}). "
                "Name another --out, or leave --resume out to go on."
            )
        return _Found()
    if resume == "auto":
        return _newest(
            root, f"{root}: no checkpoint in it is valid. Name another --out." if existing else ""
        )
    given = Path(resume)
    expected = "Expected auto, never, a run's folder or a checkpoint's."
    if not given.exists():
        return _Found(problem=f"--resume {resume} not found (looked in {Path.cwd()}). {expected}")
    if among := find_checkpoints(given):
        found = _newest(among, f"--resume {resume}: no checkpoint in it is valid.")
    elif directory.is_checkpoint(given):
        found = _given(given)
    else:
        return _Found(problem=f"--resume {resume}: no checkpoint is there. {expected}")
    is_own = bool(found.folder) and Path(found.folder).resolve().parent == root.resolve()
    if found.folder and not is_own and existing and not config.go_on:
        raise UserError(
            f"--resume {resume}, but --out {run} holds {existing[-1].name} of its own. "
            "Name another --out, or leave --resume out to go on from there."
        )
    return replace(found, goes_back=is_own)


def _newest(root: Path, problem: str) -> _Found:
    newest, broken = directory.survey(root)
    if newest is None:
        return _Found(problem=problem, broken=broken)
    return _Found(str(newest), directory.step_of(newest), broken=broken)


def _given(folder: Path) -> _Found:
    """The very checkpoint that --resume names, whatever its folder is called."""
    try:
        directory.verify(folder)
    except directory.BrokenCheckpoint as error:
        return _Found(problem=f"--resume {folder}: {error}.")
    return _Found(str(folder), step=0)
