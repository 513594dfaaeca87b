"""The folder of a run, open: its paths, its one owner, and the ranks that write into it.

    run = Run(RunDir(path), coordinator, timeout_s=1800.0)

The folder has one owner at a time, because two runs in one folder would remove each other's saves. The owner
holds the kernel's lock on owner.json, which ends with its process. `ls runs/a` shows the rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, BinaryIO

from mpiddp.checkpoints import folder
from mpiddp.checkpoints.retention import NO_LOCKS
from mpiddp.errors import JobFailed, UserError, cause_of
from mpiddp.protocol.variables import RUN_DIR, is_restart
from mpiddp.runtime.job.coordinator import Coordinator, Value
from mpiddp.runtime.log import log
from mpiddp.runtime.patches import await_gloo_at_destroy, is_on
from mpiddp.text import escaped, from_here

if TYPE_CHECKING:
    import torch.distributed as dist

# What a folder cannot do at the start, it cannot do after a restart either.
_NEVER = (errno.EROFS, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)
_held: set[Path] = set()  # the kernel grants a process its own lock again


class RunDir:
    """The paths that a run writes: its configuration, records, summary, logs and checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        # A line for each start of the run, and for each rank of it that says how it ended.
        self.attempts = path / "attempts.jsonl"
        self.summary = path / "summary.json"
        self.owner = path / "owner.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"

    def __str__(self) -> str:
        return from_here(self.path)


class RunLock:
    """The lock of a run's folder. The kernel frees it when this process ends, over NFS as well."""

    def __init__(self, run: RunDir) -> None:
        """Raises UserError, or JobFailed in a restart, if another run holds it."""
        self._path, self._pid = run.owner.resolve(), os.getpid()
        if self._path in _held:
            raise UserError(f"{run} is in use by this process. Close it there first.")
        self._file = run.owner.open("a+b", buffering=0)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._file.fileno()).st_nlink:
                # The run before is just ending, and has removed this file, whose lock would exclude nobody.
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                holder = _holder(self._file)
                self._file.close()
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise (JobFailed if is_restart(os.environ) else UserError)(
                    f"{run}: {holder} writes there. Wait for its end, or name another folder."
                ) from None
            log.warning(
                f"warning: {run}: its file system has no locks ({error.strerror}). "
                "Nothing keeps a second run out of this folder."
            )
        _held.add(self._path)
        self._file.truncate(0)
        self._file.write(json.dumps({"host": gethostname(), "pid": self._pid}).encode())

    def release(self) -> None:
        """Give the folder up. In a forked child, or a second time, this does nothing."""
        if os.getpid() != self._pid or self._path not in _held:
            return
        _held.discard(self._path)
        # While it is locked: later, the file may be that of the next run, which has locked it.
        with contextlib.suppress(OSError):  # a file server that is gone
            self._path.unlink()
        self._file.close()


