"""`mpiddp.Checkpoints`: the checkpoints of a training. `mpiddp train` uses them as any script does."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from mpiddp.checkpoints.contents import read
from mpiddp.checkpoints.folder import list_steps, name_of_step
from mpiddp.checkpoints.records import RunRecords
from mpiddp.checkpoints.resume import Candidate, bring, find
from mpiddp.checkpoints.resumed import Resumed
from mpiddp.checkpoints.retention import Retention, set_aside
from mpiddp.checkpoints.run import Run, RunDir
from mpiddp.checkpoints.save import Saver, SaveSchedule
from mpiddp.checkpoints.state import Outline
from mpiddp.errors import UserError, named_by
from mpiddp.protocol.variables import AGENT_STORE
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import ending_of
from mpiddp.runtime.job.session import current, script_session
from mpiddp.runtime.join import at_exit, enter_until_exit, join
from mpiddp.runtime.log import log, log_to_console
from mpiddp.text import from_here, parse_interval
from mpiddp.world import World

PATIENCE_S = 1800.0  # a rank may still evaluate, write, or read every byte of a checkpoint


class Checkpoints:
    """Checkpoints of a script: written beside the training, verified when read, kept on every host.

        checkpoints = mpiddp.Checkpoints("runs/a", keep=2, every="10m")
        if saved := checkpoints.resume():
            saved.load_into(model=model, optimizer=optimizer)
        for step in range(saved.step + 1 if saved else 1, 1001):
            train_one_step()
            if checkpoints.due(step) or step == 1000:
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
        every: int | str | None = "10m",
        config: Mapping[str, Any] | None = None,
        on_save_error: Literal["warn", "stop"] = "warn",
        timeout_s: float = PATIENCE_S,
        keep_every: int | None = None,
        best: tuple[str, Literal["min", "max"]] | None = None,
    ) -> None:
        """
        Args:
            folder: path of the run: it gets checkpoints/, metrics.jsonl, owner.json while the run writes,
                and logs/ under mpiddp launch.
            keep: number of verified checkpoints to keep. The newest finite one and those pinned by
                `mpiddp checkpoints pin` stay as well.
            every: when `due` is true: a number of steps, or a time such as "30s", "10m" or "1h". None:
                only before a stop.
            config: settings that a resumed run may not change, as JSON.
            on_save_error: "stop" raises a failed save at the next one; "warn" prints it.
            timeout_s: seconds to wait for a rank that does not answer, in a save or a resume.
            keep_every: a number of steps. Also keep the first checkpoint at or after each multiple of it.
            best: ("val_loss", "min") or ("accuracy", "max"): also keep the finite checkpoint with the best
                value of this metric, by the last `mpiddp.log_metrics` before the save.

        Raises:
            TypeError, ValueError: an argument is wrong.
            UserError: the variables of the launcher contradict each other.
            JobFailed: the ranks do not join.
        """
        if keep < 1:
            raise ValueError(f"keep: expected 1 or more, not {keep}")
        if on_save_error not in ("warn", "stop"):
            raise ValueError(f'on_save_error: expected "warn" or "stop", not {on_save_error!r}')
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every: expected 1 or more, not {keep_every}")
        if best is not None and best[1] not in ("min", "max"):
            raise ValueError(f'best: expected ("val_loss", "min") or (…, "max"), not {best!r}')
        self._keep = Retention(keep, keep_every, best)
        self._must_succeed = on_save_error == "stop"
        try:
            self._interval = None if every is None else parse_interval(str(every))
        except ValueError as error:
            raise ValueError(f"every: {error}") from None
        self._config: dict[str, Any] = json.loads(json.dumps(dict(config or {}), allow_nan=False))
        self._timeout_s = timeout_s
        self._dir = RunDir(Path(folder).absolute())  # the script may change the working folder
        self._coordinator = script_coordinator(self.close)
        self._schedule: SaveSchedule | None = None
        self._run: Run | None = None
        self._saver: Saver | None = None
        self._infinite: Sequence[str] | None = None  # tensors with infinities on purpose
        self._left: Mapping[str, set[str]] = {}  # what this rank has left to others at the resume
        self._thread: int | None = None  # of the first save
        self._resumed = -1  # the step from which the run resumes
        self._records = RunRecords(self._dir, best[0] if best else "", self._config)
        self._has_ended, self._pid = False, os.getpid()
        self._made: int | None = None  # the last step of which `due` was asked
        session = current()
        if session.run is None or session.run.is_closed:
            session.run = self._records
        session.savers.append(self._wait_for_own_save)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if ending_of(error, has_stopped=current().stop.has_stopped).is_failure:
            self._end(error)
        else:
            self.close()

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes into the folder, once it is open: one rank of each file system does."""
        return self._run is not None and self._run.is_writer

    def resume(self, path: str | os.PathLike[str] | None = None) -> Resumed | None:
        """The newest verified checkpoint of any host, on all ranks; None if there is none yet.

        A checkpoint whose loss or tensors are not finite counts only if there is no other.

        Opens the folder. Restores the states of Python's, numpy's and torch's random number generators on
        every rank that existed when it was saved, so call it after the model is built. Hosts that lack the
        checkpoint receive its files. Later checkpoints of this run are renamed, and records of later steps
        dropped. Call it once, before the first `save`.

        Args:
            path: a checkpoint, or a folder of a run, to start from instead. Of another run: only until
                this run has a checkpoint of its own. Of this run: to go back to it. A restart ignores the
                path once this run has a checkpoint.

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
        with self._opening() as run:
            copies = find(run, None if path is None else Path(path))
            if not copies:
                return None
            files = bring(run, copies)
            with run.together():
                resumed = read(files, run.rank, local_rank=run.local_rank)
                self._refuse_another(copies[0], resumed)
            host = self._coordinator.hostnames[copies[0].rank]
            where = f" on {host}" if copies[0].rank else ""
            log.info(f"resuming from {from_here(copies[0].path)}{where}: step {resumed.step}")
            with run.together(), named_by("cannot rename"):
                # Or a restart would resume from the newest of them.
                later = set_aside(run.dir.checkpoints, resumed.step) if run.is_writer else ()
                for each in later:
                    log.info(f"renamed to {each.name}: its step is later than that of the resume")
            self._resumed, self._left = resumed.step, resumed._left
            self._infinite = resumed._facts.infinite if copies[0].of_this_run else None
            current().stop.steps_before = resumed.step
            return resumed

    def _refuse_another(self, found: Candidate, resumed: Resumed) -> None:
        """Raise UserError for a checkpoint of another config, or one whose folder was renamed."""
        path = from_here(found.path)
        if found.of_this_run and found.step != resumed.step:
            name = name_of_step(resumed.step)
            raise UserError(
                f"{path} is the checkpoint of step {resumed.step}: rename it to {name}."
            )
        saved, config = resumed.config, self._config
        different = [
            f"{name} {saved.get(name)!r}, now {config.get(name)!r}"
            for name in sorted(saved.keys() | config.keys())
            if saved.get(name) != config.get(name)
        ]
        if different:
            raise UserError(
                f"{path} was made with another config: {'; '.join(different)}. "
                "Use the same config, or name another folder."
            )

    def due(self, step: int) -> bool:
        """Whether to save after this step: the interval has passed, or `mpiddp.should_stop()` is true now.

        Every rank must call this after every step. It is true at a stop too: call it before
        `mpiddp.should_stop()`. All ranks get the same answer. A call takes microseconds.

        Args:
            step: the step that has just ended. It grows by one from call to call.
        """
        if self._schedule is None:
            self._schedule = SaveSchedule(
                self._interval, self._coordinator, step - 1, timeout_s=self._timeout_s
            )
        self._made = step
        is_due = self._schedule.is_due(step)
        return current().stop.stops_next() or is_due

    def save(
        self, step: int, state: Mapping[str, Any], *, per_rank: Mapping[str, Any] | None = None
    ) -> None:
        """Start to save; only the copy of the tensors takes time. A collective: every rank must call it.

        A save waits for the previous one. The end of the script waits for the last one: if it fails,
        the process ends with exit code 1. A step that is saved already is left as it is. All saves
        need one thread, in which the process's other collectives run too.

        Args:
            step: the step that has just ended, the same on all ranks. It grows from save to save.
            state: what the ranks have, by name: tensors, numbers, strings, None, lists and dicts of
                these. The tensors of an entry are in NAME.safetensors. A key of all ranks has the same value
                on all; BatchNorm's running statistics are those of the lowest rank. A key that only some
                ranks have, such as a tensor of a pipeline stage, is saved by the lowest of them. Of a
                DTensor, each rank saves its part.
            per_rank: what only this rank has, such as its position in its data. The states of random number
                generators are always saved.

        Raises:
            TypeError: the state holds anything else. The error names it: state['optimizer']['lr'].
            ValueError: the step is earlier than the newest checkpoint, or not that of the other ranks; an
                entry's name cannot be a file's; ranks have different things under one key, which it names.
            RuntimeError: `close` has been called, or another thread has saved before.
            UserError: the folder has checkpoints, and `resume` has not been called; see there as well. No
                rank has loaded a pipeline stage's tensor of the checkpoint that the run resumes from.
            JobFailed: the previous save has failed, and `on_save_error` is "stop".
        """
        if step < 0:
            raise ValueError(f"step: expected 0 or more, not {step}")
        outline, own = Outline("state", state), Outline("per_rank", per_rank or {})
        if self._records.is_closed:
            raise RuntimeError("save() was called after close().")
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "save() was called from another thread than the first save. Its collectives would meet those "
                "of the training: call it in the thread that trains."
            )
        if self._run is None:
            with self._opening() as run, run.together(), named_by(""):
                if found := list_steps(self._dir.checkpoints):
                    raise UserError(
                        f"{self._dir} has {found[-1].name} of an earlier run. "
                        "Call resume() before the first save(), or name another folder."
                    )
        assert self._saver is not None
        self._saver.save(step, outline, own, self._config)

    def close(self) -> None:
        """Wait for the last save, and give the folder up. A collective: every rank must call it.

        The end of a successful script calls it.

        Raises:
            JobFailed: the last save has failed.
        """
        self._records.is_closed = True
        try:
            if self._saver is not None:
                self._saver.meet(None)
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self._saver = None  # only now: os._exit(0) in a signal handler still waits for its save
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        """Give the folder up. Say once in it how this rank ended; a rank that says nothing has failed."""
        self._records.is_closed = True
        run = self._run
        if run is None or os.getpid() != self._pid:
            return
        failure = ending_of(error).error
        if not self._has_ended and (run.rank == 0 or failure):
            has_stopped = current().stop.has_stopped
            outcome = "failed" if error else "stopped" if has_stopped else "done"
            facts = {"rank": run.rank, "host": socket.gethostname(), "outcome": outcome}
            self._records.note(event="ended", **facts, step=self._made, failure=failure)
        self._has_ended = True
        run.close()

    def _end_at_exit(self) -> None:
        """After an error that has ended a script without a `with`. The thread has ended its save then."""
        assert self._run is not None
        if error := getattr(sys, "last_value", None):
            self._end(error)
        self._run.close()

    def _wait_for_own_save(self) -> None:
        """Wait until this rank has no save in flight, whether the save succeeds or not. Not a collective."""
        saver = self._saver  # another thread may close
        if saver is not None:
            saver.wait()
            if self._records.is_closed:  # its copy of the state is as large as the state
                self._saver = None

    @contextlib.contextmanager
    def _opening(self) -> Iterator[Run]:
        """Open the folder, which an earlier attempt may have created. All ranks must call this.

        The body finds the step from which the run starts. Afterwards the run takes records and saves.
        """
        session = current()
        # A run of this process that an error has ended, and the script has caught it, may still save.
        session.wait_for_saves()
        run = Run(self._dir, self._coordinator, timeout_s=self._timeout_s)
        try:
            yield run
            with run.writing_together():
                if run.is_writer:
                    self._dir.metrics.touch()
                if session.run is self._records:
                    session.log_to(self._dir.logs.absolute())
        except BaseException:
            run.close(removes_new=True)
            raise
        step = max(0, self._resumed)
        self._records.start(step, is_writer=run.is_writer)
        self._run = run
        self._saver = Saver(
            run,
            self._records,
            self._keep,
            step=self._resumed,
            infinite=self._infinite,
            left=self._left,
            must_succeed=self._must_succeed,
        )
        session.coordinator.tell_launcher("run_dir", path=str(self._dir.path.absolute()))
        if run.rank == 0:
            versions = f"python {platform.python_version()}, torch {torch.__version__}"
            hosts = list(self._coordinator.hostnames)
            self._records.note(event="started", step=step, hosts=hosts, versions=versions)
        atexit.register(self._end_at_exit)


def script_coordinator(finish: Callable[[], None]) -> Coordinator:
    """The coordinator of this process. All ranks must call this: they join, unless they have joined before.

    `finish` is called on every rank once its script has succeeded. Its error ends the process with code 1.
    """
    session = script_session()
    world = World.from_env()
    if not session.is_member and world.launcher.name == "none":
        log_to_console(0)
        at_exit(finish)
        alone = Coordinator(replace(world, node_rank=0, num_nodes=1))
        alone.hostnames = (socket.gethostname(),)
        return alone
    if not session.is_member:
        has_store = session.coordinator.connection or os.environ.get(AGENT_STORE) == "True"
        if dist.is_initialized() and not has_store:
            raise UserError(
                "create mpiddp.Checkpoints before init_process_group, so that both use one store; or "
                "start the script with mpiddp run or torchrun."
            )
        enter_until_exit(join(world))
    session.before_leaving.append(finish)
    return session.coordinator
