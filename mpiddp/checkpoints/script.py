"""`mpiddp.Checkpoints`: the checkpoints of a training. `mpiddp train` uses them as any script does."""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.contents import MAX_STEP, Contents, Resumed, read
from mpiddp.checkpoints.ranks import PATIENCE_S, form_ranks, script_coordinator
from mpiddp.checkpoints.resume import Found, bring, newest
from mpiddp.checkpoints.run import Run, open_run
from mpiddp.checkpoints.run_dir import RunDir, RunRecords, writing
from mpiddp.checkpoints.save import Saver, SaveSchedule
from mpiddp.checkpoints.state import check_entries
from mpiddp.errors import UserError
from mpiddp.paths import from_here, named_by
from mpiddp.runtime.job.ending import ending_of
from mpiddp.runtime.job.session import current
from mpiddp.runtime.log import log
from mpiddp.text import Interval, parse_interval


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

    A context manager closes itself at the end of the body, and at a sys.exit() that is no failure. After
    an error it only gives the folder up.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        every: int | str | Interval | None = "10m",
        config: Mapping[str, Any] | None = None,
        on_save_error: Literal["warn", "stop"] = "warn",
        timeout_s: float = PATIENCE_S,
    ) -> None:
        """
        Args:
            folder: path of the run: it gets checkpoints/, metrics.jsonl, owner.json while the run writes,
                and logs/ under mpiddp launch.
            keep: number of verified checkpoints to keep.
            every: when `due` is true: a number of steps, or a time such as "30s", "10m" or "1h". None:
                only before a stop.
            config: settings that a resumed run may not change, as JSON.
            on_save_error: "stop" raises a failed save at the next one; "warn" prints it.
            timeout_s: seconds to wait for a rank that does not answer, in a save or a resume.

        Raises:
            TypeError, ValueError: an argument is wrong.
            UserError: the variables of the launcher contradict each other.
            JobFailed: the ranks do not join.
        """
        self._keep = _checked_keep(keep)
        self._interval = _checked_interval(every)
        self._config = _checked_config(config)
        if on_save_error not in ("warn", "stop"):
            raise ValueError(f'on_save_error: expected "warn" or "stop", not {on_save_error!r}')
        self._must_succeed = on_save_error == "stop"
        self._timeout_s = timeout_s
        self._dir = RunDir(Path(folder).absolute())  # the script may change the working folder
        self._coordinator = script_coordinator(self.close)
        self._schedule: SaveSchedule | None = None
        self._run: Run | None = None
        self._saver: Saver | None = None  # from the first save on
        self._verified: Path | None = None  # the checkpoint that this host has just verified
        self._step = -1  # the latest one that has been saved, or that the run resumes from
        self._records = RunRecords(self._dir)
        self._has_noted_end, self._pid = False, os.getpid()
        session = current()
        if session.run is None or session.run.is_closed:
            session.run = self._records
        session.add_saver(self._wait_for_own_save)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not ending_of(error, has_stopped=current().stop.has_stopped).is_failure:
            self.close()
        else:
            self._note_end("failed", error)
            self._give_up()

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes into the folder, once it is open: one rank of each file system does."""
        return self._run is not None and self._run.is_writer

    def resume(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        check: Callable[[Resumed], None] | None = None,
    ) -> Resumed | None:
        """The newest verified checkpoint of any host, on all ranks; None if there is none yet.

        Opens the folder. Restores the states of Python's, numpy's and torch's random number generators on
        every rank that existed when it was saved, so call it after the model is built. Hosts that lack the
        checkpoint receive its files. Later checkpoints of this run are renamed, and records of later steps
        dropped. Call it once, before the first `save`.

        Args:
            path: a checkpoint, or a folder of a run, to start from instead. Of another run: only until
                this run has a checkpoint of its own. Of this run: to go back to it. A restart ignores the
                path once this run has a checkpoint.
            check: called with the checkpoint before anything changes; refuses it by a UserError.

        Returns:
            The step, and the states that were saved after it; None if the run has no checkpoint.

        Raises:
            RuntimeError: it has been called before, or after the first `save`.
            UserError: no verified checkpoint there, or one of another script, program or config; another
                run writes into the folder.
            JobFailed: a disk has failed.
        """
        if self._run is not None:
            raise RuntimeError("resume() must be called once, before the first save().")
        run = self._open()
        try:
            found = newest(run, None if path is None else Path(path))
            if found is None:
                self._start(run, 0)
                return None
            files = bring(run, found)
            with run.ranks.together():
                contents = read(files)
                _refuse_other_step(found, contents)
                self._refuse_other_config(found, contents)
                resumed = contents.resumed_by(run.ranks.rank)
                if check is not None:
                    check(resumed)
                contents.restore_rng(run.ranks.rank, run.ranks.local_rank)
            log.info(f"resuming from {found.named(run.ranks)}: step {resumed.step}")
            if found.leaves_newer:
                run.set_newer_aside(resumed.step)
            self._step = resumed.step
            current().stop.count_from(resumed.step)
            # A sharded one that another host had better stays here as it was.
            if found.is_own and (not found.is_sharded or found.host_of(run.ranks.node_rank)):
                self._verified = found.folder
            self._start(run, resumed.step)
        except BaseException:
            run.close(removes_new=True)
            raise
        return resumed

    def _refuse_other_config(self, found: Found, contents: Contents) -> None:
        saved, config = contents.config, self._config
        different = [
            f"{name} {saved.get(name)!r}, now {config.get(name)!r}"
            for name in sorted(saved.keys() | config.keys())
            if saved.get(name) != config.get(name)
        ]
        if different:
            raise UserError(
                f"{from_here(found.folder)} was made with another config: {'; '.join(different)}. "
                "Use the same config, or name another folder."
            )

    def due(self, step: int) -> bool:
        """Whether to save after this step: the interval has passed, or `mpiddp.should_stop()` is true now.

        Every rank must call this after every step, before or after `mpiddp.should_stop()`. All ranks get
        the same answer. A call takes microseconds.

        Args:
            step: the step that has just ended. It grows by one from call to call.

        Raises:
            TypeError, ValueError: the step is not a whole number, or below 0.
        """
        _check_step(step)
        if self._schedule is None:
            self._schedule = SaveSchedule(
                self._interval, self._coordinator, step - 1, timeout_s=self._timeout_s
            )
        is_due = self._schedule.is_due(step)
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
                dicts of these. Each entry becomes a file, NAME.pt. Of the ranks that share a file system,
                the lowest one's is saved. Of a DTensor, each rank saves its part; all ranks have to pass
                the same ones.
            per_rank: the same of this rank alone, such as its position in its data. Random number
                generators are saved anyway.

        Raises:
            TypeError: the state holds anything else. The error names it: state['optimizer']['lr'].
            ValueError: the step is earlier than the newest checkpoint; an entry's name cannot be a file's.
            RuntimeError: `close` has been called.
            UserError: the folder has checkpoints, and `resume` has not been called; see there as well.
            JobFailed: the previous save has failed, and `on_save_error` is "stop"; or another run has
                taken the folder.
        """
        _check_step(step)
        check_entries("state", state)
        check_entries("per_rank", per_rank or {})
        if self._records.is_closed:
            raise RuntimeError("save() was called after close().")
        if self._run is None:
            self._open_new()
        assert self._run is not None
        if step < self._step:
            raise ValueError(
                f"step {step} is earlier than step {self._step}, which {self._dir} has already. "
                "Continue to count from the step that resume() returns."
            )
        if step == self._step:
            return
        if self._saver is None:
            self._saver = Saver(
                self._run,
                keep=self._keep,
                must_succeed=self._must_succeed,
                verified=self._verified,
            )
        self._saver.save(step, dict(state), dict(per_rank or {}), self._config)
        self._step = (
            step  # the save before has not failed, or a script that goes on may repeat this one
        )

    def close(self) -> None:
        """Wait for the last save, and give the folder up. A collective: every rank must call it.

        The end of a successful script calls it.

        Raises:
            JobFailed: the last save has failed.
        """
        self._records.is_closed = True
        try:
            if self._saver is not None:
                self._saver.finish()
        finally:
            self._saver = None  # only now: os._exit(0) in a signal handler still waits for its save
            failed = sys.exc_info()[1]  # its last save
            outcome = "stopped" if current().stop.has_stopped else "done"
            self._note_end("failed" if failed else outcome, failed)
            self._give_up()

    def _give_up(self) -> None:
        self._records.is_closed = True
        if self._run is not None:
            self._run.close()

    def _note_uncaught(self) -> None:
        """At the exit of a script without a `with` that an error has ended."""
        if error := getattr(sys, "last_value", None):
            self._note_end("failed", error)

    def _note_end(self, outcome: str, error: BaseException | None = None) -> None:
        """Say once in the run's folder how this rank ended. A rank that says nothing has failed."""
        if self._run is None or self._has_noted_end or os.getpid() != self._pid:
            return
        self._has_noted_end = True
        failure = ending_of(error).sentence if outcome == "failed" else ""
        rank = self._run.ranks.rank
        if rank == 0 or failure:
            facts = {"rank": rank, "host": socket.gethostname(), "outcome": outcome}
            self._records.note(event="ended", **facts, failure=failure)

    def _wait_for_own_save(self) -> None:
        saver = self._saver  # another thread may close
        if saver is not None:
            saver.wait_for_own_save()
            if self._records.is_closed:  # its copy of the state is as large as the state
                self._saver = None

    def _open_new(self) -> None:
        """Open the folder for a script that has not called `resume`."""
        run = self._open()
        try:
            with run.ranks.together(), named_by(""):
                if found := directory.list_steps(self._dir.checkpoints):
                    raise UserError(
                        f"{self._dir} has {found[-1].name} of an earlier run. "
                        "Call resume() before the first save(), or name another folder."
                    )
            self._start(run, 0)
        except BaseException:
            run.close(removes_new=True)
            raise

    def _open(self) -> Run:
        """Open the folder, which an earlier attempt may have created. All ranks must call this."""
        # One of this process that an error has ended, and the script has caught it, may still save.
        current().wait_for_saves()
        return open_run(self._dir, form_ranks(self._coordinator, self._timeout_s))

    def _start(self, run: Run, step: int) -> None:
        """Take records and saves after this step. All ranks must call this."""
        session = current()
        output = session.output if session.run is self._records else None
        with run.ranks.together(), writing(self._dir):
            if run.is_writer:
                self._dir.metrics.touch()
            if output is not None and output.log_dir is None:
                session.send("log", path=str(output.log_to(self._dir.logs.absolute())))
        self._records.start(step, is_writer=run.is_writer)
        self._run = run
        session.send("run_dir", path=str(self._dir.path.absolute()))
        if run.ranks.rank == 0:
            versions = f"python {platform.python_version()}, torch {torch.__version__}"
            hosts = list(self._coordinator.hostnames)
            self._records.note(event="started", step=step, hosts=hosts, versions=versions)
        atexit.register(self._note_uncaught)
        if run.owner is not None:
            atexit.register(
                run.owner.release
            )  # after an error too; the thread has ended its save then


