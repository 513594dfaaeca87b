"""`mpiddp.Checkpoints`: the checkpoints of `mpiddp train` for any script.

Its folder is a run's folder, with the same layout as that of `mpiddp train --out`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mpiddp.checkpoints import directory, script_files, search
from mpiddp.checkpoints.agreement import PATIENCE_S, raised_by_all
from mpiddp.checkpoints.open_run import open_run
from mpiddp.checkpoints.owner import RunOwner
from mpiddp.checkpoints.replicas import receive
from mpiddp.checkpoints.rng import restore_rng_states, rng_states
from mpiddp.checkpoints.run_dir import RunDir, writing
from mpiddp.checkpoints.save_schedule import SaveSchedule
from mpiddp.checkpoints.saved import Saved, TensorGroup
from mpiddp.checkpoints.saver import Saver
from mpiddp.checkpoints.script_arguments import (
    check_entries,
    check_step,
    checked_config,
    checked_interval,
    checked_keep,
)
from mpiddp.checkpoints.script_files import ScriptState
from mpiddp.checkpoints.script_ranks import script_coordinator, tensor_group
from mpiddp.checkpoints.script_resumed import Resumed, ResumedBy
from mpiddp.checkpoints.script_run import ScriptRun
from mpiddp.checkpoints.search import Source
from mpiddp.checkpoints.snapshot import PinnedStaging
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import named_by
from mpiddp.protocol.variables import RUN_DIR, is_restart
from mpiddp.runtime.job.session import current


@dataclass(frozen=True)
class _Open:
    """The open folder of a run."""

    saver: Saver
    owner: RunOwner | None  # on the writer ranks


class Checkpoints:
    """Checkpoints of a script: written beside the training, verified when read, kept on every host.

        checkpoints = mpiddp.Checkpoints("runs/a", keep=2, every="10m")
        if saved := checkpoints.resume():
            saved.load_into(model=model, optimizer=optimizer)
        for step in range(saved.step + 1 if saved else 1, 1001):
            train_one_step()
            if checkpoints.due(step):
                checkpoints.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    Every rank creates one, at the same point of the script, and every rank makes the same calls of its
    methods: a script without a launcher as well as one under mpiddp launch, mpirun, srun or torchrun.
    The errors below are raised on all ranks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        every: int | str | None = "10m",
        config: Mapping[str, Any] | None = None,
        on_save_error: Literal["warn", "stop"] = "warn",
    ) -> None:
        """
        Args:
            folder: path of the run: it gets checkpoints/, metrics.jsonl, owner.json while the run writes,
                and logs/ under mpiddp launch.
            keep: number of valid checkpoints to keep.
            every: when `due` is true: a number of steps, or a time such as "30s", "10m" or "1h". None:
                only before a stop.
            config: settings that a resumed run may not change, as JSON.
            on_save_error: "stop" raises a failed save at the next one; "warn" prints it.

        Raises:
            TypeError, ValueError: an argument is wrong.
            UserError: the variables of the launcher contradict each other.
            JobFailed: the ranks do not join.
        """
        self._keep = checked_keep(keep)
        self._interval = checked_interval(every)
        self._config = checked_config(config)
        if on_save_error not in ("warn", "stop"):
            raise ValueError(f'on_save_error: expected "warn" or "stop", not {on_save_error!r}')
        self._must_succeed = on_save_error == "stop"
        self._run = RunDir(Path(folder), option="")
        self._coordinator = script_coordinator(self.close)
        self._schedule: SaveSchedule | None = None
        self._open: _Open | None = None
        self._is_closed = False
        self._step = -1  # the latest one that has been saved, or that the run resumes from
        self._leaves_newer = False  # the folder has later checkpoints than that one
        self._script_run = ScriptRun(self._run)
        session = current()
        session.run = session.run or self._script_run
        session.add_saver(self._wait_for_own_save)

    def resume(self, path: str | os.PathLike[str] | None = None) -> Resumed | None:
        """The newest valid checkpoint of any host, on all ranks; None if there is none yet.

        Restores the states of Python's, numpy's and torch's random number generators on every rank that
        existed when it was saved, so call it after the model is built. Hosts that lack the checkpoint
        receive a copy. Call it once, before the first `save`.

        Args:
            path: a checkpoint, or a folder of a run, to start from instead. Of another run: only until
                this run has a checkpoint of its own. Of this run: `Resumed.load_into` renames later
                checkpoints, or else the first `due`, `save` or `mpiddp.log_metrics`. A restart ignores the
                path once this run has a checkpoint.

        Returns:
            The step, and the states that were saved after it; None if the run has no checkpoint.

        Raises:
            RuntimeError: it has been called before, or after the first `save`.
            UserError: no valid checkpoint there, or one of another script, program or config; another
                run writes into the folder.
            JobFailed: a disk has failed.
        """
        if self._open is not None:
            raise RuntimeError("resume() must be called once, before the first save().")
        with raised_by_all(self._coordinator):
            group = tensor_group(self._coordinator)
        self._wait_for_folder()
        self._refuse_foreign_folder()
        start = search.find(self._coordinator, self._run, self._source(path), self._read, _describe)
        saver = self._open_folder(group)
        received, shards = receive(
            start, self._run, saver.writer_ranks, self._coordinator, group, timeout_s=PATIENCE_S
        )
        step = received.common.step if received else 0
        self._script_run.start(step, is_writer=saver.is_writer, before_drop=self._leave_newer_alone)
        self._leaves_newer = start.leaves_newer
        if received is None:
            return None
        self._step = step
        current().stop.count_from(step)
        own = received.own or {"rng": {}, "state": {}}
        with raised_by_all(self._coordinator):
            self._restore_rng(own["rng"])
        state = received.common.state
        if shards is not None:
            state = shards.as_values({"state": state})["state"]
        return ResumedBy(step, state, own["state"], received.world_size, self._leave_newer_alone)

    @property
    def _local_rank(self) -> int:
        local_rank = self._coordinator.world.local_rank
        assert local_rank is not None, "the ranks have joined"
        return local_rank

    def _restore_rng(self, states: dict[str, Any]) -> None:
        try:
            if states:  # this rank existed
                restore_rng_states(states, self._local_rank)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"the checkpoint was not written by {script_files.WRITTEN_BY}: the states of its random "
                f"number generators cannot be restored ({type(error).__name__})."
            ) from None

    def due(self, step: int) -> bool:
        """Whether to save after this step: the interval has passed, or `mpiddp.should_stop()` is true now.

        Every rank must call this after every step, before or after `mpiddp.should_stop()`. All ranks get
        the same answer. A call takes microseconds.

        Args:
            step: the step that has just ended. It grows by one from call to call.

        Raises:
            TypeError, ValueError: the step is not a whole number, or below 0.
            UserError: later checkpoints cannot be renamed, see `resume`.
            JobFailed: the same because of a disk.
        """
        check_step(step)
        self._leave_newer()
        if self._schedule is None:
            self._schedule = SaveSchedule(
                self._interval, self._coordinator, step - 1, timeout_s=PATIENCE_S
            )
        is_due = self._schedule.is_due(step, ends_epoch=False)
        return current().stop.stops_next() or is_due

    def save(
        self, step: int, state: Mapping[str, Any], *, per_rank: Mapping[str, Any] | None = None
    ) -> None:
        """Start to save; only the copy of the tensors takes time. A collective: every rank must call it.

        A save waits for the previous one. At the end of the script, the last one is waited for: if it
        fails, the process ends with exit code 1. A step that is saved already is left as it is.

        Args:
            step: the step that has just ended. It grows from save to save.
            state: what all ranks have in common, by name: tensors, numbers, strings, None, lists and
                dicts of these. Of the ranks that share a file system, the lowest one's is saved. Of a
                DTensor, each rank saves its part; all ranks have to pass the same ones.
            per_rank: the same of this rank alone, such as its position in its data. Random number
                generators are saved anyway.

        Raises:
            TypeError: the state holds anything else. The error names it: state['optimizer']['lr'].
            ValueError: the step is earlier than the newest checkpoint.
            RuntimeError: `close` has been called.
            UserError: the folder has checkpoints, and `resume` has not been called; see there as well.
            JobFailed: the previous save has failed, and `on_save_error` is "stop"; or another run has
                taken the folder.
        """
        check_step(step)
        check_entries("state", state)
        check_entries("per_rank", per_rank or {})
        if self._is_closed:
            raise RuntimeError("save() was called after close().")
        if self._open is None:
            self._open_new_folder()
        assert self._open is not None
        if step < self._step:
            raise ValueError(
                f"step {step} is earlier than step {self._step}, which {self._run} has already. "
                "Continue to count from the step that resume() returns."
            )
        self._leave_newer()
        if step == self._step:
            return
        saver = self._open.saver
        own = PinnedStaging()  # a copy of its own for each save: the ranks' states are small
        copied = own.copy(dict(per_rank or {}))
        own.wait()
        ranks = saver.gather({"rng": rng_states(self._local_rank), "state": copied})
        self._step = step
        saver.start(step, {"step": step, "state": dict(state)}, ranks, self._write_files)

    def close(self) -> None:
        """Wait for the last save, and give the folder up. A collective: every rank must call it.

        The end of a successful script calls it.

        Raises:
            JobFailed: the last save has failed.
        """
        opened, self._open, self._is_closed = self._open, None, True
        if opened is None:
            return
        try:
            opened.saver.finish()
        finally:
            if opened.owner is not None:
                opened.owner.release()

    def _wait_for_own_save(self) -> None:
        if self._open is not None:
            self._open.saver.wait_for_own_save()

    def _leave_newer(self) -> None:
        """Rename later checkpoints than the one that the run resumes from, and drop their records.

        All ranks must call this. It is not a part of `resume`, because a checkpoint of another model is
        noticed after it, and then the folder stays as it was.

        Raises:
            UserError, JobFailed: they cannot be renamed.
        """
        if self._open is None:
            return
        if self._leaves_newer:
            writer_ranks = self._open.saver.writer_ranks
            search.set_newer_aside(self._step, self._run, self._coordinator, writer_ranks)
            self._leaves_newer = False
        self._script_run.drop_repeated()

    def _leave_newer_alone(self) -> None:
        """Rename them on this rank, if it writes, once it has loaded the checkpoint or records a step.

        A restart after a crash must not resume from the later ones. `_leave_newer` reports an error.
        """
        if self._leaves_newer and self._open is not None and self._open.saver.is_writer:
            with contextlib.suppress(UserError, JobFailed):
                search.rename_newer(self._step, self._run)

    def _open_new_folder(self) -> None:
        """Open the folder for a script that has not called `resume`."""
        with raised_by_all(self._coordinator):
            group = tensor_group(self._coordinator)
        self._refuse_foreign_folder()
        with raised_by_all(self._coordinator), named_by(""):
            if found := directory.list_steps(self._run.checkpoints):
                raise UserError(
                    f"{self._run} has {found[-1].name} of an earlier run. "
                    "Call resume() before the first save(), or name another folder."
                )
        saver = self._open_folder(group)
        self._script_run.start(0, is_writer=saver.is_writer, before_drop=lambda: None)

    def _open_folder(self, group: TensorGroup | None) -> Saver:
        run = self._run
        file_systems, owner = open_run(
            run, self._coordinator, folders=(run.checkpoints,), timeout_s=PATIENCE_S
        )
        saver = Saver(
            run.checkpoints,
            file_systems,
            self._coordinator,
            group,
            keep=self._keep,
            must_succeed=self._must_succeed,
            owner=owner,
        )
        self._open = _Open(saver, owner)
        current().send("run_dir", path=self._path)
        if owner is not None:
            atexit.register(owner.release)  # after an error too; the thread has ended its save then
        self._log_output()
        return saver

    def _log_output(self) -> None:
        """Write what this rank prints into the folder, if it is the run's and --log-dir names no other."""
        session = current()
        with raised_by_all(self._coordinator), writing(self._run):
            output = session.output if session.run is self._script_run else None
            if output is not None and output.log_dir is None:
                session.send("log", path=str(output.log_to(self._run.logs.absolute())))

    def _wait_for_folder(self) -> None:
        """In a restart, wait for the file system of the folder that an earlier attempt has created."""
        if os.environ.get(RUN_DIR) == self._path:
            search.wait_for_run(
                self._run, self._run.checkpoints, self._coordinator, timeout_s=PATIENCE_S
            )

    @property
    def _path(self) -> str:
        return str(self._run.path.absolute())

    def _refuse_foreign_folder(self) -> None:
        """Refuse a folder with files that this class has not written. All ranks must call this."""
        run = self._run
        with raised_by_all(self._coordinator), named_by(""):
            if run.config.exists():
                raise UserError(f"{run} is the folder of mpiddp train. Name another folder.")
            if run.metrics.exists() and not run.checkpoints.exists():
                raise UserError(
                    f"{run} has a {run.metrics.name} of another program. Name another folder."
                )

    def _source(self, path: str | os.PathLike[str] | None) -> Source:
        if path is None:
            return Source()
        is_own = Path(path).resolve().parent == self._run.checkpoints.resolve()
        return Source(path=Path(path), prefers_own=is_restart(os.environ) or not is_own)

    def _read(self, folder: Path) -> Saved[ScriptState]:
        return script_files.read(folder, self._config)

    def _write_files(self, folder: Path, saved: Saved[dict[str, Any]]) -> dict[str, str]:
        common = ScriptState(**saved.common)
        contents = Saved(common, saved.ranks, saved.is_sharded)
        return script_files.write_files(folder, contents, self._config)


def _describe(found: ScriptState) -> str:
    return f"step {found.step}"
