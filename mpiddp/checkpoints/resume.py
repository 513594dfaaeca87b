"""Find the checkpoint to resume from, and bring its files to each host.

    candidates of every host → one choice → verified where it lies → sent to the hosts that lack files → read

Each host lists its own disk, because it may be the only one that has the newest checkpoint. All ranks then
choose the same one. The search writes nothing. Files travel, objects do not: every rank reads the checkpoint
from its own host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mpiddp.checkpoints import folder
from mpiddp.checkpoints.folder import INDEX, BrokenCheckpoint, Entry, step_of
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.send import Transfer, send_files
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import from_here, named_by
from mpiddp.protocol.variables import is_restart
from mpiddp.runtime.log import log
from mpiddp.text import counted

_EXPECTED = "Expected a run's folder or a checkpoint's folder."


@dataclass(frozen=True)
class Candidate:
    """A checkpoint on one host, or why it cannot be used."""

    rank: int  # the host's first
    node: int | None
    path: str
    step: int
    of_this_run: bool
    is_named: bool  # the user has named the checkpoint itself
    save_id: str = ""  # the same on all hosts of a save
    lacking: tuple[str, ...] = ()  # the files of shards that this host lacks
    damage: str = ""  # a sentence without its period
    is_failure: bool = False  # a machine failed

    @property
    def order(self) -> tuple[bool, int]:
        """The highest is chosen: those of this run come first, unless the user goes back to a named one."""
        return self.of_this_run, self.step

    def damaged(self, error: Exception) -> Candidate:
        """The same, with the path in the sentence if the user has named it."""
        damage = f"{self.path}: {error}" if self.is_named else str(error)
        return replace(self, damage=damage, is_failure=getattr(error, "is_failure", False))


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from. The same on every rank."""

    hosts: tuple[Candidate, ...]  # that have it, all files together
    files: Mapping[str, Entry]  # of all hosts, by name
    leaves_newer: bool  # this run has later checkpoints, which it repeats

    @property
    def path(self) -> Path:
        return Path(self.hosts[0].path)

    @property
    def of_this_run(self) -> bool:
        return self.hosts[0].of_this_run

    def named(self, run: Run) -> str:
        """The checkpoint for the user: its path, and its host unless that is rank 0's."""
        rank = self.hosts[0].rank
        return from_here(self.path) + (f" on {run.coordinator.hostnames[rank]}" if rank else "")


def find(run: Run, path: Path | None = None) -> Found | None:
    """The newest verified checkpoint of any host. All ranks must call this.

    Args:
        path: a checkpoint, or a folder of a run. Of another run: it counts until this run has a checkpoint
            of its own. Of this run: the user goes back to it, but a restart does not go back again.

    Returns:
        None if there is nothing to resume from.

    Raises:
        UserError: there is no verified checkpoint at the path, or none of several in the run's folder.
        JobFailed: a disk has failed, and no host has a checkpoint that can be read.
    """
    root = run.dir.checkpoints
    if path is not None and path.resolve().parent == root.resolve():
        path = root / path.resolve().name  # it may be a link, whose name says nothing
    with run.together(), named_by(""):
        own = _on_this_host(run, path) if run.local_rank == 0 else []
    found = _gathered(run, own)
    broken = [each for each in found if each.damage]
    while left := [each for each in found if not each.damage]:
        best = max(left, key=lambda each: (each.order, -each.rank))
        same = [each for each in left if each.save_id == best.save_id and each.order == best.order]
        missing = set.intersection(*(set(each.lacking) for each in same))
        if missing:
            name = f"checkpoint {Path(best.path).name}"
            reason = f"{name}: {min(missing)} is on none of these hosts"
            newly_broken = [each.damaged(BrokenCheckpoint(reason)) for each in same]
        else:
            newly_broken = _gathered(run, _damaged(each for each in same if each.rank == run.rank))
        if not newly_broken:
            break
        broken += newly_broken
        of_hosts = {(each.rank, each.path) for each in newly_broken}
        found = [each for each in left if (each.rank, each.path) not in of_hosts]
    else:
        _log_damages(run, broken, None)
        if path is not None or broken:
            _refuse(run, path, broken)
        return None
    _log_damages(run, broken, best)
    if path is not None and best.of_this_run and not best.is_named:
        log.info(f"{path} is not used: {run.dir} has checkpoints of its own")
    same.sort(key=lambda each: each.rank)
    entries: dict[str, tuple[int, str]] = {}
    if run.rank == same[0].rank:
        listed = folder.listing(Path(same[0].path)).everywhere
        entries = {name: (each.bytes, each.sha256) for name, each in listed.items()}
    rows = run.gather(entries)[same[0].rank]
    files = {name: Entry(size, sha256) for name, (size, sha256) in rows.items()}
    # A later start may find the missing parts of a newer one. It would jump forward again.
    has_newer = any(each.lacking and each.order > best.order for each in broken)
    return Found(tuple(same), files, leaves_newer=best.is_named or has_newer)


