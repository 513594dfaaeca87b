"""Find the checkpoint to resume from, and bring its files to each host.

    candidates of every host → one choice → verified where it lies → sent to the hosts that lack files → read

Each host lists its own disk, because it may be the only one that has the newest checkpoint. All ranks then
choose the same one. The search writes nothing. Files travel, objects do not: every rank reads the checkpoint
from its own host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from mpiddp.checkpoints.bucket import local_path, pull
from mpiddp.checkpoints.contents import read
from mpiddp.checkpoints.folder import (
    COMPLETE,
    INDEX,
    About,
    BrokenCheckpoint,
    Entry,
    NewFolder,
    checkpoints_at,
    is_set_aside,
    list_files,
    list_steps,
    name_of_step,
    step_of,
    verify,
)
from mpiddp.checkpoints.resumed import Resumed
from mpiddp.checkpoints.retention import hold, set_aside
from mpiddp.checkpoints.run_folder import Run
from mpiddp.checkpoints.send import Transfer, send_files
from mpiddp.checkpoints.tensor_files import reason_of
from mpiddp.errors import JobFailed, UserError, named_by
from mpiddp.runtime.job.session import current
from mpiddp.runtime.rank_log import log
from mpiddp.text import counted, from_here


class Candidate(NamedTuple):
    """A checkpoint on one host, or why it cannot be used."""

    rank: int  # the first one of the host
    path: str
    step: int
    of_this_run: bool
    is_named: bool = False  # the user has named the checkpoint itself
    save_id: str = ""  # the same on all hosts of a save
    inode: str = ""  # the same on all hosts that see the same folder
    not_finite: str = ""  # why training cannot go on from it
    previous: int = -1  # the step that was saved before it
    lacking: Sequence[str] = ()  # the files of shards that this host lacks
    damage: str = ""  # a sentence without its period
    is_failure: bool = False  # a machine failed

    @property
    def order(self) -> tuple[bool, bool, int]:
        """The highest is chosen: those of this run come first, unless the user goes back to a named one."""
        return self.of_this_run, not self.not_finite, self.step

    def damaged(self, error: Exception) -> Candidate:
        """The same, with the path in the sentence if the user has named it."""
        damage = f"{self.path}: {error}" if self.is_named else str(error)
        return self._replace(damage=damage, is_failure=getattr(error, "is_failure", False))


def resume(run: Run, path: str | os.PathLike[str] | None, step: int | None) -> Resumed | None:
    """Restore the newest checkpoint, see `Checkpoints.resume`. A collective: every rank must call it."""
    with run.together(), named_by(""):
        if path is not None and run.is_writer:
            pull(path)
    copies = find(run, None if path is None else local_path(path))
    if not copies:
        return None
    files, chosen = bring(run, copies), copies[0]
    folders = {file.parent for file in files.values()}
    is_seed = not chosen.of_this_run and step is not None
    with run.together():
        run.held += [hold(folder) for folder in folders if (folder / COMPLETE).exists()]
        resumed = read(files, run.rank, local_rank=run.local_rank)
        if is_seed:
            resumed = replace(resumed, step=step or 0)
        else:
            _refuse_another(chosen, resumed, run.records.config)
    where = f" on {run.coordinator.hostnames[chosen.rank]}" if chosen.rank else ""
    log.info(f"resuming from {from_here(chosen.path)}{where}: step {resumed.step}")
    with run.together(), named_by("cannot rename"):
        if run.is_writer:
            _set_later_ones_aside(run, chosen, folders, resumed.step)
    run.step, run.unloaded = -1 if is_seed else resumed.step, resumed._unloaded
    run.first = resumed.step
    current().stop.steps_before = resumed.step
    return resumed


def _refuse_another(chosen: Candidate, resumed: Resumed, config: Mapping[str, Any]) -> None:
    """Raise UserError for a checkpoint of another config, or one whose folder was renamed."""
    path, saved = from_here(chosen.path), resumed.config
    if chosen.of_this_run and chosen.step != resumed.step:
        name = name_of_step(resumed.step)
        raise UserError(f"{path} is the checkpoint of step {resumed.step}: rename it to {name}.")
    different = [
        f"{name} {saved.get(name)!r}, now {config.get(name)!r}"
        for name in sorted(saved.keys() | config.keys())
        if saved.get(name) != config.get(name)
    ]
    if different:
        raise UserError(
            f"{path} was made with another config: {'; '.join(different)}. "
            "Use the same config, or name another folder."
        )


def _set_later_ones_aside(run: Run, chosen: Candidate, folders: set[Path], step: int) -> None:
    """Rename the checkpoints of later steps, because a restart would resume from the newest of them."""
    again = [folder for folder in folders if chosen.of_this_run and is_set_aside(folder)]
    for renamed in set_aside(run.dir.checkpoints, step, *again):
        log.info(f"renamed to {renamed.name}: its step is not before that of the resume")
        if bucket := run.bucket:
            bucket.rename(renamed.stem, renamed.name)
    if chosen.of_this_run and chosen.is_named:
        run.records.note(event="went back", to=Path(chosen.path).name)


# Find it


def find(run: Run, path: Path | None = None) -> list[Candidate]:
    """The newest verified checkpoint on the hosts that together have all of it; [] if there is none.

    All ranks must call this, and all get the same. Raises what `Checkpoints.resume` raises.

    Args:
        path: a checkpoint, or a folder of a run. Of another run: it counts until this run has a checkpoint
            of its own. Of this run: the user goes back to it, once.
    """
    root = run.dir.checkpoints
    if path is not None and path.resolve().parent == root.resolve():
        path = root / path.resolve().name  # a link may have any name
        goes_back = not any(run.gather(run.records.went_back_to() == path.name))
        if not goes_back:
            log.info(f"{path} is not used: the run has gone back to it before, and continues")
            path = None
    with run.together(), named_by(""):
        here = _on_this_host(run, path) if run.local_rank == 0 else []
    candidates = _gathered(run, here)
    copies: list[Candidate] = []
    while usable := [candidate for candidate in candidates if not candidate.damage]:
        best = max(usable, key=lambda candidate: (candidate.order, -candidate.rank))
        copies = [c for c in usable if (c.save_id, c.order) == (best.save_id, best.order)]
        checked = _checked(run, copies)
        candidates = [c for c in candidates if c not in copies] + checked
        if copies == checked:
            break
        copies = []
    _log_passed(candidates, copies)
    if not copies and (candidates or path is not None):
        _refuse(run, path, candidates)
    if copies and copies[0].of_this_run and not copies[0].is_named:
        if path is not None:
            log.info(f"{path} is not used: {run.dir} has checkpoints of its own")
        _refuse_long_way(run, candidates, copies[0])
    return copies


def _refuse_long_way(run: Run, candidates: Sequence[Candidate], chosen: Candidate) -> None:
    """Raise UserError, on all ranks, if the run would lose more than its last interval to a state."""
    lost = [c for c in candidates if c.of_this_run and c.not_finite and not c.damage]
    newest = max(lost, key=lambda candidate: candidate.step, default=chosen)
    if chosen.not_finite or newest.previous <= chosen.step:
        return
    with run.together():
        raise UserError(
            f"{run.dir}: {Path(newest.path).name} is not finite: {newest.not_finite}. The newest finite "
            f"checkpoint is {newest.step - chosen.step} steps older: to go back to it, resume from "
            f'{from_here(chosen.path)}. To go on from the newest, use not_finite="keep".'
        )


def _gathered(run: Run, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates of all ranks. All ranks must call this."""
    return [Candidate(*row) for rows in run.gather(candidates) for row in rows]


