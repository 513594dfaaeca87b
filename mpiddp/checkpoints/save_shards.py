"""Save a checkpoint with shards: every rank writes its file, one rank of each file system completes it.

torch's planner decides which rank saves which part. All else happens in the saving threads, from copies in
host memory. The folder is hidden until every file of every rank lies on the disk, also on the host that keeps
its copy. Then each file system gets its manifest, and the folder its name. If one rank cannot save, no file
system shows the checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.directory import INDEX, Entry, file_of
from mpiddp.checkpoints.ranks import Transfer
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.shards import Chunk, SavedTensor, index_of
from mpiddp.checkpoints.state import write_tensors
from mpiddp.errors import JobFailed, NoAnswer
from mpiddp.paths import flush
from mpiddp.runtime.job.channel import AnotherFailed, ChannelLost, Silent
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.log import log


class NotSaved(Exception):
    """The checkpoint was given up on all ranks. The message is a sentence, "" on a rank that did its part."""


class Exchange:
    """The values of one save after the other, over the job's channel. Each rank sets its own, each once.

    The waits end when a rank fails, and then each raises NotSaved.
    """

    def __init__(self, coordinator: Coordinator, timeout_s: float) -> None:
        """All ranks must create one.

        Args:
            timeout_s: how long this rank waits for the others, all waits of a save together.
        """
        self._coordinator = coordinator
        self._prefix = coordinator.unique_prefix("shards")
        self._timeout_s = timeout_s
        self._step = -1
        self._waited_s = 0.0

    def begin(self, step: int) -> None:
        """Begin with the values of this save. All ranks have finished the one before.

        Its values are deleted: a long run would fill the channel's server.
        """
        self._coordinator.forget(self._key(""))
        self._step = step
        self._waited_s = 0.0

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._step}/{name}"

    def set(self, name: str, value: Any) -> None:
        """Set a value of JSON."""
        self._coordinator.put(self._key(name), value)

    def get(self, name: str, rank: int) -> Any:
        """The value of a rank, once it is set. Raises as `get_all`."""
        return self.get_all(name, [rank])[0]

    def get_all(self, name: str, ranks: Sequence[int]) -> list[Any]:
        """The values of these ranks, once all are set.

        Raises:
            NoAnswer: the time for all waits of this save has passed. The sentence names the ranks.
            NotSaved: the job ends.
        """
        left_s = max(0.0, self._timeout_s - self._waited_s)
        since = time.monotonic()
        try:
            return self._coordinator.collect(self._key(name), ranks, timeout_s=left_s)
        except Silent as silent:
            missing = self._coordinator.no_answer(silent.ranks, self._timeout_s)
            raise NoAnswer(f"the save of step {self._step}: {missing}") from None
        except (AnotherFailed, ChannelLost) as end:
            why = (
                "another rank has failed" if isinstance(end, AnotherFailed) else "the job has ended"
            )
            raise NotSaved(f"step {self._step} was not saved: {why}.") from None
        finally:
            self.count(time.monotonic() - since)

    def count(self, seconds: float) -> None:
        """Count a wait for other ranks that happened elsewhere."""
        self._waited_s += seconds


class ShardedSaver:
    """This rank's sharded saves, one at a time: `plan`, then `write`, and on a writer rank `commit`."""

    def __init__(self, run: Run, root: Path) -> None:
        """A collective: every rank must create one.

        Args:
            root: the folder of all checkpoints.
        """
        ranks = run.ranks
        self._run, self._root = run, root
        self._rank, self._file_systems = ranks.rank, run.file_systems
        self._exchange = Exchange(ranks.coordinator, ranks.timeout_s)
        self._group: dist.ProcessGroup | None = None  # for copies; None if all share a file system
        self._plan = ShardPlan((), {}, None)
        self._step = -1
        self._boxes: Mapping[str, Tensor] = {}
        if len(run.file_systems.writers) > 1:
            timeout = timedelta(seconds=ranks.timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        elif (ranks.coordinator.world.num_nodes or 1) == 1:
            log.info(
                "sharded checkpoints: one host holds every shard once. The shards of several hosts "
                "without a shared file system lie on two hosts each."
            )

    def plan(self, sharded: Mapping[str, Any]) -> dict[str, Tensor]:
        """This rank's parts of these tensors, as it is to save them. A collective."""
        self._plan = plan_shards(sharded, self._run.ranks.group, self._plan)
        with torch.no_grad():
            return {name: sharded[name].to_local().contiguous() for name in self._plan.own}

    def write(
        self, step: int, boxes: Mapping[str, Tensor], write_files: directory.WriteFiles
    ) -> Path | None:
        """Write this rank's parts of the sharded tensors, and on a writer rank complete the checkpoint.

        Args:
            boxes: the parts that `plan` has returned, in host memory.
            write_files: writes the files that hold no shards, on a writer rank.

        Returns:
            The checkpoint, on a writer rank.

        Raises:
            NotSaved: some rank could not save.
            OSError, JobFailed: this rank could not complete the checkpoint.
            NoAnswer: a rank did not answer. The sentence names it.
        """
        self._step, self._boxes = step, boxes
        self._exchange.begin(step)
        if self._run.is_writer:
            return self._write_folder(write_files)
        self._write_shards(self._folder_of_writer())
        return None

    def commit(self, folder: Path | None) -> bool:
        """Wait until every file system has the checkpoint. Only on writer ranks.

        Args:
            folder: the checkpoint; None if this rank could not complete it.

        Returns:
            Whether all have it, so that older ones may be removed.

        Raises:
            NoAnswer, NotSaved: as `write`.
        """
        exchange = self._exchange
        exchange.set("has completed", folder is not None)
        if self._rank == 0:
            all_have = exchange.get_all("has completed", self._file_systems.writers)
            exchange.set("all have completed", all(all_have))
        return bool(exchange.get("all have completed", 0))

    def _folder_of_writer(self) -> Path | None:
        name = self._exchange.get("folder", self._file_systems.writer_of[self._rank])
        return self._root / name if name else None

    def _write_folder(self, write_files: directory.WriteFiles) -> Path:
        has_begun = False

        def write_all(folder: Path) -> Mapping[str, str]:
            nonlocal has_begun
            has_begun = True
            return self._write_all(folder, write_files)

        try:
            self._run.check_owner()
            return directory.write(self._root, self._step, write_all, replaces_verified=True)
        except (OSError, JobFailed) as error:
            if not has_begun:  # the other ranks wait for the folder
                self._exchange.set("folder", "")
                with contextlib.suppress(NotSaved):
                    self._write_shards(None, error)
                self._give_up()
            raise

    def _write_all(self, folder: Path, write_files: directory.WriteFiles) -> Mapping[str, str]:
        self._exchange.set("folder", folder.name)
        problem: OSError | None = None
        hashes: dict[str, str] = {}
        try:
            hashes.update(write_files(folder) or {})
        except OSError as error:
            problem = error
        try:
            self._write_shards(folder, problem)
        except NotSaved:
            self._give_up()
            if problem is not None:
                raise problem from None
            raise
        files = self._verdict()
        for name in map(file_of, self._file_systems.shards_at(self._rank)):
            entry = files[name]
            if (folder / name).stat().st_size != entry.bytes:  # a file server has not shown it yet
                raise NotSaved(f"{self._root}: {name} of step {self._step} is incomplete.")
            hashes[name] = entry.sha256
        (folder / INDEX).write_text(index_of(self._plan.tensors, files))
        return hashes

    def _write_shards(
        self, folder: Path | None, problem: OSError | JobFailed | None = None
    ) -> None:
        """Write this rank's file, exchange copies with other hosts, and report the result to rank 0.

        Args:
            folder: None if the writer rank of this file system has none.
            problem: an earlier one of this rank.
        """
        entry: Entry | None = None
        transfer: Transfer | None = None
        reason = "" if folder else "its file system has no folder"
        try:
            if problem is not None:
                raise problem
            if folder is not None:
                entry = _write_file(folder, self._rank, self._boxes)
                if self._group is not None:
                    senders = self._file_systems.senders_to(self._rank)
                    transfer = Transfer(folder, self._rank, senders)
        except (OSError, JobFailed) as error:
            reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        # None tells the other hosts that this rank takes no part in the transfer.
        written = asdict(entry) if entry and not reason else None
        self._exchange.set("written", written)
        if transfer is not None and entry is not None:
            try:
                self._copy(transfer, entry)
            except (OSError, RuntimeError) as error:
                reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
            finally:
                transfer.close()
        self._exchange.set("done", {"written": written, "problem": reason})
        if folder is None and problem is None:
            raise NotSaved("")  # the writer rank reports why
        if reason:
            raise NotSaved(
                f"{self._root}: cannot write the checkpoint of step {self._step}: {reason}."
            )

    def _copy(self, transfer: Transfer, own: Entry) -> None:
        """Exchange copies with the ranks that have written their files."""
        receiver = self._file_systems.receiver_of(self._rank)
        assert receiver is not None
        senders = self._file_systems.senders_to(self._rank)
        of_receiver, *of_senders = self._exchange.get_all("written", [receiver, *senders])
        incoming = {
            rank: Entry(**values)
            for rank, values in zip(senders, of_senders, strict=True)
            if values
        }
        since = time.monotonic()
        try:
            transfer.run(receiver if of_receiver else None, own.bytes, incoming, self._group)
        except RuntimeError:  # this rank has waited for another one, maybe as long as it may
            self._exchange.count(time.monotonic() - since)
            raise

    def _give_up(self) -> None:
        """On rank 0, tell the others that this rank could not save."""
        with contextlib.suppress(NotSaved):
            self._verdict()

    def _verdict(self) -> dict[str, Entry]:
        """The files of all ranks. Rank 0 gathers what the ranks report.

        Raises:
            NotSaved: a rank could not save.
        """
        exchange = self._exchange
        if self._rank == 0:
            ranks = range(len(self._file_systems.writer_of))
            reports = exchange.get_all("done", ranks)
            is_saved = not any(report["problem"] for report in reports)
            files = {file_of(rank): reports[rank]["written"] for rank in ranks}
            exchange.set("verdict", files if is_saved else None)
        files = exchange.get("verdict", 0)
        if files is None:
            raise NotSaved("")
        return {name: Entry(**values) for name, values in files.items()}


def _write_file(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> Entry:
    """Write this rank's file, down to the disk."""
    name = file_of(rank)
    hashes = write_tensors(folder, {name.removesuffix(".pt"): dict(tensors)})
    flush(folder / name)
    return Entry((folder / name).stat().st_size, hashes[name])


# Which rank saves which part


@dataclass(frozen=True)
class ShardPlan:
    """What one rank saves, and where all parts of all tensors are."""

    own: tuple[str, ...]  # the names of the tensors of which this rank saves its part
    tensors: dict[str, SavedTensor]  # all, by name
    signature: object  # of the tensors that were planned; None before


def plan_shards(
    sharded: Mapping[str, Tensor], group: dist.ProcessGroup | None, previous: ShardPlan
) -> ShardPlan:
    """Decide it for these tensors of this rank. A collective, unless `previous` is for such tensors.

    Parts that several ranks have, under HSDP for example, are saved once, by the rank that has least to save.

    Args:
        group: of all ranks; None if the job has one.
    """
    signature = [_signature(name, tensor) for name, tensor in sharded.items()]
    if previous.signature == signature:
        return previous
    from torch.distributed.checkpoint import DefaultSavePlanner  # takes a while

    rank = dist.get_rank() if group else 0
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(sharded), is_coordinator=rank == 0)
    plans: list[Any] = [planner.create_local_plan()]
    if group is not None:
        own = plans[0]
        plans = [None] * dist.get_world_size()
        dist.all_gather_object(plans, own, group=group)
    # Every rank computes the same: a plan follows from nothing but the plans of the ranks.
    global_plans, metadata = planner.create_global_plan(plans)
    ranks = {
        (item.index.fqn, tuple(item.index.offset or ())): number
        for number, plan in enumerate(global_plans)
        for item in plan.items
    }
    tensors = {
        name: _saved_tensor(name, each, ranks)
        for name, each in metadata.state_dict_metadata.items()
    }
    items = global_plans[rank].items
    names = tuple(item.index.fqn for item in items if _has_values(item.tensor_data))
    return ShardPlan(names, tensors, signature)


def _signature(name: str, tensor: Any) -> tuple[Any, ...]:
    """What the plan depends on. It is the same on all ranks, which therefore plan together or not at all."""
    mesh = tensor.device_mesh
    return name, tensor.shape, tensor.dtype, tensor.placements, mesh.mesh.tolist()


def _has_values(data: Any) -> bool:
    """Some ranks have no part of a tensor that is shorter than the number of ranks."""
    return data is not None and 0 not in data.chunk.sizes


def _saved_tensor(
    name: str, saved: Any, ranks: Mapping[tuple[str, tuple[int, ...]], int]
) -> SavedTensor:
    """The tensor as in shards.json."""
    chunks = tuple(
        Chunk(tuple(each.offsets), tuple(each.sizes), ranks[name, tuple(each.offsets)])
        for each in saved.chunks
        if 0 not in each.sizes
    )
    dtype = str(saved.properties.dtype).removeprefix("torch.")
    return SavedTensor(tuple(saved.size), dtype, chunks)
