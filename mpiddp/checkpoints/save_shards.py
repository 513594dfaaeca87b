"""Save a checkpoint with shards: every rank writes its file, one rank of each file system completes it.

All of this happens in the saving threads, from copies in host memory. The folder is hidden until every file
of every rank lies on the disk, also on the host that keeps its copy. Then each file system gets its manifest,
and the folder its name. If one rank cannot save, no file system shows the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.directory import INDEX, Entry
from mpiddp.checkpoints.ranks import CHUNK_BYTES, Exchange, NoExchange, bytes_of, empty_chunk
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.shards import ShardPlan, file_of, index_json, plan_shards
from mpiddp.checkpoints.state import HashedFile, write_tensors
from mpiddp.errors import JobFailed, NoAnswer
from mpiddp.paths import flush
from mpiddp.runtime.log import log


class NotSaved(Exception):
    """The checkpoint was given up on all ranks. The message is a sentence, "" on a rank that did its part."""


class Sharing:
    """What the sharded saves of a run have in common."""

    def __init__(self, run: Run) -> None:
        """A collective: every rank must create one."""
        ranks = run.ranks
        self.run = run
        self.exchange = Exchange(ranks.coordinator, ranks.timeout_s)
        self.group: dist.ProcessGroup | None = None  # for copies; None if all share a file system
        self._plan: ShardPlan | None = None
        if len(run.file_systems.writers) > 1:
            timeout = timedelta(seconds=ranks.timeout_s)
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        elif (ranks.coordinator.world.num_nodes or 1) == 1:
            log.info(
                "sharded checkpoints: one host holds every shard once. The shards of several hosts "
                "without a shared file system lie on two hosts each."
            )

    def plan(self, sharded: Mapping[str, Tensor]) -> ShardPlan:
        """Which rank saves which part of these tensors. A collective."""
        self._plan = plan_shards(sharded, self.run.ranks.group, self._plan)
        return self._plan


class ShardedSave:
    """One save of one rank."""

    def __init__(
        self, sharing: Sharing, step: int, plan: ShardPlan, boxes: Mapping[str, Tensor]
    ) -> None:
        """
        Args:
            boxes: this rank's parts in host memory, by the names of their tensors.
        """
        self.boxes = boxes
        self._run = sharing.run
        self._root = sharing.run.dir.checkpoints
        self._step = step
        self._rank = sharing.run.ranks.rank
        self._plan = plan
        self._file_systems = sharing.run.file_systems
        self._exchange = sharing.exchange
        self._group = sharing.group

    def run(self, write_files: directory.WriteFiles) -> Path | None:
        """Save this rank's parts of the sharded tensors, and on a writer rank complete the checkpoint.

        Args:
            write_files: writes the files that hold no shards, on a writer rank.

        Returns:
            The checkpoint, on a writer rank.

        Raises:
            NotSaved: some rank could not save.
            OSError, JobFailed: this rank could not complete the checkpoint.
            NoAnswer: a rank did not answer. The sentence names it.
            NoExchange: the job ends.
        """
        self._exchange.begin()
        with self._named():
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
            NoAnswer, NoExchange: as `run`.
        """
        exchange = self._exchange
        with self._named():
            exchange.set("has completed", folder is not None)
            if self._rank == 0:
                all_have = exchange.get_all("has completed", self._file_systems.writers)
                exchange.set("all have completed", all(all_have))
            return bool(exchange.get("all have completed", 0))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name the save in the error of a rank that does not answer."""
        try:
            yield
        except NoAnswer as error:
            raise NoAnswer(f"the save of step {self._step}: {error}") from None

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
        for name in self._files_here():
            entry = files[name]
            if (folder / name).stat().st_size != entry.bytes:  # a file server has not shown it yet
                raise NotSaved(f"{self._root}: {name} of step {self._step} is incomplete.")
            hashes[name] = entry.sha256
        (folder / INDEX).write_text(index_json(self._plan.tensors, files))
        return hashes

    def _files_here(self) -> list[str]:
        """The files of shards on this file system: those of its ranks, and the copies for other hosts."""
        own = self._file_systems.writer_of[self._rank]
        ranks = range(len(self._file_systems.writer_of))
        receivers = [self._file_systems.receiver_of(rank) for rank in ranks]
        return [
            file_of(rank)
            for rank, receiver in zip(ranks, receivers, strict=True)
            if own == self._file_systems.writer_of[rank]
            or (receiver is not None and own == self._file_systems.writer_of[receiver])
        ]

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
                entry = _write_file(folder, self._rank, self.boxes)
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
        with contextlib.suppress(NotSaved, NoExchange):
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


# Copies on other hosts


class Transfer:
    """The file that a rank sends, and the copies that it receives, in one folder.

    All files are open before any rank sends: the peers of a rank that cannot open one would wait for it.
    """

    def __init__(self, folder: Path, rank: int, senders: Sequence[int]) -> None:
        """
        Raises:
            OSError: a file cannot be opened.
        """
        self._folder = folder
        self._copies: dict[int, HashedFile] = {}
        self._read_error: OSError | None = None
        self._own = (folder / file_of(rank)).open("rb")
        try:
            for sender in senders:
                self._copies[sender] = HashedFile(folder / file_of(sender))
        except OSError:
            self.close()
            raise

    def run(
        self, receiver: int | None, own_bytes: int, incoming: Mapping[int, Entry], group: Any
    ) -> None:
        """Send and receive, all at once. Every pair of ranks has to agree on its transfer.

        Args:
            receiver: None to send nothing.
            own_bytes: the size of this rank's file.
            incoming: the sizes and the hashes of the files to receive, by rank.

        Raises:
            OSError: a file cannot be read or written, or arrived damaged.
            RuntimeError: a connection broke, or a rank was silent.
        """
        to_send = own_bytes if receiver is not None else 0
        sizes = [to_send, *(entry.bytes for entry in incoming.values())]
        for start in range(0, max(sizes), CHUNK_BYTES):
            works, parts = [], []
            if start < to_send:
                chunk = self._read(to_send - start)
                works.append(dist.isend(chunk, receiver, group=group))
            for rank, entry in incoming.items():
                if start < entry.bytes:
                    part = empty_chunk(entry.bytes - start)
                    works.append(dist.irecv(part, rank, group=group))
                    parts.append((self._copies[rank], part))
            for work in works:
                if work is not None:
                    work.wait()
            for file, part in parts:
                file.write(bytes_of(part))
        for rank, entry in incoming.items():
            if self._copies[rank].close() != entry.sha256:
                raise OSError(errno.EIO, f"{file_of(rank)} arrived damaged: its SHA-256 differs")
            flush(self._folder / file_of(rank))
        if self._read_error is not None:
            raise self._read_error

    def close(self) -> None:
        self._own.close()
        for file in self._copies.values():
            with contextlib.suppress(OSError):
                file.close()

    def _read(self, num_bytes: int) -> Tensor:
        """The next chunk of this rank's file. After an error the receiver finds another SHA-256."""
        chunk = empty_chunk(num_bytes)
        try:
            self._own.readinto(bytes_of(chunk))
        except OSError as error:
            self._read_error = error
        return chunk
