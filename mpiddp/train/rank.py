"""One rank of a training, from its options to the last table: everything around the loop.

What any rank may refuse stands in `all_or_none`, so that all ranks refuse and leave together. Nothing
is written before all of them have agreed to train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator

import torch

from mpiddp.checkpoints import replicas
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.errors import DONE, STOPPED, UserError
from mpiddp.runtime.announcement import announce, announced
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.join import join
from mpiddp.runtime.log import log, log_to_console
from mpiddp.runtime.process_group import choose_backend, default_group, device_of
from mpiddp.runtime.session import Session
from mpiddp.runtime.stop_signals import listen_when_alone
from mpiddp.text import counted
from mpiddp.train import flight_recorder, resume
from mpiddp.train.config import TrainConfig, out_dir, resolve_defaults, resume_args
from mpiddp.train.data import open_data, prepare
from mpiddp.train.data.source import Data
from mpiddp.train.engine import build_model, choose_kernels, computes_in_bf16
from mpiddp.train.loop import TrainInputs, train
from mpiddp.train.metrics import Summary, table
from mpiddp.train.options import TrainOptions
from mpiddp.train.parallel import check_compression
from mpiddp.train.plan import Plan, make_plan
from mpiddp.train.rank_log import rank_log
from mpiddp.train.records import save_json
from mpiddp.train.restart import IMAGES_PER_PASS, keep_global_batch
from mpiddp.world import World

PREPARE_TIMEOUT_S = 1800.0  # a slow line may need this long for a data set


def run_rank(options: TrainOptions | UserError, world: World, session: Session) -> int:
    """Join the other ranks, train, and return the exit code: DONE, or STOPPED on request.

    Args:
        options: those of the command line, or why they cannot be used.

    Raises:
        UserError, SystemExit: bad input, see `mpiddp.runtime.coordinator`.
    """
    with join(world) as coordinator:
        world = coordinator.world
        is_alone = world.launcher.name == "none"
        log_to_console(world.rank)
        config, backend, device = _resolve(options, coordinator)
        _require_equal_settings(config, backend, coordinator)
        if is_alone:
            log.info("no launcher: training alone, as rank 0 of 1. For more: mpiddp launch --help")
        with coordinator.all_or_none(timeout_s=PREPARE_TIMEOUT_S):
            if world.local_rank == 0:
                prepare(config)
        started = coordinator.broadcast_json(time.strftime("%Y%m%d-%H%M%S"))
        run = RunDir(out_dir(config, started))
        data = _open_data(config, coordinator, device)
        with coordinator.all_or_none():
            plan = make_plan(config, data, coordinator)
            model = build_model(config, data)
        start = resume.find(coordinator, config, data.contents, run)
        _announce(config, plan, run)
        writer_ranks = _create_run_dir(run, config, coordinator)
        if backend == "nccl":
            os.environ.update(flight_recorder.settings(run.logs, os.environ))
        choose_kernels(config)
        inputs = TrainInputs(
            config, plan, data, model, start, coordinator, writer_ranks, device, run
        )
        with (
            default_group(coordinator, backend, device, timeout_s=config.timeout),
            rank_log(run, world, session),
        ):
            log.info(_headline(inputs, backend))
            if is_alone:
                listen_when_alone(session.stop)
            summary = train(inputs)
        if summary is None:
            session.stop.stopped()
            return STOPPED
        if world.rank == 0:
            summary = _save_summary(run, summary)
        log.info(f"\n{table(summary, run.path)}")
    return DONE


def _resolve(
    options: TrainOptions | UserError, coordinator: Coordinator
) -> tuple[TrainConfig, str, torch.device]:
    """The configuration, the backend and the device of this rank. All ranks must call this."""
    with coordinator.all_or_none():
        if isinstance(options, UserError):
            raise options
        backend = choose_backend(options.backend)
        device = device_of(coordinator.world, backend)
        options = keep_global_batch(options, announced(), coordinator.world.world_size)
        config = resolve_defaults(
            options,
            coordinator.world,
            on_gpu=device.type != "cpu",
            has_bf16=computes_in_bf16(device),
        )
        check_compression(config, device)
    return config, backend, device


def _require_equal_settings(config: TrainConfig, backend: str, coordinator: Coordinator) -> None:
    """Refuse ranks whose devices made them resolve different defaults. All ranks must call this."""
    with coordinator.all_or_none():
        coordinator.require_equal(
            "what the ranks chose",
            f"{backend}, {config.arch}, amp {config.amp}, {config.batch_size} images a rank",
            hint="Name it: --backend, --arch, --amp, --batch-size.",
        )


def _open_data(config: TrainConfig, coordinator: Coordinator, device: torch.device) -> Data:
    """The data set, the same on every rank. All ranks must call this."""
    with coordinator.all_or_none():
        data = open_data(config, coordinator.world, device)
    with coordinator.all_or_none():
        coordinator.require_equal(
            "the data of the ranks", data.contents, hint="Give every host the same --data-dir."
        )
    return data


def _announce(config: TrainConfig, plan: Plan, run: RunDir) -> None:
    """What the launcher needs to start this run again: on fewer hosts, or from its checkpoint."""
    images = plan.shards.global_batch_size
    announce(
        resume_args=resume_args(config, run.path),
        global_batch_size=images,
        max_ranks=max(1, images // IMAGES_PER_PASS),
    )


def _create_run_dir(run: RunDir, config: TrainConfig, coordinator: Coordinator) -> list[int]:
    """Make the run's folder on every host, and return the ranks that write into it.

    All ranks must call this.
    """
    with coordinator.all_or_none(), _writing(run):
        for folder in (run.logs, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    writer_ranks = replicas.find_writer_ranks(coordinator, run.path, timeout_s=config.timeout)
    with coordinator.all_or_none(), _writing(run):
        if coordinator.world.rank in writer_ranks:
            save_json(run.config, config.as_json())
            run.metrics.touch()
    return writer_ranks


@contextlib.contextmanager
def _writing(run: RunDir) -> Iterator[None]:
    """A body that writes into the run's folder. Raises UserError where it cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--out {run} cannot be written: {error.strerror}. Name another folder."
        ) from None


def _headline(inputs: TrainInputs, backend: str) -> str:
    config, plan, world = inputs.config, inputs.plan, inputs.coordinator.world
    return (
        f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes or 1, 'host')} "
        f"over {backend}, {config.arch} on {inputs.data.name}, amp {config.amp}, global batch "
        f"{plan.shards.global_batch_size}, peak lr {plan.peak_lr:g} "
        f"(--lr {config.lr:g}{' scaled by batch/256' if config.lr_scaling else ''})"
    )


def _save_summary(run: RunDir, summary: Summary) -> Summary:
    """Write summary.json, and return what it holds.

    A run that was over when it was resumed has measured nothing: the summary that is there stands.
    """
    if summary.images_per_s is None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            summary = Summary(**json.loads(run.summary.read_bytes()))
    try:
        save_json(run.summary, dataclasses.asdict(summary))
    except OSError as error:
        log.warning(f"warning: {run.summary}: {error.strerror}.")
    return summary
