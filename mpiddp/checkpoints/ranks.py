"""The ranks that save and resume together, under any launcher or none.

They agree, raise the same errors, find out which of them share a file system, and send files to those that do
not.

`Coordinator.all_or_none` ends the ranks. A script may catch an error and continue, so here each rank raises
the same exception.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import secrets
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.checkpoints.directory import Entry, file_of
from mpiddp.checkpoints.run_dir import RunDir, writing
from mpiddp.checkpoints.state import HashedFile
from mpiddp.errors import FAILED, JobFailed, NoAnswer, UserError, print_from_one_rank
from mpiddp.paths import flush
from mpiddp.protocol.variables import AGENT_STORE
from mpiddp.runtime.job.coordinator import Coordinator, Value
from mpiddp.runtime.job.script_exit import enter_until_exit, exit_now
from mpiddp.runtime.launcher.connected import script_session
from mpiddp.runtime.log import log, log_to_console
from mpiddp.runtime.start.join import join
from mpiddp.world import World

PATIENCE_S = 1800.0  # a rank may still evaluate, write, or read every byte of a checkpoint
CHUNK_BYTES = 16 << 20  # so that no rank holds a whole file in memory


@dataclass(frozen=True)
class Ranks:
    """The ranks of the job: what they agree on, and the group that carries files between them."""

    coordinator: Coordinator
    group: dist.ProcessGroup | None  # for tensors on the CPU; None for a single rank
    timeout_s: float = PATIENCE_S  # how long to wait for a rank that does not answer

    @property
    def rank(self) -> int:
        return self.coordinator.world.rank

    @property
    def node_rank(self) -> int | None:
        return self.coordinator.world.node_rank

    @property
    def local_rank(self) -> int:
        local_rank = self.coordinator.world.local_rank
        assert local_rank is not None, "the ranks have joined"
        return local_rank

    @property
    def is_first_of_host(self) -> bool:
        return self.local_rank == 0

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks: [world_size]. All ranks must call this."""
        return self.coordinator.all_gather_json(value, timeout_s=self.timeout_s)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run the body on every rank; it succeeds on all ranks or raises on all. All ranks must call this.

        Raises:
            UserError: the body has raised one on some rank.
            JobFailed: the body has raised one on some rank. It takes precedence, because a failure of a
                machine may cause what looks like bad input.
        """
        problem, is_failure = "", False
        try:
            yield
        except NoAnswer:  # the missing rank would be missing here as well
            raise
        except (UserError, JobFailed) as error:
            problem, is_failure = str(error), isinstance(error, JobFailed)
        answers = self.gather((problem, is_failure))
        if any(text for text, _ in answers):
            kind = JobFailed if any(failed for _, failed in answers) else UserError
            raise kind(self._sentences([text for text, _ in answers])) from None

    def _sentences(self, problems: list[str]) -> str:
        """Each distinct problem once, after the name of the first rank that has it unless all have it."""
        if len(set(problems)) == 1:
            return problems[0]
        first = {problem: problems.index(problem) for problem in problems if problem}
        names = self.coordinator.hostnames
        return "\n".join(f"rank {rank} on {names[rank]}: {text}" for text, rank in first.items())

    def warn(self, problem: str) -> bool:
        """Rank 0 prints the problem of each rank after the name of its host. "" is no problem.

        All ranks must call this. Returns whether any rank has a problem.
        """
        problems = self.gather(problem)
        if self.rank == 0:
            for host, each in zip(self.coordinator.hostnames, problems, strict=True):
                if each:
                    log.warning(f"warning: {host}: {each}")
        return any(problems)


def script_coordinator(finish: Callable[[], None]) -> Coordinator:
    """The coordinator of this process. All ranks must call this: they join, unless they have joined before.

    Args:
        finish: called on every rank once its script has succeeded. If it raises an error, the process ends
            with code 1.

    Raises:
        UserError: inconsistent variables of launchers, a foreign MPI, or a process group whose rank 0
            already serves a store where the ranks would join.
        JobFailed: ranks that do not join.
    """
    session = script_session()
    world = World.from_env()
    if session.watch is None and world.launcher.name == "none":
        log_to_console(0)
        atexit.register(partial(_finish_alone, finish, os.getpid()))
        here = (socket.gethostname(),)
        only_rank = replace(world, node_rank=0, num_nodes=1)
        return Coordinator(only_rank, None, hostnames=here)
    if session.watch is None:
        has_agent = os.environ.get(AGENT_STORE) == "True"
        if dist.is_initialized() and not has_agent:
            raise UserError(
                "create mpiddp.Checkpoints before init_process_group, so that both use one store; or "
                "start the script with mpiddp run or torchrun."
            )
        enter_until_exit(join(world))
    assert session.coordinator is not None
    session.before_leaving(finish)
    return session.coordinator


def _finish_alone(finish: Callable[[], None], pid: int) -> None:
    if os.getpid() != pid:  # a forked child
        return
    try:
        finish()
    except JobFailed as error:
        print_from_one_rank(str(error), 0, 0)
        exit_now(FAILED)
    except BaseException:  # Python would print it, and end with the script's own code
        traceback.print_exc()
        exit_now(FAILED)


def form_ranks(coordinator: Coordinator, timeout_s: float) -> Ranks:
    """The ranks with a group for tensors on the CPU. All ranks must call this.

    A script's own group of gloo serves. Beside NCCL's there is a new one, so that checkpoints need no
    memory of the GPUs.

    Raises:
        UserError: there is no process group of all ranks.
    """
    world = coordinator.world
    ranks = Ranks(coordinator, None, timeout_s)
    if world.world_size == 1:
        return ranks
    with ranks.together():
        has_group = dist.is_available() and dist.is_initialized()
        if not has_group or (dist.get_rank(), dist.get_world_size()) != (
            world.rank,
            world.world_size,
        ):
            raise UserError(
                f"mpiddp.Checkpoints needs a process group of all {world.world_size} ranks. Call "
                "torch.distributed.init_process_group or mpiddp.init before resume() and save()."
            )
    is_gloo = dist.get_backend() == "gloo"
    return replace(ranks, group=dist.group.WORLD if is_gloo else dist.new_group(backend="gloo"))


# The file systems of the ranks


@dataclass(frozen=True)
class FileSystems:
    """The writer rank of each rank's file system: [world_size]. All ranks have the same.

    Hosts that share none form a ring, in which each also keeps the shards of the host before it. So the loss
    of one host loses nothing.
    """

    writer_of: tuple[int, ...]

    @property
    def writers(self) -> list[int]:
        """One rank for each file system, rank 0 first."""
        return sorted(set(self.writer_of))

    def receiver_of(self, rank: int) -> int | None:
        """The rank that keeps a copy of this rank's file; None if there is no other file system."""
        writers = self.writers
        if len(writers) == 1:
            return None
        index = writers.index(self.writer_of[rank])
        there = self._ranks_at(writers[(index + 1) % len(writers)])
        return there[self._ranks_at(writers[index]).index(rank) % len(there)]

    def senders_to(self, rank: int) -> list[int]:
        """The ranks of whose files this rank keeps a copy."""
        return [each for each in range(len(self.writer_of)) if self.receiver_of(each) == rank]

    def shards_at(self, rank: int) -> list[int]:
        """The ranks whose shards lie on this rank's file system: its own, and those of copies."""
        own = self.writer_of[rank]
        here = self._ranks_at(own)
        kept = [each for each in range(len(self.writer_of)) if self.receiver_of(each) in here]
        return sorted({*here, *kept})

    def _ranks_at(self, writer: int) -> list[int]:
        return [rank for rank, its in enumerate(self.writer_of) if its == writer]


