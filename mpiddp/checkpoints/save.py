"""Save checkpoints beside the training: a step only copies its tensors; a thread writes them to the disk.

    state ─copy→ host tensors ─thread→ own files → settled → complete → settled → older ones pruned

At most one save is in flight. The next save waits for it, and there all ranks receive its result, so a save
error needs no synchronization in any other step. Whole or sharded, the folder is hidden until every rank that
takes part has its files on the disk. A full disk never damages older checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import folder
from mpiddp.checkpoints.boxes import Copies, boxes_of, headers_of, write_boxes
from mpiddp.checkpoints.contents import rng_states
from mpiddp.checkpoints.files import Turns, packed, reason_of
from mpiddp.checkpoints.folder import INDEX, TREE, Entry, Facts, name_of_step, shard_of
from mpiddp.checkpoints.records import RunRecords
from mpiddp.checkpoints.retention import Retention, prune
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.send import Transfer, receivers_of, send_files
from mpiddp.checkpoints.state import (
    Outline,
    digest_of,
    is_sharded,
    refuse_loss,
    shown_path,
    union_of,
)
from mpiddp.errors import JobFailed, NoAnswer
from mpiddp.files import flush
from mpiddp.runtime.job.coordinator import AnotherFailed, ChannelLost, Coordinator
from mpiddp.runtime.job.session import current
from mpiddp.runtime.log import log
from mpiddp.runtime.reports import saving
from mpiddp.text import from_here

_NICENESS = 10  # of the thread that writes
_CLOCK_CHECKS_PER_INTERVAL = 4


class SaveSchedule:
    """Decides after each step whether a save is due, equally on all ranks, which must all call `is_due`.

    An int counts steps. For a float, seconds, rank 0 reads its clock at a few steps that all ranks know, and
    broadcasts whether a save is due, and when it reads it next. `step` is the latest one.
    """

    def __init__(
        self, interval: int | float | None, coordinator: Coordinator, step: int, *, timeout_s: float
    ) -> None:
        self._interval, self._coordinator, self._timeout_s = interval, coordinator, timeout_s
        self._start = self._previous = step
        self._next_check = step + 1
        self._saved_at = time.monotonic()
        self._checked = (step, self._saved_at)

    def is_due(self, step: int) -> bool:
        interval = self._interval
        if isinstance(interval, int):
            previous, self._previous = self._previous, step
            # A script may count samples as steps.
            return step // interval > previous // interval
        if interval is None or step < self._next_check:
            return False
        now = time.monotonic()
        checked_step, checked_at = self._checked
        step_s = max(now - checked_at, 1e-9) / max(step - checked_step, 1)
        self._checked = (step, now)
        left_s = interval - (now - self._saved_at)
        is_due = left_s < step_s / 2
        if is_due:
            self._saved_at, left_s = now, interval
        pause = int(min(left_s, interval / _CLOCK_CHECKS_PER_INTERVAL) / step_s)
        # The times of the first steps are too short: the GPU has only queued them.
        pause = max(1, min(pause, 2 * (step - self._start)))
        by_rank = self._coordinator.all_gather_json((is_due, pause), timeout_s=self._timeout_s)
        is_due, pause = by_rank[0]
        self._next_check = step + pause
        return is_due


@dataclass(frozen=True)
class _Job:
    """What this rank saves of one step, in host memory."""

    new: Path  # the hidden folder, whose name all ranks know
    final: Path
    facts: Facts
    tree: Any
    copies: Copies
    ranks: Sequence[Tensor]  # what each rank saves for itself, on the writers
    has_shards: bool  # False if every writer has the whole state


class Saver:
    """Saves the state of a training. Every rank creates one, with the same arguments.

    Attributes:
        step: the latest one that has been saved, or that the run resumes from.
        infinite: the tensors with infinities on purpose, such as masks; None before the first save.
        left: the tensors of the checkpoint resumed from that this rank has left to others, by entry.
        must_succeed: a failed save ends the run; else it causes a warning.
    """

    def __init__(
        self,
        run: Run,
        records: RunRecords,
        keep: Retention,
        step: int,
        infinite: Sequence[str] | None,
        left: Mapping[str, set[str]],
        *,
        must_succeed: bool,
    ) -> None:
        self._run, self._records, self._root = run, records, run.dir.checkpoints
        self._keep, self._must_succeed = keep, must_succeed
        self._step, self._infinite, self._left = step, infinite, left
        self._is_warned = False  # of a state that is not finite
        self._is_good: dict[Path, bool] = {}  # the checkpoints that this process hashed or wrote
        self._num_saves = 0
        self.pending: Future[str] | None = None  # the save in flight
        self._hurry = threading.Event()  # somebody waits for it
        self._prefix = run.coordinator.unique_prefix("saves")
        self._ring: dist.ProcessGroup | None = None  # for copies of shards

    def save(
        self, step: int, outline: Outline, per_rank: Outline, config: Mapping[str, Any]
    ) -> None:
        """Copy the state, and write it in a thread. A collective, see `Checkpoints.save`."""
        run = self._run
        digests, facts = self.meet(step, outline)
        if step < self._step:
            raise ValueError(
                f"step {step} is earlier than step {self._step}, which {run.dir} has already. "
                "Continue to count from the step that resume() returns."
            )
        if step == self._step:
            return
        union = union_of(run, outline, digests)
        self._num_saves += 1
        own = per_rank.filled([each.detach().to("cpu", copy=True) for each in per_rank.tensors])
        copies = Copies.of(*boxes_of(outline, union, run.rank, is_writer=run.is_writer))
        ranks = self._gather(own)
        has_shards = bool(union.savers) or any(map(is_sharded, outline.tensors))
        if has_shards and self._ring is None and len(run.writers) > 1:
            timeout = timedelta(seconds=run.timeout_s)
            self._ring = dist.new_group(backend="gloo", timeout=timeout)
        if has_shards or run.is_writer:
            self._hurry.clear()
            final = self._root / name_of_step(step)
            # Leftovers of other processes were removed when the run opened.
            new = folder.hidden(self._root, f"{final.name}-{self._num_saves}")
            told = Facts(step, config, union.is_partial, **facts)
            job = _Job(new, final, told, union.tree, copies, ranks, has_shards)
            # A thread of its own, because its priority is lowered in the middle.
            thread = ThreadPoolExecutor(1, "checkpoint")
            self.pending = thread.submit(self._write, job)
            thread.shutdown(wait=False)
        # Only now: a script that catches an error of the save before may repeat this one.
        self._step = step

    def _gather(self, per_rank: dict[str, Any]) -> list[Tensor]:
        """What each rank saves for itself, complete on the writer ranks: [world_size]. A collective.

        It can be a hundred small tensors, and no rank needs those of another. As bytes, they are rebuilt
        neither by the rank that writes them nor by the other ranks that resume.
        """
        run = self._run
        own = packed({"rng": rng_states(run.local_rank), "state": per_rank})
        gathered = [own] * run.world_size
        if run.world_size > 1 and run.writers == [0]:
            dist.gather_object(own, gathered if run.is_writer else None, 0, group=run.group)
        elif run.world_size > 1:
            dist.all_gather_object(gathered, own, group=run.group)
        written = gathered if run.is_writer else []
        return [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in written]

    def wait(self) -> None:
        """Wait for the save in flight, whether it succeeds or not. Not a collective."""
        self._hurry.set()
        wait(filter(None, [self.pending]))

    def meet(
        self, next_step: int | None, outline: Outline | None = None
    ) -> tuple[list[str], dict[str, Any]]:
        """Wait for the save in flight, and for the other ranks. A collective: every rank must call it.

        `next_step` is None after the last save. That one must succeed, or its checkpoint would be lost.
        `outline` is what this rank saves next. Returns the digests of what the ranks save next, and what the
        records tell of the state.

        Raises:
            ValueError: the ranks save different steps.
            UserError: no rank has taken a tensor of the checkpoint that the run resumes from.
            JobFailed: the previous save has failed, and it had to succeed; or a rank did not answer.
        """
        self.wait()
        problem = self.pending.result() if self.pending else ""
        self.pending = None
        run = self._run
        facts = self._records.facts() if run.rank == 0 else {}  # rank 0 always records
        digest = ""
        if outline is not None and run.world_size > 1:
            # The values are compared in the first save, where they differ if the ranks are no replicas.
            digest = digest_of(outline, samples=self._num_saves == 0)
        left = {}
        if next_step is not None and self._num_saves == 0:
            left = {entry: sorted(names) for entry, names in self._left.items()}
        answers = run.gather((next_step, problem, digest, facts, left))
        first = {step: rank for rank, (step, *_) in reversed(list(enumerate(answers)))}
        if len(first) > 1:
            calls = [
                f"{run.coordinator.name(rank)} {'closes' if step is None else f'saves step {step}'}"
                for step, rank in first.items()
            ]
            raise ValueError(f"{', '.join(sorted(calls))}. All ranks must save the same step.")
        problems = [text for _, text, *_ in answers]
        if any(problems) and (self._must_succeed or next_step is None):
            raise JobFailed("\n".join(run.coordinator.sentences(problems)))
        for host, text in zip(run.coordinator.hostnames, problems, strict=True):
            if text and run.rank == 0:
                log.warning(f"warning: {host}: {text}")
        refuse_loss([left for *_, left in answers])
        return [digest for _, _, digest, *_ in answers], answers[0][3]

    # In the thread

    def _write(self, job: _Job) -> str:
        """Write this rank's part of the checkpoint and remove old ones. Returns the error, or ""."""
        with saving():
            try:
                self._write_checkpoint(job)
            except NoAnswer:
                raise
            except (OSError, RuntimeError, JobFailed) as error:
                return self._sentence(error, job.facts.step)
        return ""

    def _write_checkpoint(self, job: _Job) -> None:
        run, hashes = self._run, dict[str, str]()
        try:
            reports = self._settle(job, "written", partial(self._write_files, job, hashes))
            receivers = receivers_of(run.writer_of)
            shards = [
                Transfer(rank, job.new / shard_of(rank), Entry(*shard), (receivers[rank],))
                for rank, (shard, *_) in enumerate(reports)
                if shard
            ]
            if self._ring is not None and job.has_shards:
                send = partial(send_files, shards, run.rank, self._ring, job.new)
                self._settle(job, "copied", send)
            reasons = filter(None, (job.facts.not_finite, *(text for _, text, _ in reports)))
            reason = next(reasons, "")
            if self._infinite is None and not reason:
                self._infinite = sorted({name for *_, names in reports for name in names})
            self._settle(job, "complete", partial(self._complete, job, reason, hashes, shards))
        except BaseException:
            if run.is_writer:
                shutil.rmtree(job.new, ignore_errors=True)
            raise
        if run.rank == 0:
            current().coordinator.tell_launcher("saved", path=str(job.final))
        if run.is_writer:
            self._is_good[job.final] = True
            try:
                prune(self._root, self._keep, is_good=self._is_verified)
            except OSError as error:  # the new checkpoint is complete anyway
                why = f"cannot remove old checkpoints: {error.strerror}"
                log.warning(f"warning: {self._root}: {why}.")
            if reason and run.rank == 0 and not self._is_warned:
                self._warn_of(job.final, reason)
            self._is_warned = bool(reason)

    def _warn_of(self, final: Path, reason: str) -> None:
        """Say that the newest checkpoint is not finite, and which one is."""
        finite = [each for each in folder.list_steps(self._root) if not Facts.of(each).not_finite]
        rest = "There is no finite checkpoint."
        if finite:
            rest = f"{from_here(finite[-1])} is kept, and a resume starts from it."
        log.warning(f"warning: {final.name} is not finite: {reason}. {rest}")

    def _settle(self, job: _Job, part: str, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's part of the save: all ranks report, and each comes to the same result.

        A save of nothing sharded needs no other rank: each writer settles it alone. Returns the results of
        all ranks, [world_size]. If the part of any rank fails, all ranks raise an error.
        """
        if not job.has_shards:
            return [work()]
        result, problem = None, None
        try:
            result = work()
        except (OSError, RuntimeError) as error:
            problem = error
        try:
            reports = self._run.coordinator.all_gather_json(
                [result, problem is not None],
                timeout_s=self._run.timeout_s,
                key=f"{self._prefix}/{self._num_saves}/{part}",
            )
        except NoAnswer as missing:
            raise NoAnswer(f"the save of step {job.facts.step}: {missing}") from None
        except (AnotherFailed, ChannelLost) as error:
            why = "another rank has failed" if type(error) is AnotherFailed else "the job has ended"
            raise JobFailed(f"step {job.facts.step} was not saved: {why}.") from None
        if problem is not None:
            raise problem
        if any(has_failed for _, has_failed in reports):
            raise JobFailed("")  # the other rank says why
        return [each for each, _ in reports]

    def _write_files(self, job: _Job, hashes: dict[str, str]) -> list[Any]:
        """Write this rank's files, down to the disk.

        Returns the size and the hash of its shards, or None; why its tensors are not finite, or ""; those
        that have infinities on purpose.
        """
        turns = Turns(self._hurry)
        headers = headers_of(job.copies, turns)
        turns.rest()
        # Only now: what holds the interpreter must not wait for a processor.
        _lower_priority()
        job.copies.wait()
        job.new.mkdir(parents=True, exist_ok=True)
        hashes |= write_boxes(job.copies, headers, job.new)
        if self._run.is_writer:
            torch.save({"state": job.tree, "ranks": job.ranks}, job.new / TREE)
        turns.rest()
        shard, own = None, shard_of(self._run.rank)
        if own in hashes:
            flush(job.new / own)
            shard = [(job.new / own).stat().st_size, hashes[own]]
        bad = {shown_path(path): value for path, value in job.copies.not_finite().items()}
        infinite = [name for name, value in bad.items() if math.isinf(value)]
        known = set(infinite if self._infinite is None else self._infinite)
        wrong = [name for name, value in bad.items() if math.isnan(value) or name not in known]
        return [shard, f"{wrong[0]} has {bad[wrong[0]]}" if wrong else "", infinite]

    def _complete(
        self, job: _Job, not_finite: str, hashes: dict[str, str], shards: Sequence[Transfer]
    ) -> None:
        """Complete the checkpoint on this file system, if this rank writes there."""
        run = self._run
        if not run.is_writer:
            return
        replace(job.facts, not_finite=not_finite, infinite=self._infinite).write(job.new)
        for each in shards:
            if run.rank in (run.writer_of[rank] for rank in (each.source, *each.receivers)):
                hashes[each.path.name] = each.entry.sha256
                if each.path.stat().st_size != each.entry.bytes:  # not yet shown by a file server
                    raise RuntimeError(f"{each.path.name} is incomplete")
        if shards:
            index = {"files": {each.path.name: each.entry for each in shards}}
            (job.new / INDEX).write_text(json.dumps(index, default=vars), encoding="utf-8")
        folder.complete(job.new, job.final, hashes)

    def _is_verified(self, checkpoint: Path) -> bool:
        """Hash a checkpoint the first time; afterwards, and for those written here, compare sizes only."""
        if checkpoint not in self._is_good:
            self._is_good[checkpoint] = folder.is_verified(checkpoint)
        return self._is_good[checkpoint] and folder.is_verified(checkpoint, with_hashes=False)

    def _sentence(self, error: Exception, step: int) -> str:
        """The error, and the newest checkpoint that remains, if the folder can still be read."""
        if isinstance(error, JobFailed):
            return str(error)
        sentence = f"{self._root}: step {step} cannot be saved: {reason_of(error)}."
        with contextlib.suppress(OSError):  # a file server that is gone
            kept = folder.list_steps(self._root)
            rest = f"{kept[-1].name} is kept." if kept else "There is no older checkpoint."
            sentence = f"{sentence} {rest}"
        return sentence


def _lower_priority() -> None:
    """Lower this thread's priority (nice +10). On Linux, threads have priorities of their own."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may refuse it
        nicer = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, nicer)
