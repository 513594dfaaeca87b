"""Save checkpoints beside the training: a step only copies its tensors; a thread writes them to the disk.

    state ─copy→ host tensors ─thread→ own files → settled → complete → settled → older ones pruned

At most one save is in flight. The next save waits for it, and there all ranks receive its result, so a save
error needs no synchronization in any other step. Whole or sharded, the folder is hidden until every rank that
takes part has its files on the disk. A full disk never damages older checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import folder
from mpiddp.checkpoints.contents import rng_states, write_files
from mpiddp.checkpoints.folder import INDEX, Entry, flush, name_of_step
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.send import Transfer, receivers_of, send_files
from mpiddp.checkpoints.shards import Boxes, boxes_of, file_of
from mpiddp.checkpoints.state import Keys, mapped, packed, split, write_tensors
from mpiddp.errors import JobFailed, NoAnswer
from mpiddp.runtime.job.coordinator import AnotherFailed, ChannelLost, Coordinator
from mpiddp.runtime.log import log
from mpiddp.runtime.reports import saving
from mpiddp.text import from_here

_CLOCK_CHECKS_PER_INTERVAL = 4
_NICENESS = 10  # of the thread that writes
_LATE_S = 30.0  # after which a rank that waits in save() says so


class _Abandoned(Exception):
    """Another rank could not save, and says why."""


@dataclass(frozen=True)
class _Copied:
    """The state of one step, in host memory."""

    step: int
    state: dict[str, Any]  # {} on ranks that are no writers
    boxes: Boxes | None  # this rank's parts of sharded tensors; None if nothing is sharded
    ranks: list[Tensor]  # what each rank saves for itself, uint8 [bytes]; on writers
    config: Mapping[str, Any]
    wait: Callable[[], None]  # until the copies are done


class Saver:
    """Saves the state of a training. Every rank creates one, with the same arguments.

    With `must_succeed`, a failed save ends the run; else it causes a warning.
    """

    def __init__(self, run: Run, *, keep: int, must_succeed: bool) -> None:
        self._run, self._root = run, run.dir.checkpoints
        self._keep, self._must_succeed = keep, must_succeed
        self._is_good: dict[Path, bool] = {}  # the checkpoints that this process hashed or wrote
        self._num_saves = 0
        self.pending: Future[str] | None = None  # the save in flight
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_lower_priority)
        self._prefix = run.coordinator.unique_prefix("saves")
        self._ring: dist.ProcessGroup | None = None  # for copies of shards

    def save(
        self, step: int, state: dict[str, Any], per_rank: dict[str, Any], config: Mapping[str, Any]
    ) -> None:
        """Copy the state, and write it in the thread. A collective, after `meet`."""
        run = self._run
        self._num_saves += 1
        ranks = self._gather(per_rank)
        replicated, sharded = split(state)
        if sharded and self._ring is None and len(run.writers) > 1:
            timeout = timedelta(seconds=run.timeout_s)
            self._ring = dist.new_group(backend="gloo", timeout=timeout)
        if sharded or run.is_writer:
            own = replicated if run.is_writer else {}
            boxes = boxes_of(sharded) if sharded else None
            (copied, boxes), wait_for_copies = _to_host((own, boxes))
            job = _Copied(step, copied, boxes, ranks, config, wait_for_copies)
            self.pending = self._thread.submit(self._write, job)

    def _gather(self, per_rank: dict[str, Any]) -> list[Tensor]:
        """What each rank saves for itself, complete on the writer ranks: [world_size]. A collective.

        It can be a hundred small tensors, and no rank needs those of another. As bytes, they are rebuilt
        neither by the rank that writes them nor by the other ranks that resume.
        """
        run = self._run
        copied, wait_for_copies = _to_host(per_rank)
        wait_for_copies()
        own = packed({"rng": rng_states(run.local_rank), "state": copied})
        gathered = [own] * run.world_size
        if run.world_size > 1 and run.writers == [0]:
            dist.gather_object(own, gathered if run.is_writer else None, 0, group=run.group)
        elif run.world_size > 1:
            dist.all_gather_object(gathered, own, group=run.group)
        written = gathered if run.is_writer else []
        return [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in written]

    def meet(self, next_step: int | None) -> None:
        """Wait for the save in flight, and for the other ranks. A collective: every rank must call it.

        `next_step` is None after the last save. That one must succeed, or its checkpoint would be lost.

        Raises:
            ValueError: the ranks save different steps.
            JobFailed: the previous save has failed, and it had to succeed; or a rank did not answer.
        """
        problem = self.pending.result() if self.pending else ""
        self.pending = None
        run = self._run
        met = threading.Event()
        if next_step is not None and run.rank == 0 and run.world_size > 1:
            self._thread.submit(_warn_if_late, met, next_step, *_line_of_script())
        try:
            answers = run.gather((next_step, problem))
        finally:
            met.set()
        first = {step: rank for rank, (step, _) in reversed(list(enumerate(answers)))}
        if len(first) > 1:
            calls = [
                f"{run.coordinator.name(rank)} {'closes' if step is None else f'saves step {step}'}"
                for step, rank in first.items()
            ]
            raise ValueError(f"{', '.join(sorted(calls))}. All ranks must save the same step.")
        problems = [text for _, text in answers]
        if any(problems) and (self._must_succeed or next_step is None):
            raise JobFailed("\n".join(run.coordinator.sentences(problems)))
        for host, text in zip(run.coordinator.hostnames, problems, strict=True):
            if text and run.rank == 0:
                log.warning(f"warning: {host}: {text}")

    # In the thread

    def _write(self, job: _Copied) -> str:
        """Write this rank's part of the checkpoint and remove old ones. Returns the error, or ""."""
        with saving():
            job.wait()
            try:
                self._write_checkpoint(job)
            except NoAnswer:
                raise
            except _Abandoned:
                return ""
            except (OSError, RuntimeError, JobFailed) as error:
                return self._sentence(error, job.step)
        return ""

    def _write_checkpoint(self, job: _Copied) -> None:
        run = self._run
        final = self._root / name_of_step(job.step)
        # All ranks know the name. Leftovers of other processes were removed when the run opened.
        new = folder.hidden(self._root, f"{final.name}-{self._num_saves}")
        hashes: dict[str, str] = {}
        try:
            reports = self._settle(job, "written", lambda: self._write_files(new, job, hashes))
            files = {file_of(rank): Entry(*each) for rank, each in enumerate(reports) if each}
            if self._ring is not None and job.boxes is not None:
                self._settle(job, "copied", lambda: self._send_copies(new, files))
            self._settle(job, "complete", lambda: self._complete(new, final, hashes, files))
        except BaseException:
            if run.is_writer:
                shutil.rmtree(new, ignore_errors=True)
            raise
        if run.is_writer:
            self._is_good[final] = True
            try:
                folder.prune(self._root, self._keep, is_good=self._is_verified)
            except OSError as error:  # the new checkpoint is complete anyway
                why = f"cannot remove old checkpoints: {error.strerror}"
                log.warning(f"warning: {self._root}: {why}.")

    def _settle(self, job: _Copied, part: str, work: Callable[[], Any]) -> list[Any]:
        """Do this rank's part of the save: all ranks report, and each comes to the same result.

        A save of nothing sharded needs no other rank: each writer settles it alone. Returns the results of
        all ranks, [world_size]. If the part of any rank fails, all ranks raise an error.
        """
        if job.boxes is None:
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
            raise NoAnswer(f"the save of step {job.step}: {missing}") from None
        except (AnotherFailed, ChannelLost) as error:
            why = "another rank has failed" if type(error) is AnotherFailed else "the job has ended"
            raise JobFailed(f"step {job.step} was not saved: {why}.") from None
        if problem is not None:
            raise problem
        if any(has_failed for _, has_failed in reports):
            raise _Abandoned
        return [each for each, _ in reports]

    def _write_files(self, new: Path, job: _Copied, hashes: dict[str, str]) -> list[Any] | None:
        """Write this rank's files, down to the disk. Returns the size and the hash of its shards."""
        new.mkdir(parents=True, exist_ok=True)
        if self._run.is_writer:
            hashes.update(write_files(new, job.step, job.state, job.ranks, job.config))
        if job.boxes is None:
            return None
        name = file_of(self._run.rank)
        (sha256,) = write_tensors(new, {name.removesuffix(".pt"): job.boxes}).values()
        flush(new / name)
        return [(new / name).stat().st_size, sha256]

    def _send_copies(self, new: Path, files: Mapping[str, Entry]) -> None:
        transfers = [
            Transfer(rank, new / file_of(rank), files[file_of(rank)], (receiver,))
            for rank, receiver in enumerate(receivers_of(self._run.writer_of))
        ]
        send_files(transfers, self._run.rank, self._ring, new)

    def _complete(
        self, new: Path, final: Path, hashes: dict[str, str], files: Mapping[str, Entry]
    ) -> None:
        """Complete the checkpoint on this file system, if this rank writes there."""
        run = self._run
        if not run.is_writer:
            return
        for rank, receiver in enumerate(receivers_of(run.writer_of)) if files else ():
            if run.rank not in (run.writer_of[rank], run.writer_of[receiver]):
                continue
            name = file_of(rank)
            hashes[name] = files[name].sha256
            if (new / name).stat().st_size != files[name].bytes:
                raise RuntimeError(f"{name} is incomplete")  # a file server has not shown it yet
        if files:
            (new / INDEX).write_text(json.dumps({"files": files}, default=vars), encoding="utf-8")
        folder.complete(new, final, hashes)

    def _is_verified(self, checkpoint: Path) -> bool:
        """Hash a checkpoint the first time; afterwards, and for those written here, compare sizes only."""
        if checkpoint not in self._is_good:
            self._is_good[checkpoint] = folder.is_verified(checkpoint)
        return self._is_good[checkpoint] and folder.is_verified(checkpoint, with_hashes=False)

    def _sentence(self, error: Exception, step: int) -> str:
        """The error, and the newest checkpoint that remains, if the folder can still be read."""
        if isinstance(error, JobFailed):
            return str(error)
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        sentence = f"{self._root}: step {step} cannot be saved: {reason}."
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