def find_file_systems(run: RunDir, ranks: Ranks) -> FileSystems:
    """The file systems on which the run's folder lies. All ranks must call this.

    One rank of each host creates a file in the folder, and looks for the files of the others.

    Raises:
        UserError: a host cannot write there.
        JobFailed: a host cannot write or read there, because its disk has failed.
    """
    own, out = "", run.path
    seen: list[int] = []
    if ranks.is_first_of_host:
        own = f".seen-by-rank-{ranks.rank}-{secrets.token_hex(8)}"
    try:
        with ranks.together(), writing(run):
            if own:
                (out / own).touch()
        marks = ranks.gather(own)
        with ranks.together(), writing(run):
            if own:
                seen = [rank for rank, mark in enumerate(marks) if mark and (out / mark).exists()]
        # The lowest rank that a host sees writes for all hosts that see the same file system.
        found = (ranks.node_rank, seen[0] if seen else None)
        firsts = ranks.gather(found)
    finally:
        if own:
            with contextlib.suppress(OSError):
                (out / own).unlink()
    writer_of_node = {node: writer for node, writer in firsts if writer is not None}
    return FileSystems(tuple(writer_of_node[node] for node, _ in firsts))


# Files that they send


def broadcast_files(
    files: Sequence[tuple[int, Path, int]], ranks: Ranks
) -> Iterator[tuple[str, memoryview]]:
    """The pieces of each file, on every rank, with its name. Each step of this iterator is a broadcast.

    Args:
        files: the rank that sends it, its path there, and its size in bytes; the same on every rank.

    Raises:
        OSError: this rank could not read a file. It is raised after the last piece, because the other ranks
            wait for all of them; those that keep the file find another SHA-256.
    """
    assert ranks.group is not None, "there are other ranks"
    problem: OSError | None = None
    for source, path, size in files:
        with contextlib.ExitStack() as stack:
            file = None
            for start in range(0, size, CHUNK_BYTES):
                chunk = empty_chunk(size - start)
                if ranks.rank == source:
                    try:
                        file = file or stack.enter_context(path.open("rb"))
                        file.readinto(bytes_of(chunk))
                    except OSError as error:
                        problem = error
                dist.broadcast(chunk, source, group=ranks.group)
                yield path.name, bytes_of(chunk)
    if problem is not None:
        raise problem


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

        A script may call destroy_process_group while its last save is under way. The group itself still
        works then; `dist.isend` would refuse it.

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
                works.append(group.send([chunk], receiver, 0))
            for rank, entry in incoming.items():
                if start < entry.bytes:
                    part = empty_chunk(entry.bytes - start)
                    works.append(group.recv([part], rank, 0))
                    parts.append((self._copies[rank], part))
            for work in works:
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


def empty_chunk(num_bytes: int) -> Tensor:
    """Memory for the next chunk of a file of which `num_bytes` are left: uint8 [at most CHUNK_BYTES]."""
    return torch.empty(min(num_bytes, CHUNK_BYTES), dtype=torch.uint8, device="cpu")


def bytes_of(chunk: Tensor) -> memoryview:
    return memoryview(chunk.numpy())  # type: ignore[arg-type]