def _checked(run: Run, copies: Sequence[Candidate]) -> list[Candidate]:
    """The candidates of one save, with every byte verified. All ranks must call this."""
    if missing := set.intersection(*(set(copy.lacking) for copy in copies)):
        where = f"{min(missing)} is on none of these hosts"
        return [copy.damaged(BrokenCheckpoint(Path(copy.path), where)) for copy in copies]
    # One folder on a shared file system is verified once: the ranks of all its hosts divide its files.
    by_rank = _by_rank(run, copies)
    local, broken = by_rank[run.rank], list[Candidate]()
    if local is not None:
        sharing = [at for at, copy in enumerate(by_rank) if copy and copy.inode == local.inode]
        try:
            verify(Path(local.path), share=(sharing.index(run.rank), len(sharing)))
        except BrokenCheckpoint as error:
            broken.append(local.damaged(error))
    by_inode = {copy.inode: copy for copy in _gathered(run, broken)}
    return [by_inode.get(copy.inode, copy) for copy in copies]


def _by_rank(run: Run, copies: Sequence[Candidate]) -> list[Candidate | None]:
    """The copy that each rank's host has: [world_size]."""
    by_node = {run.nodes[copy.rank]: copy for copy in copies}
    return [by_node.get(node) for node in run.nodes]


def _on_this_host(run: Run, path: Path | None) -> list[Candidate]:
    """The checkpoints of this host that may be chosen, and those that are broken. Raises OSError."""
    root = run.dir.checkpoints
    candidates = [_candidate(run, folder, of_this_run=True) for folder in list_steps(root)]
    goes_back = path is not None and path.parent == root
    has_own = any(not candidate.damage for candidate in candidates)
    if path is None or (has_own and not goes_back):
        return candidates
    try:
        folders = checkpoints_at(path)
        is_named = folders == [path.resolve()]
        named = [
            _candidate(run, folder, of_this_run=goes_back, is_named=is_named)
            for folder in ([path] if is_named else folders)
        ]
    except UserError as error:
        named = [Candidate(run.rank, str(path), -1, goes_back, damage=str(error))]
    return named if goes_back else candidates + named