def _refuse_other_step(found: Found, contents: Contents) -> None:
    """Refuse a renamed checkpoint of this run: it would always be the newest, or never."""
    if found.is_own and directory.step_of(found.folder) != contents.step:
        name = f"step_{contents.step:08d}"
        raise UserError(
            f"{from_here(found.folder)} is the checkpoint of step {contents.step}: rename it to "
            f"{name}."
        )


def _check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step: expected a whole number, not {step!r}")
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step: expected 0 or more, not {step}")


def _checked_keep(keep: int) -> int:
    if isinstance(keep, bool) or not isinstance(keep, int):
        raise TypeError(f"keep: expected a whole number, not {keep!r}")
    if keep < 1:
        raise ValueError(f"keep: expected 1 or more, not {keep}")
    return keep


def _checked_interval(every: int | str | Interval | None) -> Interval | None:
    if every is None or isinstance(every, Interval):
        return every
    if isinstance(every, bool) or not isinstance(every, (int, str)):
        raise TypeError(f'every: expected a number of steps or a time such as "10m", not {every!r}')
    try:
        return parse_interval(str(every))
    except ValueError as error:
        raise ValueError(f"every: {error}") from None


def _checked_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config as it will be read again. Raises TypeError if it is not JSON."""
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config: expected a dict, not {type(config).__name__}")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(config or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"config: expected numbers, strings, lists and dicts: {error}") from None
    return plain