def _holder(file: BinaryIO) -> str:
    try:
        file.seek(0)
        owner = json.loads(file.read(4096))
        return escaped(f"the process {owner['pid']} on {owner['host']}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "another run"


class Run:
    """The open folder of a run, and the ranks that share it, on one rank.

    Attributes:
        group: all ranks, for tensors on the CPU; None for the script's own group, if that is of gloo. A
            reference to it would keep it alive after the script has destroyed it: a rank that still waits
            in a collective would not notice that this one has left.
        timeout_s: how long to wait for a rank that does not answer.
        writer_of: the writer of each rank's file system, the lowest rank there: [world_size].
        nodes: the node of each rank: [world_size].
    """

    def __init__(self, run_dir: RunDir, coordinator: Coordinator, *, timeout_s: float) -> None:
        """Create the run's folder on every host, and become its owner. All ranks must call this."""
        self.dir, self.coordinator, self.timeout_s = run_dir, coordinator, timeout_s
        self.rank, self.world_size = coordinator.world.rank, coordinator.world.world_size
        assert coordinator.world.local_rank is not None, "the ranks have joined"
        self.local_rank = coordinator.world.local_rank
        self.group = self._new_group()
        self._lock: RunLock | None = None  # on the ranks that write
        if os.environ.get(RUN_DIR) == str(run_dir.path.absolute()):
            with self.together():
                if not any(self.gather(run_dir.checkpoints.exists())):  # its server may be away
                    raise JobFailed(f"{run_dir.path} is not there any more: no host can read it.")
        with self.writing_together():
            if run_dir.metrics.exists() and not run_dir.checkpoints.exists():  # it would be cut
                raise UserError(
                    f"{run_dir} has a {run_dir.metrics.name} of another program. Name another folder."
                )
            folders = (run_dir.checkpoints, run_dir.path)
            self._created = [each for each in folders if not each.exists()]
            run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
        self.writer_of = self._find_writers()
        self.nodes = self.gather(coordinator.world.node_rank)
        try:
            with self.writing_together():
                if self.is_writer:
                    self._lock = RunLock(run_dir)
                    folder.remove_leftovers(run_dir.checkpoints)
                    folder.probe_rename(run_dir.checkpoints)
        except BaseException:
            self.close(removes_new=True)
            raise

    @property
    def writers(self) -> list[int]:
        """One rank for each file system, rank 0 first."""
        return sorted(set(self.writer_of))

    @property
    def is_writer(self) -> bool:
        return self.writer_of[self.rank] == self.rank

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks: [world_size]. All ranks must call this."""
        return self.coordinator.all_gather_json(value, timeout_s=self.timeout_s)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Run the body on every rank; it succeeds on all ranks or raises the same error on all."""
        return self.coordinator.all_or_none(timeout_s=self.timeout_s, exits=False)

    @contextlib.contextmanager
    def writing_together(self) -> Iterator[None]:
        """The same for a body that writes into the folder."""
        with self.together():
            try:
                yield
            except OSError as error:
                kind = UserError if error.errno in _NEVER else cause_of(error)
                hint = " Name another folder." if kind is UserError else ""
                raise kind(f"{self.dir} cannot be written: {error.strerror}.{hint}") from None

    def close(self, *, removes_new: bool = False) -> None:
        """Give the folder up; with `removes_new`, also what it has created, if that is empty."""
        if self._lock is not None:
            self._lock.release()
        for each in self._created if removes_new else ():
            with contextlib.suppress(OSError):
                each.rmdir()

    def _new_group(self) -> dist.ProcessGroup | None:
        if self.world_size == 1:
            return None
        import torch.distributed as dist

        with self.together():
            has_group = dist.is_available() and dist.is_initialized()
            found = (dist.get_rank(), dist.get_world_size()) if has_group else None
            if found != (self.rank, self.world_size):
                raise UserError(
                    f"mpiddp.Checkpoints needs a process group of all {self.world_size} ranks. Call "
                    "torch.distributed.init_process_group or mpiddp.init before resume() and save()."
                )
        if is_on("gloo_end"):  # a script's last save may precede the end of its group by a moment
            await_gloo_at_destroy()
        return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def _find_writers(self) -> list[int]:
        """The writer of each rank's file system on which the folder lies: [world_size].

        One rank of each host creates a file in the folder, and every rank looks for these files. The lowest
        rank whose file it sees is its writer. The next run removes what a killed one leaves.
        """
        root, seen = self.dir.checkpoints, list[int]()
        own = folder.hidden(root, f"seen-by-rank-{self.rank}-{secrets.token_hex(8)}")
        try:
            with self.writing_together():
                if self.local_rank == 0:
                    own.touch()
            marks = self.gather(own.name)
            with self.writing_together():
                seen = [rank for rank, name in enumerate(marks) if (root / name).exists()]
            return self.gather(seen[0])
        finally:
            with contextlib.suppress(OSError):
                own.unlink(missing_ok=True)