def _candidate(run: Run, path: Path, *, of_this_run: bool, is_named: bool = False) -> Candidate:
    candidate = Candidate(run.rank, str(path), 0, of_this_run, is_named)
    try:
        step = step_of(path) if of_this_run or not is_named else 0
        listing = list_files(path)
    except (BrokenCheckpoint, ValueError) as error:
        return candidate.damaged(error)
    about = About.of(path)
    return candidate._replace(
        step=step,
        save_id=listing.save_id,
        inode=listing.inode,
        lacking=listing.lacking,
        not_finite=about.not_finite if run.options.is_guarded else "",
        previous=about.previous,
    )


def _log_passed(candidates: Sequence[Candidate], copies: Sequence[Candidate]) -> None:
    """One sentence for each checkpoint that is passed over, at least as new as the one to resume from."""
    sentences: dict[str, None] = {}
    for candidate in candidates:
        lost = candidate.step - (copies[0].step if copies else 0)
        why = candidate.damage
        if lost > 0 and not why and candidate.not_finite:
            why = f"checkpoint {Path(candidate.path).name}: {candidate.not_finite}"
        if not why or lost < 0:
            continue
        rest = "another host has a verified copy" if copies else "no older one is verified"
        if copies and lost:
            rest = f"resuming from {Path(copies[0].path).name} ({lost} steps lost)"
        sentences[f"{why}; {rest}."] = None
    for sentence in sentences:
        log.info(sentence)


def _refuse(run: Run, path: Path | None, broken: Sequence[Candidate]) -> None:
    """Raise why no checkpoint can be used, on all ranks."""
    with run.together():
        for candidate in broken:
            if candidate.is_failure:
                raise JobFailed(f"{candidate.damage}.")
        if path is None:
            root = run.dir.checkpoints
            raise UserError(f"{root} contains no verified checkpoint. Name another folder.")
        named = {c.damage for c in broken if not c.of_this_run or c.step < 0}
        if len(named) == 1:
            raise UserError(f"{named.pop().rstrip('.')}.")
        raise UserError(f"{path}: contains no verified checkpoint.")


# Brought to the hosts that lack it


def bring(run: Run, copies: Sequence[Candidate]) -> dict[str, Path]:
    """Bring the files of a checkpoint to the hosts that lack them. A collective: every rank must call it.

    Each file travels once to each file system that lacks it. A whole checkpoint of this run becomes one of
    each host's. Others, and shards, go into a hidden folder, which the next start of the run removes.
    Returns where this host has each file, by its name.
    """
    root, first = run.dir.checkpoints, copies[0]
    files: dict[str, Entry] = {}
    if run.rank == first.rank:
        listing = list_files(Path(first.path))
        files = {**listing.here, **listing.shards}
    by_name = run.gather({name: vars(entry) for name, entry in files.items()})[first.rank]
    is_whole = first.of_this_run and INDEX not in by_name
    new = NewFolder(root / name_of_step(first.step), f"received-{first.save_id[:16]}")
    final = root / name_of_step(first.step) if is_whole else new.path
    by_rank = _by_rank(run, copies)
    transfers, places = [], {}
    for name, entry in by_name.items():
        lacks = [copy is None or name in copy.lacking for copy in by_rank]
        receivers = {run.writer_of[rank] for rank, lacks_it in enumerate(lacks) if lacks_it}
        source = next(copy for copy in copies if name not in copy.lacking)
        if receivers:
            path = Path(source.path) / name
            transfers.append(Transfer(source.rank, path, Entry(**entry), tuple(sorted(receivers))))
        local = by_rank[run.rank]
        places[name] = (final if local is None or lacks[run.rank] else Path(local.path)) / name
    if not transfers:
        return places
    log.info(f"sending {counted(len(transfers), 'file')} to the hosts that lack them")
    receives = any(run.rank in transfer.receivers for transfer in transfers)
    with run.writing_together():  # now, because later the ranks wait for each other
        if receives:
            new.path.mkdir(parents=True, exist_ok=True)
    with run.together():
        try:
            send_files(transfers, run.rank, run.group or dist.group.WORLD, new.path)
            if receives and is_whole:
                hashes = {transfer.path.name: transfer.entry.sha256 for transfer in transfers}
                new.seal(hashes)
                new.publish()
        except (OSError, RuntimeError) as error:
            raise JobFailed(
                f"{root}: cannot bring the files of other hosts: {reason_of(error)}."
            ) from None
    return places
