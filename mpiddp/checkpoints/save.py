"""One save: a step of the training only copies its tensors, and a thread writes them to the disk.

    flatten → compare → copy → (in a thread) write → settle → publish → prune → upload

At most one save is in flight. Its thread says at once if it fails. The next save waits for it, and there the
ranks tell each other, so no step in between has to synchronize them. The folder of a checkpoint is hidden
until every rank that writes into it has its files on the disk: a full disk never damages an older checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import agreement, folders
from mpiddp.checkpoints.agreement import Union, is_of_each_rank
from mpiddp.checkpoints.boxes import Copies, boxes_of
from mpiddp.checkpoints.contents import rng_states
from mpiddp.checkpoints.retention import numbers_of, pinned_in, prune
from mpiddp.checkpoints.run_folder import Run
from mpiddp.checkpoints.send import Transfer, receivers_of, send_files
from mpiddp.checkpoints.state import FlatState, is_sharded
from mpiddp.checkpoints.tensor_files import packed, reason_of
from mpiddp.errors import JobFailed, NoAnswer, UserError
from mpiddp.files import flush
from mpiddp.runtime.job.coordinator import AnotherFailed, ChannelLost
from mpiddp.runtime.job.session import current
from mpiddp.runtime.rank_log import log
from mpiddp.runtime.reports import saving

COMPARED_SAVES = 10  # in the first two saves, and in every tenth, the ranks compare all tensors
_NICER_BY = 10  # added to that of the training for the thread that writes


def save(run: Run, step: int, flat: FlatState, per_rank: FlatState) -> None:
    """Compare and copy the state, and write it in a thread. A collective, see `Checkpoints.save`."""
    agreed = agree(run, step, flat)
    if step < run.step:
        raise ValueError(
            f"step {step} is earlier than step {run.step}, which {run.dir} has already. "
            "Continue to count from the step that resume() returns."
        )
    if step == run.step:
        return
    union = agreement.union_of(run, flat, [word.digest for word in agreed])
    if len({word.values for word in agreed}) > 1:
        agreement.compare_values(run, flat)
    for entry in run.resumed._loaded if run.resumed else ():
        run.resumed.state.pop(entry, None)  # type: ignore[union-attr]
    run.resumed = None
    run.num_saves += 1
    ranks = _share(run, flat, union, per_rank)
    copies = Copies.of(boxes_of(flat, union, run.rank, is_writer=run.is_writer))
    about = folders.About(step, run.records.config, union.partial)
    has_shards = bool(union.savers) or any(map(is_sharded, flat.tensors.values()))
    if has_shards and run.ring is None and len(run.writers) > 1:
        timeout = timedelta(seconds=run.options.timeout_s)
        run.ring = dist.new_group(backend="gloo", timeout=timeout)
    run.pending = step, Save(run, about, union.tree, copies, ranks, has_shards).start()


# Compare


class Word(NamedTuple):
    """What a rank tells the others before it copies its state. For scores and pins, see `Wishes`."""

    step: int | None  # that it saves; None at the end of the run
    problem: str = ""  # in its last save
    is_saved: bool = True  # the last save is on the disk all the same
    digest: str = ""  # a hash of its keys, types, shapes and numbers
    values: str = ""  # a hash of its tensors that others may have, if these are compared now
    unloaded: Mapping[str, Sequence[str]] = {}  # by entry, tensors that it has not resumed
    scores: Mapping[
        str, Mapping[Any, float]
    ] = {}  # of rank 0, because a script may log them there alone
    pins: Sequence[int] = ()
    has_recorded: bool = False


def agree(run: Run, step: int | None, flat: FlatState | None = None) -> list[Word]:
    """Wait for the previous save, and agree on the next one. A collective: every rank must call it.

    Returns what the ranks have told each other: [world_size].

    `step` is None at the end of the run: the last save must succeed, because no other one follows.

    Raises:
        UserError: the ranks save different steps; no rank has loaded a tensor of the resumed checkpoint.
        JobFailed: the previous save has failed, and had to succeed; or a rank is silent.
    """
    run.wait()
    before, run.pending = run.pending, None
    is_saved, problem = before[1].result() if before else (True, "")
    if step is None and run.bucket and is_saved:
        problem = update_bucket(run)  # the bucket may be back by now
    word = Word(step, problem, is_saved, has_recorded=run.records.has_recorded)
    if flat is not None and run.world_size > 1:
        number = run.num_saves + 1
        is_compared = number <= 2 or number % COMPARED_SAVES == 0
        values = agreement.digest_of_values(run, flat) if is_compared else ""
        word = word._replace(digest=agreement.digest_of(flat), values=values)
    if run.resumed and step is not None:
        unloaded = {entry: sorted(names) for entry, names in run.resumed._unloaded.items()}
        word = word._replace(unloaded=unloaded)
    with contextlib.suppress(OSError):  # the file server may be away
        if run.is_writer:
            word = word._replace(pins=sorted(pinned_in(run.dir.path)))
        if run.rank == 0:
            word = word._replace(scores=run.scores())
    rows: list[Any] = run.gather([*word])
    words = [Word(*row) for row in rows]
    calls = ["close()" if word.step is None else f"save({word.step}, …)" for word in words]
    if different := run.coordinator.different(calls):
        raise UserError(
            f"the ranks save different steps: {different}.", fix="save one step on all ranks"
        )
    problems = [word.problem for word in words]
    if any(problems) and (run.options.on_save_error == "stop" or step is None):
        raise JobFailed("\n".join(run.coordinator.sentences(problems)))
    if before and all(word.is_saved for word in words):
        run.step = before[0]
    agreement.require_every_tensor_loaded([word.unloaded for word in words])
    run.records.add_scores(numbers_of(words[0].scores))
    run.pins |= {pin for word in words for pin in word.pins}
    recording = [rank for rank, word in enumerate(words) if word.has_recorded]
    if run.rank == 0 and run.num_saves == 1 and recording and not {*recording} & {*run.writers}:
        name = run.coordinator.name(recording[0])
        log.warning(f"warning: {name} calls mpiddp.log_metrics, and rank 0 does not: no records.")
    return words


# Copy


def _share(run: Run, flat: FlatState, union: Union, per_rank: FlatState) -> list[Tensor]:
    """The `per_rank` state and the random numbers of all ranks: [world_size]. A collective.

    Rank 0 gathers them, and sends them to the ranks that write; the others get []. Each is packed into one
    tensor of bytes, because it may have a hundred small tensors, and a resume gives each rank its own only.

    Rank 0 also sends its statistics of BatchNorm. Hosts without a shared disk then write the same files.
    Otherwise a resume would find two checkpoints of one step, and send one of them to all hosts.
    """
    tensors = (value.detach().to("cpu", copy=True) for value in per_rank.tensors.values())
    state = per_rank.with_tensors(tensors)
    gathered = [packed({"rng": rng_states(run.local_rank), "state": state})] * run.world_size
    if run.world_size > 1:
        dist.gather_object(gathered[0], gathered if run.rank == 0 else None, 0, group=run.group)
    if len(run.writers) > 1:
        run.to_writers = run.to_writers or dist.new_group(run.writers, backend="gloo")
    if not run.is_writer:
        return []
    if run.to_writers is not None:
        paths = filter(is_of_each_rank, flat.tensors if run.rank == 0 else ())
        sent: list[Any] = [*gathered, {path: flat.tensors[path].detach().cpu() for path in paths}]
        dist.broadcast_object_list(sent, 0, group=run.to_writers)
        *gathered, buffers = sent
        for path in flat.tensors.keys() & buffers.keys() - union.savers.keys():
            flat.tensors[path] = buffers[path]
    return [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in gathered]


# In the thread


@dataclass
class Save:
    """This rank's part of a checkpoint, copied to the memory of the host. A thread writes it.

    Attributes:
        tree: the state with a type in the place of each tensor.
        ranks: what each rank saves for itself, see `_share`.
        has_shards: each rank writes a part. Otherwise each writer has the whole state, and waits for nobody.
        hashes: by name, the SHA-256 of this host's files, as far as they are known.
        shards: the files of the shards of all ranks, and which rank gets a copy of each.
    """

    run: Run
    about: folders.About
    tree: Any
    copies: Copies
    ranks: Sequence[Tensor]
    has_shards: bool
    hashes: dict[str, str] = field(default_factory=dict)
    shards: list[Transfer] = field(default_factory=list)

    def __post_init__(self) -> None:
        final = self.run.dir.checkpoints / folders.name_of_step(self.about.step)
        # The ranks of a host write into one folder, so they have to give it the same name.
        self.number = self.run.num_saves
        self.new = folders.NewFolder(final, f"{final.name}-{self.number}")

    def start(self) -> Future[tuple[bool, str]]:
        """Write it in a thread. The result: whether it is on the disk, and what has failed, if anything."""
        # Each save has a thread of its own, because the nice value of a thread only grows.
        thread = ThreadPoolExecutor(1, "checkpoint", _renice_thread)
        result = thread.submit(self._run_in_thread)
        thread.shutdown(wait=False)
        return result

    def _run_in_thread(self) -> tuple[bool, str]:
        run, is_saved = self.run, False
        if not (self.has_shards or run.is_writer):
            return True, ""
        with saving():
            try:
                self._write_and_publish()
                is_saved = True
                self._prune()
                problem = self._upload()
            except NoAnswer:
                raise
            except Exception as error:
                problem = self._sentence(error, is_saved=is_saved)
            finally:
                if not is_saved:
                    name = f"{run.prefix}/{self.number}"
                    run.coordinator.tell_launcher("not_saved", save=name)
                if run.is_writer:
                    self.new.discard()  # unless it is published, and has another name now
                self.copies, self.ranks = Copies(), []  # as large as the state
        if problem:  # now, because the next save may be hours away
            log.warning(f"warning: {gethostname()}: {problem}")
        return is_saved, problem

    def _write_and_publish(self) -> None:
        run = self.run
        reports = self._on_all_ranks("written", self._write)
        if not_finite := next((reason for _, reason in reports if reason), ""):
            raise ValueError(not_finite) if run.rank == 0 or not self.has_shards else JobFailed("")
        receivers = receivers_of(run.writer_of)
        self.shards = [
            Transfer(
                rank,
                self.new.path / folders.shard_of(rank),
                folders.Entry(*shard),
                (receivers[rank],),
            )
            for rank, (shard, _) in enumerate(reports)
            if shard
        ]
        if run.ring is not None and self.has_shards:  # the next host keeps a copy of them
            send = partial(send_files, self.shards, run.rank, run.ring, self.new.path)
            self._on_all_ranks("copied", send)
        self._on_all_ranks("published", self._publish)

    def _on_all_ranks(self, part: str, work: Callable[[], Any]) -> list[Any]:
        """Run the work on each rank, and return the results of all ranks. If one fails, all raise.

        Without shards, a writer runs it alone, because it needs no file of another rank.
        """
        if not self.has_shards:
            return [work()]
        result, problem = None, None
        try:
            result = work()
        except Exception as error:
            problem = error
        try:
            reports = self.run.coordinator.all_gather_json(
                [result, problem is not None],
                timeout_s=self.run.timeout_s,
                key=f"{self.run.prefix}/{self.number}/{part}",
            )
        except NoAnswer as missing:
            raise NoAnswer(f"the save of step {self.about.step}: {missing}") from None
        except (AnotherFailed, ChannelLost) as error:
            why = "another rank has failed" if type(error) is AnotherFailed else "the job has ended"
            raise JobFailed(f"step {self.about.step} was not saved: {why}.") from None
        if problem is not None:
            raise problem
        if any(has_failed for _, has_failed in reports):
            raise JobFailed("")  # the other rank says why
        return [result for result, _ in reports]

    def _write(self) -> list[Any]:
        """Write this rank's files.

        Returns the size and the hash of the file of its shards, or None; and which tensor is not finite.
        """
        run, folder = self.run, self.new.path
        folder.mkdir(parents=True, exist_ok=True)
        self.hashes = self.copies.write(folder)
        if run.is_writer:
            # Not by a path: a user does not know the file, so no line at the end is to name it.
            (folder / folders.TREE).write_bytes(packed({"state": self.tree, "ranks": self.ranks}))
        shard, file = None, folders.shard_of(run.rank)
        if file in self.hashes:
            flush(folder / file)
            shard = [(folder / file).stat().st_size, self.hashes[file]]
        return [shard, "" if run.options.saves_nan else self.copies.not_finite()]

    def _publish(self) -> None:
        """Complete the checkpoint, and give it its name, on the one rank of each file system that does so."""
        run, folder = self.run, self.new.path
        if not run.is_writer:
            return
        self.about.write(folder)
        for shard in self.shards:
            if run.rank in (run.writer_of[rank] for rank in (shard.source, *shard.receivers)):
                self.hashes[shard.path.name] = shard.entry.sha256
                # Another host has written it, and a file server may show only a part of it yet.
                if shard.path.stat().st_size != shard.entry.bytes:
                    raise RuntimeError(f"{shard.path.name} is incomplete")
        if self.shards:
            index = {"files": {shard.path.name: vars(shard.entry) for shard in self.shards}}
            (folder / folders.INDEX).write_text(json.dumps(index), encoding="utf-8")
        self.new.seal(self.hashes)
        self.new.publish()

    def _prune(self) -> None:
        """Remove what no wish keeps. Nothing else removes a checkpoint, but a person."""
        run, final = self.run, self.new.final
        if run.rank == 0:
            current().coordinator.tell_launcher("saved", path=str(final))
        if not run.is_writer:
            return
        run.is_verified(final, is_new=True)
        try:
            wishes = run.wishes()
            wishes.write(run.dir.path)
            prune(run.dir.checkpoints, wishes, is_good=run.is_verified)
        except OSError as error:  # only a warning, because the new checkpoint is complete
            why = f"cannot remove old checkpoints: {error.strerror}"
            log.warning(f"warning: {run.dir.checkpoints}: {why}.")

    def _upload(self) -> str:
        """Bring the bucket up to date, rank 0 after the others. Returns why it is not, or ""."""
        run, bucket = self.run, self.run.storage
        if bucket and self.has_shards:
            is_other = run.is_writer and run.rank != 0
            push = partial(bucket.push_shards, self.new.final) if is_other else list
            self._on_all_ranks("copied to the bucket", push)
        return update_bucket(run, self.new.final)

    def _sentence(self, error: Exception, *, is_saved: bool) -> str:
        """Why the save has failed, and which older checkpoint is kept."""
        if isinstance(error, JobFailed):
            return str(error)
        root, reason = self.run.dir.checkpoints, reason_of(error) or type(error).__name__
        if is_saved:
            return f"{self.new.final.name} is on this disk, and not elsewhere: {reason}."
        sentence = f"{root}: step {self.about.step} cannot be saved: {reason}."
        with contextlib.suppress(OSError):  # the file server may be gone
            kept = folders.list_steps(root)
            rest = f"{kept[-1].name} is kept." if kept else "There is no older checkpoint."
            sentence = f"{sentence} {rest}"
        return sentence


def update_bucket(run: Run, whole: Path | None = None) -> str:
    """Bring the bucket up to date, on rank 0. Returns why it is not, or "". `whole`: see `Bucket.update`."""
    if (bucket := run.bucket) is None:
        return ""
    try:
        if not (steps := folders.list_steps(run.dir.checkpoints)):
            return ""
        bucket.update(run.dir.path, run.wishes(), whole=whole)
        if bucket.is_whole(steps[-1].name):
            return ""
    except OSError as error:
        return _not_in_bucket(run, reason_of(error))
    return _not_in_bucket(run, "other hosts have its shards")


def _not_in_bucket(run: Run, reason: str) -> str:
    newest = folders.list_steps(run.dir.checkpoints)[-1].name
    address = run.storage.address if run.storage else ""
    return f"{newest} is on this disk, and not in {address}: {reason}."


def _renice_thread() -> None:
    """Let this thread give way to the training. On Linux, each thread has a nice value of its own."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may refuse it
        nicer = os.getpriority(os.PRIO_PROCESS, thread) + _NICER_BY
        os.setpriority(os.PRIO_PROCESS, thread, nicer)
