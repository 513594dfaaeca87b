"""Find the checkpoint to resume from, and bring its files to each host.

    candidates of every host → one choice → verified where it lies → sent to the hosts that lack files → read

Each host lists its own disk, because it may be the only one that has the newest checkpoint. All ranks then
choose the same one. The search writes nothing. Every rank reads the checkpoint from the disk of its own host,
so the hosts send each other files, and no tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from mpiddp.checkpoints import folder as folders
from mpiddp.checkpoints.bucket import local_path, pull
from mpiddp.checkpoints.contents import read
from mpiddp.checkpoints.folder import BrokenCheckpoint, Entry, name_of_step
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
    """A checkpoint on one host, as the hosts tell each other of it. See `Listing` and `About`, too."""

    rank: int  # the first rank of the host
    path: str
    step: int
    of_this_run: bool
    # The user has named the checkpoint itself, and not a folder of checkpoints.
    is_named: bool = False
    save_id: str = ""
    inode: str = ""
    not_finite: str = ""
    previous: int = -1
    lacking: Sequence[str] = ()
    damage: str = ""  # why it cannot be used, without a period
    is_failure: bool = False  # a failed machine is the reason, so it may be intact

    @property
    def order(self) -> tuple[bool, bool, int]:
        """The run resumes from the candidate with the highest one."""
        return self.of_this_run, not self.not_finite, self.step

    def damaged(self, error: Exception) -> Candidate:
        """The same checkpoint, which cannot be used because of this error."""
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
    places = {file.parent for file in files.values()}
    is_seed = not chosen.of_this_run and step is not None
    with run.together():
        run.held += [hold(place) for place in places if (place / folders.COMPLETE).exists()]
        resumed = read(files, run.rank, local_rank=run.local_rank)
        if is_seed:
            resumed = replace(resumed, step=step or 0)
        else:
            _refuse_another(chosen, resumed, run.records.config)
    where = f" on {run.coordinator.hostnames[chosen.rank]}" if chosen.rank else ""
    log.info(f"resuming from {from_here(chosen.path)}{where}: step {resumed.step}")
    with run.together(), named_by("cannot rename"):
        if run.is_writer:
            _set_later_ones_aside(run, chosen, places, resumed.step)
    run.step, run.unloaded = -1 if is_seed else resumed.step, resumed._unloaded
    run.first = resumed.step
    current().stop.steps_before = resumed.step
    return resumed


def _refuse_another(chosen: Candidate, resumed: Resumed, config: Mapping[str, Any]) -> None:
    """Raise UserError for a checkpoint of another config, or one under the name of another step."""
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


def _set_later_ones_aside(run: Run, chosen: Candidate, places: set[Path], step: int) -> None:
    """Rename the checkpoints of later steps. Otherwise a restart would resume from the newest of them."""
    again = [place for place in places if chosen.of_this_run and folders.is_set_aside(place)]
    for renamed in set_aside(run.dir.checkpoints, step, *again):
        log.info(f"renamed to {renamed.name}: its step is not before that of the resume")
        if bucket := run.bucket:
            bucket.rename(renamed.stem, renamed.name)
    if chosen.of_this_run and chosen.is_named:
        run.records.note(event="went back", to=Path(chosen.path).name)


# Find it


def find(run: Run, path: Path | None = None) -> list[Candidate]:
    """The copies of the newest verified checkpoint, on the hosts that together have all of its files.

    [] if there is none. A collective: every rank must call it, and all get the same. For `path` and for the
    errors, see `Checkpoints.resume`.
    """
    root = run.dir.checkpoints
    if path is not None and path.resolve().parent == root.resolve():
        path = root / path.resolve().name  # the user may have named a link
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
    """Raise UserError, on all ranks, if the newest finite checkpoint is more than one save back."""
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
    """The candidates of all ranks. A collective: every rank must call it."""
    return [Candidate(*row) for rows in run.gather(candidates) for row in rows]


def _checked(run: Run, copies: Sequence[Candidate]) -> list[Candidate]:
    """The copies of one checkpoint, after every byte is verified. A collective: every rank must call it."""
    if missing := set.intersection(*(set(copy.lacking) for copy in copies)):
        where = f"{min(missing)} is on none of these hosts"
        return [copy.damaged(BrokenCheckpoint(Path(copy.path), where)) for copy in copies]
    # The ranks of all hosts that see the same folder divide its files among them.
    by_rank = _by_rank(run, copies)
    local, broken = by_rank[run.rank], list[Candidate]()
    if local is not None:
        sharing = [at for at, copy in enumerate(by_rank) if copy and copy.inode == local.inode]
        try:
            folders.verify(Path(local.path), share=(sharing.index(run.rank), len(sharing)))
        except BrokenCheckpoint as error:
            broken.append(local.damaged(error))
    by_inode = {copy.inode: copy for copy in _gathered(run, broken)}
    return [by_inode.get(copy.inode, copy) for copy in copies]


def _by_rank(run: Run, copies: Sequence[Candidate]) -> list[Candidate | None]:
    """The copy on the host of each rank, if there is one: [world_size]."""
    by_node = {run.nodes[copy.rank]: copy for copy in copies}
    return [by_node.get(node) for node in run.nodes]


def _on_this_host(run: Run, path: Path | None) -> list[Candidate]:
    """The checkpoints on the disk of this host, broken or not. Raises OSError."""
    root = run.dir.checkpoints
    candidates = [_candidate(run, folder, of_this_run=True) for folder in folders.list_steps(root)]
    goes_back = path is not None and path.parent == root
    has_own = any(not candidate.damage for candidate in candidates)
    if path is None or (has_own and not goes_back):
        return candidates
    try:
        checkpoints = folders.checkpoints_at(path)
        is_named = checkpoints == [path.resolve()]
        named = [
            _candidate(run, folder, of_this_run=goes_back, is_named=is_named)
            for folder in ([path] if is_named else checkpoints)
        ]
    except UserError as error:
        named = [Candidate(run.rank, str(path), -1, goes_back, damage=str(error))]
    return named if goes_back else candidates + named


def _candidate(run: Run, path: Path, *, of_this_run: bool, is_named: bool = False) -> Candidate:
    candidate = Candidate(run.rank, str(path), 0, of_this_run, is_named)
    try:
        step = folders.step_of(path) if of_this_run or not is_named else 0
        listing = folders.list_files(path)
    except (BrokenCheckpoint, ValueError) as error:
        return candidate.damaged(error)
    about = folders.About.of(path)
    return candidate._replace(
        step=step,
        save_id=listing.save_id,
        inode=listing.inode,
        lacking=listing.lacking,
        not_finite=about.not_finite if run.options.is_guarded else "",
        previous=about.previous,
    )


def _log_passed(candidates: Sequence[Candidate], copies: Sequence[Candidate]) -> None:
    """Say why the run does not resume from checkpoints that are as new as the chosen one, or newer."""
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
    """Raise, on all ranks, why no checkpoint can be used."""
    with run.together():
        for candidate in broken:
            if candidate.is_failure:
                raise JobFailed(f"{candidate.damage}.")
        named = {c.damage for c in broken if path is not None and (not c.of_this_run or c.step < 0)}
        if len(named) == 1:
            raise UserError(f"{named.pop().rstrip('.')}.")
        root = path or run.dir.checkpoints
        raise UserError(f"{root} contains no verified checkpoint. Name another folder.")


# Brought to the hosts that lack it


def bring(run: Run, copies: Sequence[Candidate]) -> dict[str, Path]:
    """Send the files of a checkpoint to the hosts that lack them. A collective: every rank must call it.

    Each file travels once to each file system that lacks it. If the checkpoint is one of this run, and has no
    shards, the host then has a checkpoint, too. Other files go into a hidden folder, which the next start of
    the run removes. Returns by the name of each file its path on this host.
    """
    root, first = run.dir.checkpoints, copies[0]
    files: dict[str, Entry] = {}
    if run.rank == first.rank:
        listing = folders.list_files(Path(first.path))
        files = {**listing.here, **listing.shards}
    by_name = run.gather({name: vars(entry) for name, entry in files.items()})[first.rank]
    is_whole = first.of_this_run and folders.INDEX not in by_name
    new = folders.NewFolder(root / name_of_step(first.step), f"received-{first.save_id[:16]}")
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