def _line_of_script() -> tuple[str, int]:
    """The file and the line that save."""
    frame = sys._getframe()
    while frame.f_back and Path(frame.f_code.co_filename).parent == Path(__file__).parent:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _warn_if_late(met: threading.Event, step: int, file: str, line: int) -> None:
    """Name the script's line if the other ranks do not come, as after `if rank == 0: save()`."""
    if not met.wait(_LATE_S):
        log.warning(
            f"warning: save() of step {step} in {from_here(file)}:{line} has waited {_LATE_S:g} s for the "
            "other ranks. Every rank must call it."
        )


def _to_host(state: Any) -> tuple[Any, Callable[[], None]]:
    """The same with copies of its tensors on the CPU, and a function that waits for the copies.

    With a GPU, torch pins the memory of the copies and keeps it for the next ones. The copies run on the
    current stream: later steps change the originals only afterwards, and only the reader of the copies
    waits.
    """
    events: dict[torch.device, torch.Event] = {}

    def copy(_: Keys, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.device.type != "cpu" and value.device not in events:
            events[value.device] = torch.Event(value.device)
        return value.detach().to("cpu", non_blocking=True, copy=True)

    with torch.inference_mode(False), torch.no_grad():
        copied = mapped(state, copy)
    for device, event in events.items():
        event.record(torch.accelerator.current_stream(device))

    def wait_for_copies() -> None:
        for event in events.values():
            event.synchronize()

    return copied, wait_for_copies


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
