"""`mpiddp.Checkpoints`: the checkpoints of a training."""

from __future__ import annotations

import atexit
import contextlib
import json
import operator
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from mpiddp.checkpoints.bucket import Bucket, local_path
from mpiddp.checkpoints.folders import RunDir, list_steps
from mpiddp.checkpoints.place import is_address
from mpiddp.checkpoints.records import RunRecords, runs
from mpiddp.checkpoints.resume import resume
from mpiddp.checkpoints.resumed import Resumed
from mpiddp.checkpoints.run_folder import Run, RunOptions
from mpiddp.checkpoints.save import agree, save
from mpiddp.checkpoints.schedule import SaveSchedule
from mpiddp.checkpoints.state import FlatState
from mpiddp.errors import UserError, named_by
from mpiddp.protocol.variables import AGENT_STORE
from mpiddp.runtime.in_image import refuse_lost
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import ending_of
from mpiddp.runtime.job.session import current, script_session
from mpiddp.runtime.join import at_exit, enter_until_exit, join
from mpiddp.runtime.rank_log import log_to_console
from mpiddp.text import parse_interval
from mpiddp.world import World

PATIENCE_S = 1800.0  # another rank may evaluate, or verify a checkpoint, for so long


class Checkpoints:
    """Checkpoints of a script: written beside the training, verified when read, kept on every host.

        checkpoints = mpiddp.Checkpoints("runs/a", keep=2, every="10m")
        if saved := checkpoints.resume():
            saved.load_into(model=model, optimizer=optimizer)
        for step in range(saved.step + 1 if saved else 1, 1001):
            train_one_step()
            if checkpoints.due(step) or step == 1000:
                checkpoints.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    Every rank creates one, at the same point of the script, and makes the same calls, under any launcher.
    The errors below are raised on all ranks. A context manager closes itself at the end of the body, and at a
    sys.exit() that is no failure. After an error it only gives the folder up.
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
        saves_nan: bool = False,
    ) -> None:
        """
        Args:
            folder: path of the run, or an address of object storage, such as "s3://bucket/runs/a".
            keep: number of verified checkpoints to keep, besides those that are pinned, or mapped by a reader.
            every: steps, or a time such as "30s", "10m" or "1h", after which `due` is true. None: only at a
                stop. With a time, it is also true after 1/8, 1/4 and 1/2 of it, and after a new run's first step.
            config: settings that a resumed run may not change, as JSON.
            on_save_error: "stop" raises a failed save at the next one; "warn" prints it.
            timeout_s: seconds to wait for a silent rank, in a save or a resume; no limit with object storage.
            keep_every: a number of steps. Also keep the first checkpoint at or after each multiple of it.
            best: ("val_loss", "min") or ("accuracy", "max"): also keep the checkpoint whose step has
                the best value in `mpiddp.log_metrics`.
            saves_nan: also save a module or an optimizer that has NaN or infinities. Such a save fails
                otherwise, and the run resumes from the checkpoint before it.
        """
        if keep < 1:
            raise ValueError(f"keep: expected 1 or more, not {keep}")
        if on_save_error not in ("warn", "stop"):
            raise ValueError(f'on_save_error: expected "warn" or "stop", not {on_save_error!r}')
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every: expected 1 or more, not {keep_every}")
        if best is not None and best[1] not in ("min", "max"):
            raise ValueError(f'best: expected ("val_loss", "min") or (…, "max"), not {best!r}')
        try:
            self._interval = None if every is None else parse_interval(str(every))
        except ValueError as error:
            raise ValueError(f"every: {error}") from None
        settings: dict[str, Any] = json.loads(json.dumps(dict(config or {}), allow_nan=False))
        self._bucket = Bucket(str(folder)) if is_address(folder) else None
        path = local_path(folder) if self._bucket else Path(folder)
        run_dir = RunDir(path.absolute())  # the script may change the working folder
        self._records = RunRecords(run_dir, best[0] if best else "", settings)
        self._options = RunOptions(
            folder, every, timeout_s, keep, keep_every, best, saves_nan, on_save_error
        )
        self._coordinator = _script_coordinator(self.close)
        self._schedule: SaveSchedule | None = None
        self._run: Run | None = None
        self._thread: int | None = None  # the thread that called the first save
        self._has_ended, self._pid = False, os.getpid()
        self._made: int | None = None  # the last step for which `due` was called
        runs()[:] = [*(records for records in runs() if not records.is_closed), self._records]
        current().progress.savers.append(self._wait_for_own_save)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if current().end.of(error).is_failure:
            self._end(error)
        else:
            self.close()

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes into the folder, once it is open: one rank of each file system does."""
        return self._run is not None and self._run.is_writer

    def resume(self) -> Resumed | None:
        """The newest verified checkpoint of any host, on all ranks; None if there is none yet.

        The random number generators of Python, numpy and torch are restored as well, so build the model
        before. Records of later steps are dropped. Call it once, before the first `save`.

        To start from another run: `saved = checkpoints.resume() or mpiddp.load("runs/other")`. To go back in
        this one: `mpiddp checkpoints rewind DIR STEP`. The next resume begins there, and sets later ones aside.

        Raises:
            UserError: no verified checkpoint there, or one of another script, program or config; another
                run writes into the folder. The arguments differ between the ranks. A restart names another
                folder than the run before it, and this folder has no checkpoint.
            JobFailed: a disk has failed.
        """
        if self._run is not None:
            raise RuntimeError("resume() must be called once, before the first save().")
        with self._opening("resume()") as run:
            return resume(run)

    def due(self, step: int) -> bool:
        """Whether to save after this step: the interval has passed, or `mpiddp.should_stop()` is true now.

        Every rank must call this after every step. It is true at a stop too: call it before
        `mpiddp.should_stop()`. All ranks get the same answer. A call takes microseconds, but if `every` is a
        time, a few calls wait until all ranks have made theirs.

        Args:
            step: the step that has just ended. It grows by one from call to call.
        """
        if self._schedule is None:
            self._schedule = SaveSchedule(
                self._interval,
                self._coordinator,
                step - 1,
                is_new=self._run is None or self._run.step < 0,
                timeout_s=self._options.timeout_s,
            )
        self._made = step
        is_due = self._schedule.is_due(step)
        return current().stop.stops_next() or is_due

    def save(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        *,
        per_rank: Mapping[str, Any] | None = None,
        **objects: Any,  # an argument of a new name would be no entry of the state any more
    ) -> None:
        """Start to save; only the copy of the tensors takes time. A collective: every rank must call it.

            checkpoints.save(step, model=model, optimizer=optimizer)
            checkpoints.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

        A save waits for the one before, and the end of the script for the last: if that one fails, the exit
        code is 1. A step that is saved is left as it is; one whose save has failed is saved again.

        Args:
            step: the step that has just ended, the same on all ranks. It grows from save to save.
            state: what the ranks have, by name: tensors, numbers, strings, None, lists and dicts of
                these, objects with a `state_dict`. Scalars of numpy, sets, deques and dataclasses become
                numbers, lists and dicts. A key of all ranks has the same value on all; BatchNorm's running
                statistics are those of the lowest rank. If only some ranks have a key, as of a pipeline's
                stage, the lowest of them saves it. Of a DTensor, each rank saves its part.
            per_rank: what only this rank has, such as its position in its data.
            objects: more entries of the state.

        Raises:
            TypeError: the state holds anything else. The error names it: state['optimizer']['lr'].
            ValueError: the step is earlier than the newest checkpoint; an entry's name cannot be a file's;
                ranks have different things under one key, which it names.
            RuntimeError: another thread than that of the first save calls it.
            UserError: the ranks save different steps; the folder has checkpoints, and `resume` has not been
                called; see there as well. No rank has loaded a pipeline stage's tensor of the resumed run.
            JobFailed: the previous save has failed, and `on_save_error` is "stop".
        """
        step = operator.index(step)  # a number of numpy, for example
        if step < 0:
            raise ValueError(f"step: expected 0 or more, not {step}")
        if twice := sorted((state or {}).keys() & objects.keys()):
            raise ValueError(f"state has {twice[0]!r} already")
        flat = FlatState("state", {**(state or {}), **objects} if objects else state or {})
        of_rank = FlatState("per_rank", per_rank or {})
        if self._records.is_closed:
            raise RuntimeError("save() was called after close().")
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "save() was called from another thread than the first save. Its collectives would meet those "
                "of the training: call it in the thread that trains."
            )
        if self._run is None:
            with self._opening("save()") as run, run.together(), named_by(""):
                if folders := list_steps(self._records.dir.checkpoints):
                    sentence = f"{self._records.dir} has {folders[-1].name} of an earlier run."
                    raise UserError(
                        sentence,
                        fix="call resume() before the first save(), or name another folder",
                    )
        assert self._run is not None
        save(self._run, step, flat, of_rank)

    def close(self) -> None:
        """Wait for the last save, and give the folder up. A collective: every rank must call it.

        The end of a successful script calls it.

        Raises:
            JobFailed: the last save has failed.
        """
        try:
            if (run := self._run) is not None and not self._has_ended:
                agree(run, None)
                if run.is_writer:  # the last scores
                    with contextlib.suppress(OSError):
                        run.wishes().write(self._records.dir.path)
        except BaseException as error:
            self._end(error)
            raise
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        """Record how this rank ended, and give the folder up. A rank without that has failed."""
        self._records.is_closed = True
        run = self._run
        if run is None or os.getpid() != self._pid:
            return
        failure = ending_of(error).error
        if not self._has_ended and (run.rank == 0 or failure):
            has_stopped = current().stop.has_stopped
            outcome = "failed" if error else "stopped" if has_stopped else "done"
            facts = {"rank": run.rank, "host": socket.gethostname(), "outcome": outcome}
            self._records.add_event(event="ended", **facts, step=self._made, failure=failure)
        self._has_ended = True
        run.wait()  # the thread that saves still writes and removes in the folder
        run.close()

    def _end_at_exit(self) -> None:
        """Give the folder up after an error that has ended a script without a `with`."""
        assert self._run is not None
        if error := getattr(sys, "last_value", None):
            self._end(error)
        self._run.close()

    def _wait_for_own_save(self) -> None:
        """Wait until this rank has no save in flight, whether the save succeeds or not. Not a collective."""
        if (run := self._run) is not None:
            run.wait()

    @contextlib.contextmanager
    def _opening(self, call: str) -> Iterator[Run]:
        """Open the folder, and start the run after the body. All ranks must make this `call`."""
        session = current()
        # If a script catches the error that has ended another run of this process, that run may still save.
        session.progress.wait_for_saves()
        if not self._bucket:
            refuse_lost(self._records.dir.path)
        run = Run(self._records, self._coordinator, self._options, self._bucket, call)
        try:
            yield run
            with run.writing_together():
                self._records.start(run.step, is_writer=run.is_writer)
                if run.is_writer:
                    self._records.dir.metrics.touch()
                    run.wishes().write(self._records.dir.path)
                if runs()[0] is self._records:
                    session.keep_output(self._records.dir.logs)
        except BaseException:
            run.close(removes_new=True)
            raise
        self._run = run
        session.coordinator.tell_launcher("run_dir", path=str(self._records.dir.path))
        if run.rank == 0:
            versions = f"python {platform.python_version()}, torch {torch.__version__}"
            hosts = list(self._coordinator.hostnames)
            self._records.add_event(
                event="started", step=max(run.step, 0), hosts=hosts, versions=versions
            )
        atexit.register(self._end_at_exit)


def _script_coordinator(finish: Callable[[], None]) -> Coordinator:
    """The coordinator of this process. All ranks must call this: they join, unless they have joined before.

    `finish` is called on every rank once its script has succeeded. Its error ends the process with code 1.
    """
    session = script_session(joins=True)
    world = World.from_env(session.env)
    if not session.is_member and world.launcher.name == "none":
        log_to_console(0)
        at_exit(finish)
        alone = Coordinator(world._replace(node_rank=0, num_nodes=1))
        alone.hostnames = (socket.gethostname(),)
        return alone
    if not session.is_member:
        has_store = session.coordinator.connection or session.env.get(AGENT_STORE) == "True"
        if dist.is_initialized() and not has_store:
            sentence = "mpiddp.Checkpoints comes after init_process_group, so the two would have no common store."
            raise UserError(
                sentence, fix="create it before, or start the script with mpiddp run or torchrun"
            )
        enter_until_exit(join(world))
    session.progress.before_leaving.append(finish)
    return session.coordinator