def _gathered(run: Run, own: list[Candidate]) -> list[Candidate]:
    """Those of all hosts. All ranks must call this."""
    rows = [row for rows in run.gather([asdict(each) for each in own]) for row in rows]
    return [Candidate(**{**row, "lacking": tuple(row["lacking"])}) for row in rows]


def _on_this_host(run: Run, path: Path | None) -> list[Candidate]:
    """The checkpoints of this host that may be chosen, and those that are broken.

    Raises:
        OSError: a folder cannot be read.
    """
    root = run.dir.checkpoints
    own = [_candidate(run, each, of_this_run=True) for each in folder.list_steps(root)]
    goes_back = path is not None and path.parent == root
    has_own = any(not each.damage for each in own)
    if path is None or (has_own and (not goes_back or is_restart(os.environ))):
        return own
    if not path.exists() or not (folder.is_checkpoint(path) or folder.find_checkpoints(path)):
        reason = ": contains no checkpoint"
        if not path.exists():
            reason = f" not found (looked in {Path.cwd()})"
        node = run.coordinator.world.node_rank
        nothing = Candidate(run.rank, node, str(path), -1, goes_back, False)
        named = [replace(nothing, damage=f"{path}{reason}. {_EXPECTED}")]
    elif given := folder.find_checkpoints(path):
        named = [_candidate(run, each, of_this_run=False) for each in folder.list_steps(given)]
    else:
        named = [_candidate(run, path, of_this_run=goes_back, is_named=True)]
    return named if goes_back else own + named


def _candidate(run: Run, path: Path, *, of_this_run: bool, is_named: bool = False) -> Candidate:
    node = run.coordinator.world.node_rank
    found = Candidate(run.rank, node, str(path), 0, of_this_run, is_named)
    try:
        step = step_of(path) if of_this_run or not is_named else 0
        found = replace(found, step=step)
        listed = folder.listing(path)
    except (BrokenCheckpoint, ValueError) as error:
        return found.damaged(error)
    return replace(found, save_id=listed.save_id, lacking=tuple(listed.lacking))


def _damaged(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those of this host's candidates that have a damaged file."""
    found = []
    for each in candidates:
        try:
            folder.verify(Path(each.path))
        except BrokenCheckpoint as error:
            found.append(each.damaged(error))
    return found


def _log_damages(run: Run, broken: list[Candidate], best: Candidate | None) -> None:
    """One sentence for each broken checkpoint at least as new as the one to resume from."""
    sentences: dict[str, None] = {}
    for each in broken:
        if each.step < 0 or (best is not None and each.step < best.step):
            continue
        if best is None:
            rest = "no older one is verified"
        elif each.step > best.step:
            lost = each.step - best.step
            rest = f"resuming from {Path(best.path).name} ({lost} steps lost)"
        else:
            rest = "another host has a verified copy"
        sentences[f"{each.damage}; {rest}."] = None
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

    Returns:
        Where this host has each file, by its name.

    Raises:
        JobFailed: a host cannot read or store a file.
    """
    root = run.dir.checkpoints
    nodes = run.gather(run.coordinator.world.node_rank)
    by_node = {each.node: each for each in found.hosts}

    def lacks(rank: int, name: str) -> bool:
        own = by_node.get(nodes[rank])
        return own is None or name in own.lacking

    transfers = []
    for name, entry in found.files.items():
        receivers = {run.writer_of[rank] for rank in range(len(nodes)) if lacks(rank, name)}
        source = next(each for each in found.hosts if name not in each.lacking)
        if receivers:
            path = Path(source.path) / name
            transfers.append(Transfer(source.rank, path, entry, tuple(sorted(receivers))))
    own = by_node.get(nodes[run.rank])
    received = folder.hidden(root, f"received-{found.hosts[0].save_id[:16]}")
    if transfers:
        log.info(f"sending {counted(len(transfers), 'file')} to the hosts that lack them")
        if found.of_this_run and INDEX not in found.files:
            _receive(run, transfers, received, final=root / found.path.name)
            received = root / found.path.name
        else:
            _receive(run, transfers, received, final=None)
    return {
        name: Path(own.path) / name if own and not lacks(run.rank, name) else received / name
        for name in found.files
    }


def _receive(run: Run, transfers: list[Transfer], new: Path, *, final: Path | None) -> None:
    """Send these files, and on the ranks that receive some make them the checkpoint `final`."""
    assert run.group is not None, "there are other ranks"
    receives = any(run.rank in each.receivers for each in transfers)
    with run.together(), run.dir.writing():  # before any rank waits for another
        if receives:
            new.mkdir(parents=True, exist_ok=True)
    with run.together():
        try:
            send_files(transfers, run.rank, run.group, new)
            if receives and final is not None:
                hashes = {each.path.name: each.entry.sha256 for each in transfers}
                folder.complete(new, final, hashes)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise JobFailed(
                f"{new.parent}: cannot bring the files of other hosts: {reason}."
            ) from None
