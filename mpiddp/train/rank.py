"""One rank of a training, from its options to the final table: everything around the loop.

Every check that may fail on some ranks runs in `all_or_none`, so all ranks refuse and exit together.
No rank writes anything before all ranks have passed these checks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import time
from collections.abc import Iterator

import torch

from mpiddp.checkpoints.run_dir import RunDir, save_json, writing
from mpiddp.errors import DONE, STOPPED, UserError
from mpiddp.paths import named_by, read_limited
from mpiddp.protocol.variables import is_restart
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.job.stop import listen_when_alone
from mpiddp.runtime.launcher.announcement import announce
from mpiddp.runtime.log import log, log_to_console, log_to_file
from mpiddp.runtime.start.join import join
from mpiddp.runtime.torch.process_group import default_group
from mpiddp.text import counted
from mpiddp.train import checkpoint, flight_recorder
from mpiddp.train.config import IMAGES_PER_PASS, TrainConfig, out_dir, resume_args
from mpiddp.train.copies import find_copies
from mpiddp.train.data.dataset import Data
from mpiddp.train.determinism import check_determinism
from mpiddp.train.divergence import warn_of_one_copy
from mpiddp.train.engine import build_model, choose_kernels
from mpiddp.train.log_to import logged_to
from mpiddp.train.loop import TrainInputs, build_state, train
from mpiddp.train.metrics import Summary, read_summary, table
from mpiddp.train.opening import open_data, prepare
from mpiddp.train.options import TrainOptions
from mpiddp.train.plan import TrainPlan, plan_training
from mpiddp.train.profiling import check_profile
from mpiddp.train.rank_config import resolve_rank_config
from mpiddp.train.run_record import recorded
from mpiddp.train.sinks import check_packages
from mpiddp.world import World

PREPARE_TIMEOUT_S = 1800.0  # the download of a data set over a slow connection
_MAX_SUMMARY_BYTES = 16 << 20


def run_rank(options: TrainOptions | UserError, world: World, session: Session) -> int:
    """Join the other ranks, train, and return the exit code: DONE, or STOPPED on request.

    Args:
        options: those of the command line, or the error in them.

    Raises:
        UserError, SystemExit: bad input, see `mpiddp.runtime.job.coordinator`.
    """
    with join(world) as coordinator:
        world = coordinator.world
        is_alone = world.launcher.name == "none"
        log_to_console(world.rank)
        config, backend, device = resolve_rank_config(options, coordinator)
        _require_equal_settings(config, backend, coordinator)
        with coordinator.all_or_none():
            copies = find_copies(config, coordinator)
        if world.rank == 0:
            warn_of_one_copy(config, copies)
        if is_alone:
            log.info(
                "no launcher: training alone, as rank 0 of 1. "
                "For several ranks, see: mpiddp launch --help"
            )
        with coordinator.all_or_none(timeout_s=PREPARE_TIMEOUT_S), named_by("--data-dir"):
            if world.local_rank == 0:
                prepare(config)
        started = coordinator.broadcast_json(time.strftime("%Y%m%d-%H%M%S"))
        run = RunDir(out_dir(config, started))
        data = _open_data(config, coordinator, device)
        with coordinator.all_or_none():
            plan = plan_training(config, data, coordinator)
            if config.profile and not is_restart(os.environ):
                check_profile(config, plan.total_steps, world.world_size)
            model = build_model(config, data)
        choose_kernels(config)
        inputs = TrainInputs(config, plan, data, model, coordinator, device, run, copies)
        group = default_group(coordinator, backend, device, timeout_s=config.timeout)
        if config.check_determinism is not None:
            with group:
                return check_determinism(inputs)
        with coordinator.all_or_none():
            _refuse_existing_run(run, config)
            if world.rank == 0:
                check_packages(config.log_to)
        _announce(config, plan, run)
        if backend == "nccl":
            os.environ.update(flight_recorder.settings(run.logs, os.environ))
        with group:
            state, ddp = build_state(inputs)
            with checkpoint.open_checkpoints(run.path, config) as checkpoints:
                with coordinator.all_or_none():
                    progress = checkpoint.resume(
                        checkpoints, state, config, data.contents, coordinator
                    )
                with coordinator.all_or_none(), writing(run):
                    run.logs.mkdir(exist_ok=True)
                    with named_by(""):
                        run.rank_log(world.rank).open("ab").close()
                    if checkpoints.is_writer:
                        save_json(run.config, config.as_json())
                with _rank_log(run, world, session), contextlib.ExitStack() as beside:
                    if world.rank == 0:
                        beside.enter_context(recorded(run, coordinator, started))
                        beside.enter_context(logged_to(config.log_to, run))
                    log.info(_headline(inputs, backend))
                    if is_alone:
                        listen_when_alone(session.stop)
                    summary = train(inputs, state, ddp, progress, checkpoints)
        if summary is None:
            session.stop.stopped()
            return STOPPED
        if world.rank == 0:
            summary = _save_summary(run, summary)
        log.info(f"\n{table(summary, run.path)}")
    return DONE


def _require_equal_settings(config: TrainConfig, backend: str, coordinator: Coordinator) -> None:
    """Refuse ranks that resolved different defaults on different devices. All ranks must call this."""
    with coordinator.all_or_none():
        coordinator.require_equal(
            "the automatic choice of settings",
            f"{backend}, {config.arch}, amp {config.amp}, {config.batch_size} images a rank",
            hint="Set them explicitly: --backend, --arch, --amp, --batch-size.",
        )


def _open_data(config: TrainConfig, coordinator: Coordinator, device: torch.device) -> Data:
    """Open the data set, and check that all ranks have the same one. All ranks must call this."""
    with coordinator.all_or_none(), named_by("--data-dir"):
        data = open_data(config, coordinator.world, device)
    with coordinator.all_or_none():
        coordinator.require_equal(
            "the data set", data.contents, hint="Use the same data on every host: --data-dir."
        )
    return data


def _announce(config: TrainConfig, plan: TrainPlan, run: RunDir) -> None:
    """Send the launcher what it needs to restart this run, from its checkpoint or on fewer hosts."""
    images = plan.order.global_batch_size
    announce(
        resume_args=resume_args(config, run.path),
        global_batch_size=images,
        # As many as now can train, even with one image each, if the model has been built for that.
        max_ranks=max(plan.order.world_size, images // IMAGES_PER_PASS),
    )


def _refuse_existing_run(run: RunDir, config: TrainConfig) -> None:
    """Raise UserError if --resume never names the folder of a run. A restart resumes its own run."""
    files = (run.checkpoints, run.config, run.metrics, run.summary)
    if config.resume == "never" and not is_restart(os.environ):
        with named_by("--out"):
            if found := [path for path in files if path.exists()]:
                raise UserError(
                    f"--resume never, but --out {run} already holds a run ({found[0].name}). "
                    "Name another --out, or omit --resume to resume the run."
                )


@contextlib.contextmanager
def _rank_log(run: RunDir, world: World, session: Session) -> Iterator[None]:
    """Write logs/rank_00003.log: the rank's identity, and the traceback if the body fails."""
    own = logging.getLogger("mpiddp.rank")
    own.propagate = False  # keep it off the console
    own.setLevel(logging.INFO)
    path = run.rank_log(world.rank)
    session.send("log", path=str(path))
    with log_to_file(own, path):
        own.info(
            "started: rank %d of %d, local rank %d, node %s, host %s, pid %d, python %s, torch %s, by %s",
            world.rank,
            world.world_size,
            world.local_rank,
            world.node_rank,
            world.hostname,
            os.getpid(),
            platform.python_version(),
            torch.__version__,
            world.launcher.name,
        )
        try:
            yield
        except BaseException:
            own.exception("failed")
            raise
        own.info("done")


def _headline(inputs: TrainInputs, backend: str) -> str:
    config, plan, world = inputs.config, inputs.plan, inputs.coordinator.world
    how = f"{backend}, {config.parallel}" if inputs.copies else backend
    return (
        f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes or 1, 'host')} "
        f"over {how}, {config.arch} on {inputs.data.name}, amp {config.amp}, global batch "
        f"{plan.order.global_batch_size}, peak lr {plan.peak_lr:g} "
        f"(--lr {config.lr:g}{' scaled by batch/256' if config.lr_scaling else ''})"
    )


def _save_summary(run: RunDir, summary: Summary) -> Summary:
    """Write summary.json, and return its contents.

    A run that resumes after its last step has measured nothing, so it keeps that step's summary.
    """
    if summary.images_per_s is None:
        with contextlib.suppress(OSError):
            found = read_summary(read_limited(run.summary, _MAX_SUMMARY_BYTES))
            if found is not None and found.steps == summary.steps:
                summary = found
    try:
        save_json(run.summary, dataclasses.asdict(summary))
    except OSError as error:
        log.warning(f"warning: {run.summary}: {error.strerror}.")
    return summary
