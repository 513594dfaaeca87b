"""Find the checkpoint to resume from, and bring its files to each host.

    candidates of every host → one choice → verified where it lies → sent to the hosts that lack files → read

Each host lists its own disk, because it may be the only one that has the newest checkpoint. All ranks then
choose the same one. The search writes nothing. Files travel, objects do not: every rank reads the checkpoint
from its own host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from mpiddp.checkpoints import folder
from mpiddp.checkpoints.folder import INDEX, BrokenCheckpoint, Entry, step_of
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.send import Transfer, send_files
from mpiddp.errors import JobFailed, UserError, named_by
from mpiddp.protocol.variables import is_restart
from mpiddp.runtime.log import log
from mpiddp.text import counted


class Candidate(NamedTuple):
    """A checkpoint on one host, or why it cannot be used."""

    rank: int  # the host's first
    path: str
    step: int
    of_this_run: bool
    is_named: bool = False  # the user has named the checkpoint itself
    save_id: str = ""  # the same on all hosts of a save
    inode: str = ""  # the same on all hosts that see the same folder
    not_finite: str = ""  # why its state is not finite
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


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from. The same on every rank."""

    hosts: list[Candidate]  # that have it, all files together, by rank
    files: Mapping[str, Entry]  # of all hosts, by name
    leaves_newer: bool  # this run has later checkpoints, which it repeats

    @property
    def path(self) -> Path:
        return Path(self.hosts[0].path)

    @property
    def of_this_run(self) -> bool:
        return self.hosts[0].of_this_run


def find(run: Run, path: Path | None = None) -> Found | None:
    """The newest verified checkpoint of any host. All ranks must call this.

    Args:
        path: a checkpoint, or a folder of a run. Of another run: it counts until this run has a checkpoint
            of its own. Of this run: the user goes back to it, but a restart does not go back again.

    Returns None if there is nothing to resume from. Raises what `Checkpoints.resume` raises.
    """
    root = run.dir.checkpoints
    if path is not None and path.resolve().parent == root.resolve():
        path = root / path.resolve().name  # it may be a link, whose name says nothing
    with run.together(), named_by(""):
        own = _on_this_host(run, path) if run.local_rank == 0 else []
    found = [Candidate(*row) for rows in run.gather(own) for row in rows]
    while usable := [each for each in found if not each.damage]:
        best = max(usable, key=lambda each: (each.order, -each.rank))
        chosen = best.save_id, best.order
        same = [each for each in usable if (each.save_id, each.order) == chosen]
        checked = _checked(run, same)
        found = [each for each in found if each not in same] + checked
        if not any(each.damage for each in checked):
            break
    broken = [each for each in found if each.damage]
    _log_passed(found, best if usable else None)
    if not usable:
        if path is not None or broken:
            _refuse(run, path, broken)
        return None
    if path is not None and best.of_this_run and not best.is_named:
        log.info(f"{path} is not used: {run.dir} has checkpoints of its own")
    listed = folder.listing(Path(best.path)).everywhere if run.rank == best.rank else {}
    rows = run.gather({name: vars(entry) for name, entry in listed.items()})
    files = {name: Entry(**entry) for name, entry in rows[best.rank].items()}
    # A later start may find the missing parts of a newer one. It would jump forward again.
    has_newer = any(
        each.step > best.step
        and each.of_this_run == best.of_this_run
        and (each.lacking or each.not_finite)
        for each in found
    )
    return Found(same, files, leaves_newer=best.is_named or has_newer)


def _checked(run: Run, same: Sequence[Candidate]) -> list[Candidate]:
    """The candidates of one save, with every byte verified. All ranks must call this."""
    missing = set.intersection(*(set(each.lacking) for each in same))
    if missing:
        where = f"{min(missing)} is on none of these hosts"
        nowhere = BrokenCheckpoint(Path(same[0].path), where)
        return [each.damaged(nowhere) for each in same]
    # One folder on a shared file system is verified once: the ranks of all its hosts divide its files.
    by_node = {run.nodes[each.rank]: each for each in same}
    inodes = [by_node[node].inode if node in by_node else None for node in run.nodes]
    damage, is_failure = "", False
    if own := by_node.get(run.nodes[run.rank]):
        sharing = [rank for rank, inode in enumerate(inodes) if inode == own.inode]
        try:
            folder.verify(Path(own.path), share=(sharing.index(run.rank), len(sharing)))
        except BrokenCheckpoint as error:
            damaged = own.damaged(error)
            damage, is_failure = damaged.damage, damaged.is_failure
    told = run.gather((damage, is_failure))
    problems = {inode: each for inode, each in zip(inodes, told, strict=True) if each[0]}
    return [
        each._replace(damage=found[0], is_failure=found[1])
        if (found := problems.get(each.inode))
        else each
        for each in same
    ]


