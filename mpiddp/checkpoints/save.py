"""Save checkpoints beside the training: a step only copies its tensors; a thread writes them to the disk.

    schedule = SaveSchedule(interval, coordinator, step, timeout_s=…)
    saver = Saver(run, keep=2, must_succeed=False)
    if schedule.is_due(step):
        saver.save(step, state, per_rank, config)

At most one save is in flight. The next save waits for it, and there all ranks receive its result, so a
save error needs no synchronization in any other step. A full disk never damages older checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.contents import Contents, packed_rank, rng_states, write_files
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.save_shards import NotSaved, ShardedSaver
from mpiddp.checkpoints.state import Keys, mapped, num_bytes, split
from mpiddp.errors import JobFailed, NoAnswer
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.launcher.connected import saving
from mpiddp.runtime.log import log
from mpiddp.text import Interval

_CLOCK_CHECKS_PER_INTERVAL = 4
_NICENESS = 10  # of the thread that writes


class Saver:
    """Saves the state of a training. Every rank has one, with the same arguments."""

    def __init__(
        self, run: Run, *, keep: int, must_succeed: bool, verified: Path | None = None
    ) -> None:
        """
        Args:
            keep: number of verified checkpoints to keep.
            must_succeed: whether a failed save ends the run; else it causes a warning.
            verified: a checkpoint that this host has just verified.
        """
        self._run = run
        self._root = run.dir.checkpoints
        self._keep = keep
        self._must_succeed = must_succeed
        self._num_saves = self._num_failed = 0
        # The checkpoints that this process hashed or wrote, and whether they are verified.
        self._is_verified = {verified: True} if verified else {}
        self._pending: Future[str] | None = None
        self._memory = HostMemory()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_give_way_to_the_training)
        self._sharded: ShardedSaver | None = None

    def save(
        self,
        step: int,
        state: dict[str, Any],
        per_rank: dict[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        """Wait for the previous save, copy the state, and write it in the thread. A collective.

        Args:
            per_rank: the state of this rank alone.

        Raises:
            JobFailed: the previous save has failed, and it had to succeed; or a rank did not answer.
        """
        self._wait_for_save(must_succeed=self._must_succeed)
        self._num_saves += 1
        ranks = self._gather(per_rank)
        replicated, sharded = split(state)
        whole = replicated if self._run.is_writer else {}
        parts = None
        if sharded:
            if self._sharded is None:
                self._sharded = ShardedSaver(self._run, self._root)
            parts = self._sharded.plan(sharded)
        elif not self._run.is_writer:
            return
        copied, boxes = self._memory.copy(whole, parts)
        contents = Contents(step, copied, ranks, config)
        self._pending = self._thread.submit(self._write, contents, boxes)

    def _gather(self, per_rank: dict[str, Any]) -> list[Tensor]:
        """What each rank saves for itself, complete on the writer ranks: [world_size]. A collective."""
        memory = HostMemory()  # a copy of its own for each save: the ranks' states are small
        (copied,) = memory.copy(per_rank)
        memory.wait()
        ranks = self._run.ranks
        own = packed_rank(rng_states(ranks.local_rank), copied)
        if ranks.group is None:
            return [own]
        sizes = ranks.gather(len(own))
        padded = own.new_zeros(max(sizes))
        padded[: len(own)] = own
        if self._run.file_systems.writers == [0]:
            of_ranks = [torch.empty_like(padded) for _ in sizes] if ranks.rank == 0 else None
            dist.gather(padded, of_ranks, group=ranks.group)
        else:
            of_ranks = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(of_ranks, padded, group=ranks.group)
        if of_ranks is None or not self._run.is_writer:
            return []
        return [each[:size].clone() for each, size in zip(of_ranks, sizes, strict=True)]

    def finish(self) -> None:
        """Wait for the last save. A collective: every rank must call it.

        Raises:
            JobFailed: the save has failed. This does not depend on `must_succeed`, because the last
                checkpoint would be lost.
        """
        try:
            self._wait_for_save(must_succeed=True)
        finally:
            if self._num_failed and self._run.ranks.rank == 0:
                log.warning(f"warning: {self._num_failed} of {self._num_saves} saves failed.")

    def wait_for_own_save(self) -> None:
        """Wait until this rank has no save in flight, whether the save succeeds or not. Not a collective."""
        pending = self._pending
        if pending is not None:
            wait([pending])

    def _wait_for_save(self, *, must_succeed: bool) -> None:
        """Wait for the save in flight, and send its result to all ranks.

        Raises:
            NoAnswer: a rank did not answer, in the thread of this rank or here.
            JobFailed: the save has failed, and it must succeed.
        """
        problem = self._pending.result() if self._pending else ""
        self._pending = None
        ranks = self._run.ranks
        if must_succeed:
            try:
                with ranks.together():
                    if problem:
                        raise JobFailed(problem)
            except JobFailed:
                self._num_failed += 1
                raise
        else:
            self._num_failed += ranks.warn(problem)

    # In the thread

    def _write(self, contents: Contents, boxes: dict[str, Tensor] | None) -> str:
        """Write this rank's part of the checkpoint and remove old ones. Returns the error, or "".

        Args:
            boxes: this rank's parts of sharded tensors, by name; None if nothing is sharded.

        Raises:
            NoAnswer: a rank did not answer.
        """
        with saving():
            self._memory.wait()
            try:
                if self._sharded is None or boxes is None:
                    self._write_whole(contents)
                else:
                    self._write_sharded(self._sharded, contents, boxes)
            except NoAnswer:
                raise
            except (NotSaved, JobFailed) as error:
                return str(error)
            except OSError as error:
                needed = num_bytes([contents.state, contents.ranks, boxes])
                return _save_error(error, self._root, contents.step, needed)
        return ""

    def _write_whole(self, contents: Contents) -> None:
        self._run.check_owner()
        self._prune(
            directory.write(self._root, contents.step, lambda new: write_files(new, contents))
        )

    def _write_sharded(
        self, sharded: ShardedSaver, contents: Contents, boxes: dict[str, Tensor]
    ) -> None:
        folder: Path | None = None
        problem: Exception | None = None
        try:
            folder = sharded.write(contents.step, boxes, lambda new: write_files(new, contents))
        except NoAnswer:
            raise
        except (NotSaved, JobFailed, OSError) as error:
            problem = error
        if self._run.is_writer and sharded.commit(folder) and folder is not None:
            self._prune(folder)
        if problem is not None:
            raise problem

    def _prune(self, written: Path) -> None:
        """Remove checkpoints that are older than those to keep."""
        self._is_verified[written] = True
        try:
            directory.prune(self._root, self._keep, counts=self._counts)
        except OSError as error:  # the new checkpoint is complete anyway
            log.warning(f"warning: {self._root}: cannot remove old checkpoints: {error.strerror}.")

    def _counts(self, folder: Path) -> bool:
        """Hash a checkpoint the first time; afterwards, and for those written here, compare sizes only."""
        if folder not in self._is_verified:
            self._is_verified[folder] = directory.is_verified(folder)
        return self._is_verified[folder] and directory.is_intact(folder)


def _give_way_to_the_training() -> None:
    """Let this thread have a tenth of a core that a training needs, and all of one that is idle.

    On Linux, threads have priorities of their own.
    """
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may refuse it
        nicer = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, nicer)


def _save_error(error: OSError, root: Path, step: int, needed: int) -> str:
    """The error, and the newest checkpoint that remains, if the folder can still be read."""
    sentence = f"{root}: cannot write the checkpoint of step {step}: {error.strerror}."
    try:
        kept = [folder.name for folder in directory.list_steps(root)]
        rest = f"{kept[-1]} is kept." if kept else "There is no older checkpoint."
        if error.errno == errno.ENOSPC:
            found = f"has {_size(shutil.disk_usage(root).free)}"
        elif error.errno == errno.EDQUOT:  # the file system may have space, for others
            found = "and your disk quota is used up"
        else:
            return f"{sentence} {rest}"
    except OSError:  # a file server that is gone
        return f"{sentence}"
    where = f"no space left for a checkpoint in {root}"
    return f"{where}: step {step} needs {_size(needed)}, {found}. {rest}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


# A state's copy in host memory, the only part of a save that a step waits for

# The last field: whether the copy's memory is pinned.
_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]


class HostMemory:
    """Copies of tensors on the CPU. Each `copy` reuses the memory of the one before.

    With a GPU, the memory is pinned and the copies run on the current stream. So later steps change the
    originals only after the copies are done, and only the reader of the copies waits.
    """

    def __init__(self) -> None:
        self._free: dict[_Layout, list[Tensor]] = defaultdict(list)
        self._used: list[tuple[_Layout, Tensor]] = []
        self._copied: dict[torch.device, torch.Event] = {}

    def copy(self, *states: Any) -> list[Any]:
        """The same dicts, lists and numbers, with copies of the tensors. Invalidates the previous copies.

        Call `wait` before reading the copies.
        """
        for layout, host in self._used:
            self._free[layout].append(host)
        self._used = []
        self._copied = {}
        with torch.inference_mode(False), torch.no_grad():  # else their memory could not be reused
            copied = [mapped(state, self._copy) for state in states]
        for device, event in self._copied.items():
            event.record(torch.accelerator.current_stream(device))
        return copied

    def wait(self) -> None:
        """Wait until the copies are complete; on a CPU they are at once. Their reader calls this."""
        for event in self._copied.values():
            event.synchronize()

    def _copy(self, _: Keys, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        layout = _layout(value)
        free = self._free[layout]
        host = free.pop() if free else _new_like(value)
        self._used.append((layout, host))
        is_on_gpu = _is_on_gpu(value)
        if is_on_gpu and value.device not in self._copied:
            self._copied[value.device] = torch.Event(value.device)
        return host.copy_(value.detach(), non_blocking=is_on_gpu)


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _new_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(
        tensor, device="cpu", pin_memory=_is_on_gpu(tensor), requires_grad=False
    )


def _layout(tensor: Tensor) -> _Layout:
    return tensor.dtype, tensor.shape, tensor.stride(), _is_on_gpu(tensor)


# When to save


class SaveSchedule:
    """Decides after each step whether a save is due, equally on all ranks, which must all call `is_due`.

    For an interval in seconds, rank 0 reads its clock at a few steps that all ranks know. It broadcasts
    whether a save is due, and the step of the next check. The steps between exchange no message.
    """

    def __init__(
        self, interval: Interval | None, coordinator: Coordinator, step: int, *, timeout_s: float
    ) -> None:
        """
        Args:
            interval: None if no save is ever due.
            step: the latest one.
        """
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._steps = interval.steps if interval else None
        seconds = interval.seconds if interval else None
        self._clock = _Clock(seconds, step) if seconds is not None else None
        self._next_check = step + 1
        self._previous = step

    def is_due(self, step: int) -> bool:
        if self._clock is not None:
            return self._is_due_by(self._clock, step)
        if self._steps is None:
            return False
        previous, self._previous = self._previous, step
        return step // self._steps > previous // self._steps  # a script may count samples as steps

    def _is_due_by(self, clock: _Clock, step: int) -> bool:
        if step < self._next_check:
            return False
        own = clock.check(step) if self._coordinator.world.rank == 0 else (False, 0)
        is_due, pause = self._coordinator.all_gather_json(own, timeout_s=self._timeout_s)[0]
        self._next_check = step + pause
        return is_due


class _Clock:
    """Rank 0's clock: measures the steps, and decides when to save."""

    def __init__(self, interval_s: float, step: int) -> None:
        self._interval_s = interval_s
        self._start = step
        self._saved_at = time.monotonic()
        self._checked = (step, self._saved_at)

    def check(self, step: int) -> tuple[bool, int]:
        """Whether a save is due, and the number of steps until the next check."""
        now = time.monotonic()
        checked_step, checked_at = self._checked
        step_s = max(now - checked_at, 1e-9) / max(step - checked_step, 1)
        self._checked = (step, now)
        left_s = self._interval_s - (now - self._saved_at)
        is_due = left_s < step_s / 2
        if is_due:
            self._saved_at, left_s = now, self._interval_s
        pause = int(min(left_s, self._interval_s / _CLOCK_CHECKS_PER_INTERVAL) / step_s)
        # The times of the first steps are too short: the GPU has only queued them.
        pause = min(pause, 2 * (step - self._start))
        return is_due, max(1, pause)
