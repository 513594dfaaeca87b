"""Resume a run from the newest verified checkpoint that its hosts and its bucket have.

    list → choose → fetch → read → set later ones aside

Every rank calls every function here, and all get the same result, because each decides by what the ranks have
told each other. Each rank reads the disk of its own host, so the hosts send each other files, and no tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from mpiddp.checkpoints import folders
from mpiddp.checkpoints.contents import read
from mpiddp.checkpoints.folders import REWIND, WISHES, BrokenCheckpoint, Entry, Hold, name_of_step
from mpiddp.checkpoints.resumed import Resumed
from mpiddp.checkpoints.retention import Wishes, pinned_in, read_file
from mpiddp.checkpoints.run_folder import Run
from mpiddp.checkpoints.send import Transfer, send_files
from mpiddp.checkpoints.tensor_files import reason_of
from mpiddp.errors import JobFailed, UserError, named_by
from mpiddp.runtime.job.session import current
from mpiddp.runtime.rank_log import log
from mpiddp.text import counted, from_here


class Copy(NamedTuple):
    """A checkpoint of one host, or of the bucket. `save_id`, `inode` and `lacking`: see `Listing`."""

    rank: int  # the first rank of the host; 0 for the bucket
    path: str
    step: int
    save_id: str = ""
    inode: str = ""
    lacking: Sequence[str] = ()
    damage: str = ""  # why it cannot be used, without a period
    is_failure: bool = False  # a failed machine is the reason, so it may be intact
    in_bucket: bool = False  # rank 0 has to download it first

    def damaged(self, error: BrokenCheckpoint) -> Copy:
        return self._replace(damage=str(error), is_failure=error.is_failure)


def resume(run: Run) -> Resumed | None:
    """Restore the newest checkpoint, see `Checkpoints.resume`. A collective: every rank must call it."""
    step, copies = list_copies(run)
    copies, chosen = choose(run, copies)
    report(run, copies, chosen)
    if not chosen:
        return None
    files = fetch(run, chosen)
    with run.together():
        here = {file.parent for file in files.values()}
        held = [Hold(folder) for folder in here]
        for folder in here:
            run.is_verified(folder, is_new=True)  # so that the first save need not read it again
        resumed = read(files, run.rank, local_rank=run.local_rank, held=held)
        require_same_run(run, chosen[0], resumed)
    where = f" on {run.coordinator.hostnames[chosen[0].rank]}" if chosen[0].rank else ""
    log.info(f"resuming from {from_here(chosen[0].path)}{where}: step {resumed.step}")
    with run.together(), named_by("cannot rename"):
        if run.is_writer:
            for folder in folders.list_steps(run.dir.checkpoints):  # or a restart would resume them
                if folders.step_of(folder) > resumed.step:
                    aside = folders.set_aside(folder).name
                    log.info(f"renamed to {aside}: its step is not before that of the resume")
            if run.bucket:
                run.bucket.set_aside(resumed.step)
            if step >= 0:  # done; a kill before this line only repeats it
                (run.dir.path / REWIND).unlink(missing_ok=True)
                if run.bucket:
                    run.bucket.end_rewind()
    run.step = current().stop.steps_before = resumed.step
    run.resumed = resumed
    return resumed


def list_copies(run: Run) -> tuple[int, list[Copy]]:
    """The step of `mpiddp checkpoints rewind`, or -1; and the checkpoints of all copies up to this step."""
    root, here, step, pins, aside = run.dir.checkpoints, list[Copy](), -1, set[int](), set[str]()
    with run.together(), named_by(""):
        if run.local_rank == 0:
            here = [copy_at(run, folder) for folder in folders.list_steps(root)]
            # A host that was away during a rewind has them still. The same bits may have been saved again.
            gone = {
                copy_at(run, folder).save_id for folder in folders.list_steps(root, set_aside=True)
            }
            aside = gone - {copy.save_id for copy in here} - {""}
            step = int(read_file(run.dir.path, REWIND) or -1)
            pins = pinned_in(run.dir.path)
            run.records.add_scores(Wishes.parse(read_file(run.dir.path, WISHES), ()).scores)
        if bucket := run.bucket:
            paths = [root / name for name in bucket.names() if bucket.is_whole(name)]
            here += [Copy(0, str(p), folders.step_of(p), in_bucket=True) for p in paths]
            step, pins = max(step, int(bucket.read(REWIND) or -1)), pins | bucket.pins()
    answers: list[Any] = run.gather([step, sorted(pins), here, sorted(aside)])
    steps, pinned, rows, asides = zip(*answers, strict=True)
    step = max(steps)
    run.pins.update(*pinned)
    copies = [*itertools.starmap(Copy, itertools.chain(*rows))]
    run.kept.update(copy.step for copy in copies)
    copies = [copy for copy in copies if copy.save_id not in {*itertools.chain(*asides)}]
    return step, [copy for copy in copies if step < 0 or copy.step <= step]


def copy_at(run: Run, folder: Path) -> Copy:
    copy = Copy(run.rank, str(folder), folders.step_of(folder))
    try:
        listing = folders.list_files(folder)
    except BrokenCheckpoint as error:
        return copy.damaged(error)
    return copy._replace(save_id=listing.save_id, inode=listing.inode, lacking=listing.lacking)


def choose(run: Run, copies: list[Copy]) -> tuple[list[Copy], list[Copy]]:
    """All copies, with the damage that has been found; and those of the newest checkpoint that is verified."""
    while usable := [copy for copy in copies if not copy.damage]:
        best = max(usable, key=lambda copy: (copy.step, not copy.in_bucket, -copy.rank))
        if best.in_bucket:
            copies = [copy for copy in copies if copy is not best] + download(run, best)
            continue
        alike = [c for c in usable if (c.save_id, c.step) == (best.save_id, best.step)]
        verified = verify(run, alike)
        copies = [copy for copy in copies if copy not in alike] + verified
        if not any(copy.damage for copy in verified):
            return copies, verified
    return copies, []


def download(run: Run, copy: Copy) -> list[Copy]:
    """The copy of a checkpoint that rank 0 has brought from the bucket, as one of its own disk."""
    here: list[Copy] = []
    with run.together(), named_by(""):
        if bucket := run.bucket:
            log.info(f"downloading {name_of_step(copy.step)} from {bucket.address}")
            bucket.fetch_records(run.dir.path)
            here = [copy_at(run, bucket.fetch(run.dir.path, Path(copy.path).name))]
    return [Copy(*row) for row in run.gather(here)[0]]


def verify(run: Run, copies: Sequence[Copy]) -> list[Copy]:
    """The copies of one checkpoint, after each host has read its own. Ranks that share a disk divide it."""
    if missing := set.intersection(*(set(copy.lacking) for copy in copies)):
        where = f"{min(missing)} is on none of these hosts"
        return [copy.damaged(BrokenCheckpoint(Path(copy.path), where)) for copy in copies]
    copy_of = on_each_rank(run, copies)
    damaged: Copy | None = None
    if copy := copy_of[run.rank]:
        readers = [rank for rank, c in enumerate(copy_of) if c and c.inode == copy.inode]
        try:
            folders.verify(Path(copy.path), share=(readers.index(run.rank), len(readers)))
        except BrokenCheckpoint as error:
            damaged = copy.damaged(error)
    answers: list[Any] = run.gather(damaged)
    by_inode = {copy.inode: copy for copy in itertools.starmap(Copy, filter(None, answers))}
    return [by_inode.get(copy.inode, copy) for copy in copies]


def on_each_rank(run: Run, copies: Sequence[Copy]) -> list[Copy | None]:
    """The copy on the host of each rank, if there is one: [world_size]."""
    on_node = {run.nodes[copy.rank]: copy for copy in copies}
    return [on_node.get(node) for node in run.nodes]


def report(run: Run, copies: Sequence[Copy], chosen: Sequence[Copy]) -> None:
    """Say which newer checkpoints are passed over. Raise, on all ranks, if none can be used."""
    step = chosen[0].step if chosen else -1
    for why, copy in {copy.damage: copy for copy in copies}.items():
        if not why or (lost := copy.step - step) < 0:
            continue
        rest = "another host has a verified copy" if chosen else "no older one is verified"
        if chosen and lost:
            rest = f"resuming from {Path(chosen[0].path).name} ({lost} steps lost)"
        log.info(f"{why}; {rest}.")
    if copies and not chosen:
        with run.together():
            if failed := next((copy for copy in copies if copy.is_failure), None):
                raise JobFailed(f"{failed.damage}.")
            root = run.dir.checkpoints
            raise UserError(f"{root} contains no verified checkpoint.", fix="name another folder")


def fetch(run: Run, copies: Sequence[Copy]) -> dict[str, Path]:
    """By name, the path of each file on this host. Hosts that lack a file receive it, each file system once.

    If nothing is sharded, the host then has the checkpoint, too. Shards go into a hidden folder, which a save
    removes once no rank has its files mapped.
    """
    root, first, copy_of = run.dir.checkpoints, copies[0], on_each_rank(run, copies)
    entries: dict[str, Any] = {}
    if run.rank == first.rank:
        listing = folders.list_files(Path(first.path))
        rows = {**listing.here, **listing.shards}.items()
        entries = {name: [entry.bytes, entry.sha256] for name, entry in rows}
    entries = run.gather(entries)[first.rank]
    new = folders.NewFolder(root / name_of_step(first.step), f"received-{first.save_id[:16]}")
    is_whole = folders.INDEX not in entries
    transfers, files = [], {}
    for name, entry in entries.items():
        lacks = [copy is None or name in copy.lacking for copy in copy_of]
        receivers = sorted({run.writer_of[rank] for rank in range(run.world_size) if lacks[rank]})
        source = next(copy for copy in copies if name not in copy.lacking)
        if receivers:
            path = Path(source.path) / name
            transfers.append(Transfer(source.rank, path, Entry(*entry), tuple(receivers)))
        local = copy_of[run.rank]
        target = new.final if is_whole else new.path
        files[name] = (Path(local.path) if local and not lacks[run.rank] else target) / name
    if not transfers:
        return files
    log.info(f"sending {counted(len(transfers), 'file')} to the hosts that lack them")
    receives = any(run.rank in transfer.receivers for transfer in transfers)
    with run.writing_together():  # now, because later the ranks wait for each other
        if receives:
            new.path.mkdir(parents=True, exist_ok=True)
            if not is_whole:
                (new.path / folders.COMPLETE).touch()  # for the locks of its readers
    with run.coordinator.all_or_none(timeout_s=None, exits=False):  # as long as it takes
        try:
            send_files(transfers, run.rank, run.group or dist.group.WORLD, new.path)
            if receives and is_whole:
                new.seal({transfer.path.name: transfer.entry.sha256 for transfer in transfers})
                new.publish()
        except (OSError, RuntimeError) as error:
            reason = reason_of(error)
            raise JobFailed(f"{root}: cannot bring the files of other hosts: {reason}.") from None
    return files


def require_same_run(run: Run, chosen: Copy, resumed: Resumed) -> None:
    """Raise UserError for a checkpoint of another config, or one under the name of another step."""
    path, saved, config = from_here(chosen.path), resumed.about.config, run.records.config
    if chosen.step != resumed.step:
        name = name_of_step(resumed.step)
        raise UserError(
            f"{path} is the checkpoint of step {resumed.step}.", fix=f"rename it to {name}"
        )
    names = sorted(saved.keys() | config.keys())
    pairs = [(name, saved.get(name), config.get(name)) for name in names]
    if different := [f"{name} {old!r}, now {new!r}" for name, old, new in pairs if old != new]:
        sentence = f"{path} was made with another config: {'; '.join(different)}."
        raise UserError(sentence, fix="use the same config, or name another folder")
