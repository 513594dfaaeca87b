"""The folder of a run, open: its paths, its one owner, and the ranks that write into it.

    run = Run(records, coordinator, options, storage, "resume()")

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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import BinaryIO

import torch.distributed as dist

from mpiddp.checkpoints import folders
from mpiddp.checkpoints.bucket import Bucket
from mpiddp.checkpoints.folders import NO_LOCKS, RunDir
from mpiddp.checkpoints.records import RunRecords
from mpiddp.checkpoints.resumed import Resumed
from mpiddp.checkpoints.retention import Wishes, pinned_in
from mpiddp.errors import JobFailed, UserError, cause_of
from mpiddp.files import WRITE_LOCK
from mpiddp.protocol.variables import RUN_DIR, is_restart
from mpiddp.runtime.job.coordinator import Coordinator, Value
from mpiddp.runtime.patches import await_gloo_at_destroy, is_on
from mpiddp.runtime.rank_log import log
from mpiddp.text import escaped, from_here

# These errors would come again after a restart.
_NEVER = (errno.EROFS, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)


class RunLock:
    """The lock of a run's folder. The kernel frees it when this process ends, over NFS as well.

    It belongs to the open file. A lock of lockf would belong to the process, which would lose it as soon as
    the script opens and closes the same file, for example to copy the folder.
    """

    def __init__(self, run: RunDir) -> None:
        """Raises UserError, or JobFailed in a restart, if another run holds it."""
        self._run, self._path, self._pid = run, run.owner.resolve(), os.getpid()
        self._file = run.owner.open("a+b", buffering=0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, WRITE_LOCK)
            if not os.fstat(self._file.fileno()).st_nlink:
                # The run before has just removed this file at its end, so its lock would exclude nobody.
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                holder = _holder(self._file)
                self._file.close()
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                sentence = (
                    f"{run}: {holder} writes there. Wait for its end, or name another folder."
                )
                raise (JobFailed if is_restart(os.environ) else UserError)(sentence) from None
            log.warning(
                f"warning: {run}: its file system has no locks ({error.strerror}). "
                "Nothing keeps a second run out of this folder."
            )
        self._file.truncate(0)
        self._file.write(json.dumps({"host": gethostname(), "pid": self._pid}).encode())
        # A forked child, such as a worker of a DataLoader, shares the open file, and may outlive this rank.
        os.register_at_fork(after_in_child=self._file.close)

    def release(self) -> None:
        """Give the folder up. In a forked child, or a second time, this does nothing."""
        if os.getpid() != self._pid or self._file.closed:
            return
        # Remove them before the lock ends, because afterwards they may be those of the next run.
        folders.remove_leftovers(self._run.checkpoints)
        with contextlib.suppress(OSError):  # the file server may be gone
            self._path.unlink()
        self._file.close()


def _holder(file: BinaryIO) -> str:
    try:
        file.seek(0)
        owner = json.loads(file.read(4096))
        if (owner["pid"], owner["host"]) == (os.getpid(), gethostname()):
            return "this process still"
        return escaped(f"the process {owner['pid']} on {owner['host']}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "another run"


@dataclass(frozen=True)
class RunOptions:
    """The arguments of `Checkpoints`, see there, but for its config. They have to be the same on all ranks."""

    folder: (
        str | os.PathLike[str]
    )  # as the script names it, because its real path may differ between hosts
    every: int | str | None
    timeout_s: float
    keep: int
    keep_every: int | None
    best: Sequence[str] | None
    saves_nan: bool
    on_save_error: str


class Run:
    """The open folder of a run, and the ranks that share it, on one rank.

    Attributes:
        group: all ranks, for tensors on the CPU. None stands for the script's own group, if that is of gloo:
            a reference would keep it alive after the script has destroyed it, and ranks that wait in one of
            its collectives would not notice that this rank has left.
        writer_of: by rank, the lowest rank that sees the same folder, which writes there: [world_size].
        nodes: the node of each rank: [world_size].
        step: the newest step on the disk, or the one from which the run resumes; -1 if there is none.
        storage: the object storage that has a copy of the folder.
        pins: the steps of the checkpoints that are pinned on any host, as far as this rank knows.
        kept: the steps of the checkpoints that other hosts or the bucket had at the resume.
        timeout_s: for a silent rank. None with object storage, whose transfers may take as long as they like.
        resumed: the checkpoint that the run has resumed, until its first save.
        num_saves: the number of saves that this process has begun.
        pending: the step of the save in flight; whether it is on the disk at its end, and what has failed.
        ring: all ranks, for copies of shards.
        to_writers: the ranks that write, if there are several.
    """

    def __init__(
        self,
        records: RunRecords,
        coordinator: Coordinator,
        options: RunOptions,
        storage: Bucket | None,
        call: str,
    ) -> None:
        """Create the folder on every host, and become its owner. All ranks must make this `call`."""
        self.dir = run_dir = records.dir
        self.records, self.coordinator, self.options, self.storage = (
            records,
            coordinator,
            options,
            storage,
        )
        self.timeout_s = None if storage else options.timeout_s
        self.rank, self.world_size = coordinator.world.rank, coordinator.world.world_size
        assert coordinator.world.local_rank is not None, "the ranks have joined"
        self.local_rank = coordinator.world.local_rank
        self.group = self._new_group()
        self.step, self.num_saves = -1, 0
        self.resumed: Resumed | None = None
        self.pending: tuple[int, Future[tuple[bool, str]]] | None = None
        self.ring: dist.ProcessGroup | None = None
        self.to_writers: dist.ProcessGroup | None = None
        self.pins, self.kept = set[int](), set[int]()
        self.prefix = coordinator.unique_prefix("saves")  # begins the keys of its exchanges
        self._verified: dict[Path, bool] = {}  # by checkpoint, whether its hashes are right
        self._lock: RunLock | None = None  # on the ranks that write
        self._require_equal_arguments(call)
        self._require_folder_of_restart()
        with self.writing_together():
            # A resume would cut the records of another program.
            if run_dir.metrics.exists() and not run_dir.checkpoints.exists():
                sentence = f"{run_dir} has a {run_dir.metrics.name} of another program."
                raise UserError(sentence, fix="name another folder")
            self._created = [
                path for path in (run_dir.checkpoints, run_dir.path) if not path.exists()
            ]
            run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
        try:
            self.writer_of = self._find_writers()
            self.nodes = self.gather(coordinator.world.node_rank)
            with self.writing_together():
                if self.is_writer:
                    self._lock = RunLock(run_dir)
                    folders.remove_leftovers(run_dir.checkpoints)
        except BaseException:
            self.close(removes_new=True)
            raise

    def _require_equal_arguments(self, call: str) -> None:
        """Raise UserError, on all ranks, if they have not created the same `Checkpoints`."""
        config = {f"config[{name!r}]": value for name, value in self.records.config.items()}
        arguments = {**vars(self.options), **config, "the first call": call}
        by_rank = self.gather({name: str(value) for name, value in arguments.items()})
        for name in dict.fromkeys(name for arguments in by_rank for name in arguments):
            values = [arguments.get(name, "nothing") for arguments in by_rank]
            if different := self.coordinator.different(values):
                raise UserError(
                    f"mpiddp.Checkpoints: {name} differs: {different}.",
                    fix="broadcast it from rank 0, or take MPIDDP_RUN_ID, which is the same on all ranks, in restarts too",
                )

    def _require_folder_of_restart(self) -> None:
        """Raise, on all ranks, if a restart would not continue the run of the attempt before it.

        Only the first folder that a process opens is judged, because a script may have several runs.
        """
        announced = os.environ.pop(RUN_DIR, "")
        if not announced:
            return
        root = self.dir.checkpoints
        answers = self.gather(
            [announced == str(self.dir.path), root.exists(), bool(folders.list_steps(root))]
        )
        is_same, is_there, has_steps = map(any, zip(*answers, strict=True))
        if is_same:  # on one rank at least: links may give it other names on the other hosts
            if not is_there:  # its file server may be away
                raise JobFailed(f"{announced} is not there any more: no host can read it.")
        elif not has_steps:
            raise UserError(
                f"this restart would begin anew in {self.dir}, which has no checkpoint: the run before it "
                f"wrote to {from_here(announced)}.",
                fix="name one folder for all restarts, for example by MPIDDP_RUN_ID",
            )

    @property
    def writers(self) -> list[int]:
        """One rank for each file system, rank 0 first."""
        return sorted(set(self.writer_of))

    @property
    def bucket(self) -> Bucket | None:
        """The object storage, on the one rank that completes and removes checkpoints there."""
        return self.storage if self.rank == 0 else None

    @property
    def is_writer(self) -> bool:
        return self.writer_of[self.rank] == self.rank

    def scores(self) -> dict[str, dict[int, float]]:
        """The scores of the checkpoints in the folder, by metric and step."""
        steps = {*map(folders.step_of, folders.list_steps(self.dir.checkpoints)), *self.kept}
        return {
            metric: {step: by_step[step] for step in steps if step in by_step}
            for metric, by_step in [*self.records.scores.items()]  # the script may log meanwhile
        }

    def wishes(self) -> Wishes:
        """Which checkpoints are kept, by the script, and by the pins of all hosts. Raises OSError."""
        options, pins = self.options, self.pins | pinned_in(self.dir.path)
        return Wishes(options.keep, options.keep_every, options.best, self.scores(), pins)

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks: [world_size]. A collective: every rank must call it."""
        return self.coordinator.all_gather_json(value, timeout_s=self.timeout_s)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Run the body on every rank. It succeeds on all, or raises the same error on all."""
        return self.coordinator.all_or_none(timeout_s=self.timeout_s, exits=False)

    @contextlib.contextmanager
    def writing_together(self) -> Iterator[None]:
        """Run a body that writes into the folder on every rank, see `together`."""
        with self.together():
            try:
                yield
            except OSError as error:
                kind = UserError if error.errno in _NEVER else cause_of(error)
                fix = "name another folder" if kind is UserError else ""
                raise kind(f"{self.dir} cannot be written: {error.strerror}.", fix=fix) from None

    def is_verified(self, checkpoint: Path, *, is_new: bool = False) -> bool:
        """Hash a checkpoint the first time. Afterwards, and if it is new, compare sizes only."""
        if is_new or checkpoint not in self._verified:
            self._verified[checkpoint] = is_new or folders.is_verified(checkpoint)
        return self._verified[checkpoint] and folders.is_verified(checkpoint, with_hashes=False)

    def wait(self) -> None:
        """Wait for the save in flight, whether it succeeds or not. Not a collective."""
        if (pending := self.pending) is not None:
            wait(pending[1:])

    def close(self, *, removes_new: bool = False) -> None:
        """Give the folder up. With `removes_new`, also remove the folders that this run has created."""
        self.resumed = None
        if self._lock is not None:
            self._lock.release()
        for path in self._created if removes_new else ():
            with contextlib.suppress(OSError):
                path.rmdir()

    def _new_group(self) -> dist.ProcessGroup | None:
        if self.world_size == 1:
            return None
        with self.together():
            place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
            if place != (self.rank, self.world_size):
                raise UserError(
                    f"mpiddp.Checkpoints needs a process group of all {self.world_size} ranks.",
                    fix="call torch.distributed.init_process_group or mpiddp.init before resume() and save()",
                )
        if is_on("gloo_end"):  # a script's last save may precede the end of its group by a moment
            await_gloo_at_destroy()
        return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def _find_writers(self) -> list[int]:
        """The rank that writes for each rank, see `writer_of`.

        One rank of each host creates a file in the folder, and every rank looks for these files. The lowest
        rank whose file it sees is its writer.
        """
        root, seen = self.dir.checkpoints, list[int]()
        mark = folders.hidden(root, f"seen-by-rank-{self.rank}-{secrets.token_hex(8)}")
        try:
            with self.writing_together():
                if self.local_rank == 0:
                    mark.touch()
            marks = self.gather(mark.name)
            with self.writing_together():
                seen = [rank for rank, name in enumerate(marks) if (root / name).exists()]
                if not seen:
                    sentence = f"{root} is not the folder of the other ranks of this host."
                    raise UserError(sentence, fix="create mpiddp.Checkpoints in one working folder")
            return self.gather(seen[0])
        finally:
            with contextlib.suppress(OSError):
                mark.unlink(missing_ok=True)