def _on_this_host(run: Run, path: Path | None) -> list[Candidate]:
    """The checkpoints of this host that may be chosen, and those that are broken. Raises OSError."""
    root = run.dir.checkpoints
    own = [_candidate(run, each, of_this_run=True) for each in folder.list_steps(root)]
    goes_back = path is not None and path.parent == root
    has_own = any(not each.damage for each in own)
    if path is None or (has_own and (not goes_back or is_restart(os.environ))):
        return own
    try:
        named = [
            _candidate(run, each, of_this_run=goes_back, is_named=each == path.resolve())
            for each in folder.checkpoints_at(path)
        ]
    except UserError as error:
        named = [Candidate(run.rank, str(path), -1, goes_back, damage=str(error))]
    return named if goes_back else own + named


def _candidate(run: Run, path: Path, *, of_this_run: bool, is_named: bool = False) -> Candidate:
    found = Candidate(run.rank, str(path), 0, of_this_run, is_named)
    try:
        found = found._replace(step=step_of(path) if of_this_run or not is_named else 0)
        listed = folder.listing(path)
        inode = folder.identity(path)
    except (BrokenCheckpoint, ValueError) as error:
        return found.damaged(error)
    reason = folder.not_finite(path)
    return found._replace(
        save_id=listed.save_id, inode=inode, not_finite=reason, lacking=listed.lacking
    )


def _log_passed(found: list[Candidate], best: Candidate | None) -> None:
    """One sentence for each checkpoint that is passed over, at least as new as the one to resume from."""
    sentences: dict[str, None] = {}
    for each in found:
        lost = each.step - best.step if best else 0
        why = each.damage
        if each.not_finite and lost > 0:
            why = why or f"checkpoint {Path(each.path).name}: {each.not_finite}"
        if not why or each.step < 0 or lost < 0:
            continue
        rest = "no older one is verified" if best is None else "another host has a verified copy"
        if best is not None and lost:
            rest = f"resuming from {Path(best.path).name} ({lost} steps lost)"
        sentences[f"{why}; {rest}."] = None
    for sentence in sentences:
        log.info(sentence)


def _refuse(run: Run, path: Path | None, broken: list[Candidate]) -> None:
    """Raise why no checkpoint can be used, on all ranks."""
    with run.together():
        for each in broken:
            if each.is_failure:
                raise JobFailed(f"{each.damage}.")
        if path is None:
            root = run.dir.checkpoints
            raise UserError(f"{root} contains no verified checkpoint. Name another folder.")
        named = {each.damage for each in broken if not each.of_this_run or each.step < 0}
        if len(named) == 1:
            raise UserError(f"{named.pop().rstrip('.')}.")
        raise UserError(f"{path}: contains no verified checkpoint.")


# Brought to the hosts that lack it


def bring(run: Run, found: Found) -> dict[str, Path]:
    """Bring the checkpoint's files to the hosts that lack them. A collective: every rank must call it.

    Each file travels once to each file system that lacks it. A whole checkpoint of this run becomes one of
    each host's. Others, and shards, go into a hidden folder, which the next start of the run removes.
    Returns where this host has each file, by its name.
    """
    root = run.dir.checkpoints
    by_node = {run.nodes[each.rank]: each for each in found.hosts}

    def lacks(rank: int, name: str) -> bool:
        own = by_node.get(run.nodes[rank])
        return own is None or name in own.lacking

    transfers = []
    for name, entry in found.files.items():
        receivers = {run.writer_of[rank] for rank in range(run.world_size) if lacks(rank, name)}
        source = next(each for each in found.hosts if name not in each.lacking)
        if receivers:
            path = Path(source.path) / name
            transfers.append(Transfer(source.rank, path, entry, tuple(sorted(receivers))))
    new = folder.hidden(root, f"received-{found.hosts[0].save_id[:16]}")
    is_whole = found.of_this_run and INDEX not in found.files
    final = root / found.path.name if is_whole else new
    if transfers:
        log.info(f"sending {counted(len(transfers), 'file')} to the hosts that lack them")
        receives = any(run.rank in each.receivers for each in transfers)
        with run.writing_together():  # before any rank waits for another
            if receives:
                new.mkdir(parents=True, exist_ok=True)
        with run.together():
            try:
                send_files(transfers, run.rank, run.group or dist.group.WORLD, new)
                if receives and is_whole:
                    hashes = {each.path.name: each.entry.sha256 for each in transfers}
                    folder.complete(new, final, hashes)
            except (OSError, RuntimeError) as error:
                reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
                raise JobFailed(
                    f"{root}: cannot bring the files of other hosts: {reason}."
                ) from None
    own = by_node.get(run.nodes[run.rank])
    return {
        name: Path(own.path) / name if own and not lacks(run.rank, name) else final / name
        for name in found.files
    }
