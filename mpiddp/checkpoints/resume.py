"""Find the checkpoint to resume from, and bring its files to each host.

    candidates of every host → one choice → verified where it lies → sent to the hosts that lack files → read

Each host lists its own disk, because it may be the only one that has the newest checkpoint. All ranks then
choose the same one. The search writes nothing. Files travel, objects do not: every rank reads the checkpoint
from its own host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
    """A complete checkpoint on one host."""

    rank: int  # the host's first
    node: int | None
    path: str
    step: int
    save_id: str  # the same on all hosts of a save
    lacking: tuple[str, ...]  # the files of shards that this host lacks
    of_this_run: bool
    is_named: bool  # the user has named the checkpoint itself

    @property
    def place(self) -> str:
        """For sentences: with the path, if the user has named it."""
        return f"{self.path}: " * self.is_named + f"checkpoint {Path(self.path).name}"

    @property
    def order(self) -> tuple[bool, int]:
        """The highest is chosen: those of this run come first, unless the user goes back to a named one."""
        return self.of_this_run, self.step


@dataclass(frozen=True)
class Damage:
    """A checkpoint that cannot be used, and why."""

    step: int
    sentence: str
    is_failure: bool = False  # a machine failed
    of_this_run: bool = False


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
    candidates, damages = list[Candidate](), list[Damage]()
    if path is not None and path.resolve().parent == run.dir.checkpoints.resolve():
        path = (
            run.dir.checkpoints / path.resolve().name
        )  # it may be a link, whose name says nothing
    with run.together(), named_by(""):
        if run.local_rank == 0:
            candidates, damages = _on_this_host(run, path)
    answers = run.gather(
        ([asdict(each) for each in candidates], [asdict(each) for each in damages])
    )
    everywhere = [
        Candidate(**{**values, "lacking": tuple(values["lacking"])})
        for found, _ in answers
        for values in found
    ]
    damages = [Damage(**values) for _, found in answers for values in found]
    incomplete: list[Candidate] = []
    while everywhere:
        best = max(everywhere, key=lambda each: (each.order, -each.rank))
        same = [
            each for each in everywhere if each.save_id == best.save_id and each.order == best.order
        ]
        missing = set.intersection(*(set(each.lacking) for each in same))
        if missing:
            incomplete.append(best)
            sentence = (
                f"{best.place}: {min(missing)} is on none of these hosts, or is of another save"
            )
            damages.append(Damage(best.step, sentence, False, best.of_this_run))
            everywhere = [each for each in everywhere if each not in same]
            continue
        own_damages = run.gather([asdict(each) for each in _damages_of_own(run, same)])
        broken = [each for each in same if own_damages[each.rank]]
        if not broken:
            break
        damages += [Damage(**each) for found in own_damages for each in found]
        everywhere = [each for each in everywhere if each not in broken]
    else:
        _log_damages(run, damages, None)
        if path is not None or damages:
            _refuse(run, path, damages)
        return None
    _log_damages(run, damages, best)
    if path is not None and best.of_this_run and not best.is_named:
        log.info(f"{path} is not used: {run.dir} has checkpoints of its own")
    same.sort(key=lambda each: each.rank)
    entries: dict[str, tuple[int, str]] = {}
    if run.rank == same[0].rank:
        listed = folder.listing(Path(same[0].path)).everywhere
        entries = {name: (each.bytes, each.sha256) for name, each in listed.items()}
    rows = run.gather(entries)[same[0].rank]
    files = {name: Entry(size, sha256) for name, (size, sha256) in rows.items()}
    # A later start may find their missing parts. It would jump forward again.
    has_newer = any(each.step > best.step and each.of_this_run for each in incomplete)
    return Found(tuple(same), files, leaves_newer=best.is_named or has_newer)


def _on_this_host(run: Run, path: Path | None) -> tuple[list[Candidate], list[Damage]]:
    """The complete checkpoints of this host that may be chosen, and those that are broken.

    Raises:
        OSError: a folder cannot be read.
    """
    own = _listed(run, run.dir.checkpoints, of_this_run=True)
    goes_back = path is not None and path.parent == run.dir.checkpoints
    if path is None or (own[0] and (not goes_back or is_restart(os.environ))):
        return own
    named: tuple[list[Candidate], list[Damage]]
    if not path.exists():
        named = [], [Damage(-1, f"{path} not found (looked in {Path.cwd()}). {_EXPECTED}")]
    elif root := folder.find_checkpoints(path):
        named = _listed(run, root, of_this_run=False)
    elif not folder.is_checkpoint(path):
        named = [], [Damage(-1, f"{path}: contains no checkpoint. {_EXPECTED}")]
    elif goes_back and path not in folder.list_steps(run.dir.checkpoints):
        named = (
            [],
            [
                Damage(
                    -1, f"{path}: the name of a checkpoint here is step_ and 8 digits. Rename it."
                )
            ],
        )
    else:
        named = _entry_of(run, path, of_this_run=goes_back, is_named=True)
    return named if goes_back else (own[0] + named[0], own[1] + named[1])


def _listed(run: Run, root: Path, *, of_this_run: bool) -> tuple[list[Candidate], list[Damage]]:
    each = [_entry_of(run, path, of_this_run=of_this_run) for path in folder.list_steps(root)]
    return [one for found, _ in each for one in found], [one for _, found in each for one in found]


def _entry_of(
    run: Run, path: Path, *, of_this_run: bool, is_named: bool = False
) -> tuple[list[Candidate], list[Damage]]:
    step = step_of(path) if of_this_run or not is_named else 0
    try:
        found = folder.listing(path)
    except BrokenCheckpoint as error:
        sentence = f"{path}: {error}" if is_named else str(error)
        return [], [Damage(step, sentence, error.is_failure, of_this_run)]
    node, lacking = run.coordinator.world.node_rank, tuple(found.lacking)
    return [
        Candidate(run.rank, node, str(path), step, found.save_id, lacking, of_this_run, is_named)
    ], []


def _damages_of_own(run: Run, same: list[Candidate]) -> list[Damage]:
    """Verify this host's part of the chosen checkpoint."""
    for each in same:
        if each.rank == run.rank:
            try:
                folder.verify(Path(each.path))
            except BrokenCheckpoint as error:
                sentence = f"{each.path}: {error}" if each.is_named else str(error)
                return [Damage(each.step, sentence, error.is_failure, each.of_this_run)]
    return []


def _log_damages(run: Run, damages: list[Damage], best: Candidate | None) -> None:
    """One sentence for each broken checkpoint at least as new as the one to resume from."""
    sentences: dict[str, None] = {}
    for each in damages:
        if each.step < 0 or (best is not None and each.step < best.step):
            continue
        if best is None:
            rest = "no older one is verified"
        elif each.step > best.step:
            lost = each.step - best.step
            rest = f"resuming from {Path(best.path).name} ({lost} steps lost)"
        else:
            rest = "another host has a verified copy"
        sentences[f"{each.sentence}; {rest}."] = None
    for sentence in sentences:
        log.info(sentence)


def _refuse(run: Run, path: Path | None, damages: list[Damage]) -> None:
    """Raise why no checkpoint can be used, on all ranks."""
    failed = next((each for each in damages if each.is_failure), None)
    with run.together():
        if failed is not None:
            raise JobFailed(f"{failed.sentence}.")
        if path is None:
            raise UserError(
                f"{run.dir.checkpoints} contains no verified checkpoint. Name another folder."
            )
        named = [each for each in damages if not each.of_this_run or each.step < 0]
        if len({each.sentence for each in named}) == 1:
            raise UserError(f"{named[0].sentence.rstrip('.')}.")
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
