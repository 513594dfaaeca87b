"""The training loop: step, log, evaluate, save, in this order."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import mean

import torch
import torch.distributed as dist
from torch import nn

from mpiddp.checkpoints.file_systems import FileSystems
from mpiddp.checkpoints.owner import RunOwner
from mpiddp.checkpoints.records import Records
from mpiddp.checkpoints.replicas import receive
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.checkpoints.save_schedule import SaveSchedule
from mpiddp.checkpoints.saved import Received, TensorGroup
from mpiddp.checkpoints.search import Start, set_newer_aside
from mpiddp.checkpoints.shards.read import ShardFiles
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import current
from mpiddp.runtime.log import log
from mpiddp.runtime.torch.steps import should_stop
from mpiddp.train import checkpoint
from mpiddp.train.checkpoint import Contents, Progress
from mpiddp.train.config import TrainConfig, resume_args
from mpiddp.train.copies import Copies
from mpiddp.train.data.prefetch import prefetched
from mpiddp.train.data.source import Data
from mpiddp.train.divergence import refuse_divergence
from mpiddp.train.engine import TrainState, build_optimizer, build_scaler, to_device, train_step
from mpiddp.train.evaluate import Score, default_batch_size, evaluate
from mpiddp.train.metrics import StepTimer, Summary, largest, measure_speed
from mpiddp.train.parallel import clear_gradients, wrap
from mpiddp.train.per_rank_log import PerRankLog
from mpiddp.train.plan import Plan
from mpiddp.train.saver import Saver
from mpiddp.train.tensor_bytes import TensorBytes, tensor_bytes


@dataclass(frozen=True)
class TrainInputs:
    """The model and data of a rank, the ranks it trains with, and the folder of its results."""

    config: TrainConfig
    plan: Plan
    data: Data
    model: nn.Module  # on the CPU, with fresh weights
    start: Start[Contents]  # what to resume from
    coordinator: Coordinator
    file_systems: FileSystems  # those on which the folder of its results lies
    device: torch.device
    run: RunDir
    owner: RunOwner | None = None  # of the run's folder, on the ranks that write there
    copies: Copies = field(default_factory=list)  # the ranks of each copy of a sharded model


def train(inputs: TrainInputs) -> Summary | None:
    """Train to the end and return the summary. If a stop is requested, save a checkpoint and return None."""
    started_at = time.monotonic()
    config, plan, data, device = inputs.config, inputs.plan, inputs.data, inputs.device
    coordinator, run = inputs.coordinator, inputs.run
    state, ddp, progress = build_state(inputs)
    model = state.model

    current().stop.count_from(progress.step)
    save_schedule = SaveSchedule(
        config.save_every, coordinator, progress.step, timeout_s=config.timeout
    )
    saver = Saver(
        run.checkpoints,
        inputs.file_systems,
        coordinator,
        state,
        config,
        data.contents,
        inputs.owner,
    )
    is_writer = coordinator.world.rank in inputs.file_systems.writers
    records = Records(run.metrics if is_writer else None, progress.step)
    timer = StepTimer(device)
    per_rank_log = PerRankLog(coordinator.world.local_rank, is_wanted=config.per_rank_log)
    images_of_steps: list[int] = []
    evaluation_batch = max(config.batch_size, default_batch_size(data.shape))
    score: Score | None = None
    train_loss: float | None = None
    memory: TensorBytes | None = None

    for epoch in range(progress.epoch, config.epochs):
        steps = list(plan.shards.steps(epoch, progress.position))
        order = [numbers for step in steps for numbers in step.micro_batches]
        batches = prefetched(data.train.batches(order, epoch=epoch), device)
        loss_sum, num_images = torch.zeros((), device=device), 0
        per_rank_log.epoch_begins(epoch)
        timer.resume()

        for step in steps:
            lr = plan.lr(progress.step)
            loss_sum += train_step(state, ddp, batches, step, lr, config)
            num_images += step.num_images
            if memory is None:
                memory = tensor_bytes(model, state.optimizer)
                if inputs.copies:
                    log.info(f"parameters, gradients and momentum: {memory}")
            clear_gradients(ddp, config)
            timer.tick()
            images_of_steps.append(step.num_images)
            progress = Progress(progress.step + 1, epoch, progress.position + step.num_images)
            ends_epoch = step is steps[-1]

            if progress.step % config.log_every == 0 or ends_epoch:
                dist.all_reduce(loss_sum)
                train_loss = loss_sum.item() / num_images
                loss_sum, num_images = torch.zeros((), device=device), 0
                recent = timer.read()[-config.log_every :]
                images_per_s = sum(images_of_steps[-len(recent) :]) / sum(recent)
                records.write(
                    step=progress.step,
                    epoch=epoch,
                    lr=lr,
                    train_loss=train_loss,
                    images_per_s=images_per_s,
                    step_time_s=mean(recent),
                )
                log.info(
                    f"epoch {epoch + 1}/{config.epochs}  step {progress.step}/{plan.total_steps}  "
                    f"loss {train_loss:.4f}  lr {lr:.4f}  {images_per_s:,.0f} images/s"
                )

            if ends_epoch:
                progress = Progress(progress.step, epoch + 1, 0)
                per_rank_log.epoch_ends(timer.read()[-len(steps) :])
                if data.test is not None:
                    score = evaluate(model, data.test, config, device, batch_size=evaluation_batch)
                    records.write(
                        step=progress.step,
                        epoch=epoch,
                        test_accuracy=score.accuracy,
                        test_loss=score.loss,
                    )
                    log.info(
                        f"epoch {epoch + 1}/{config.epochs}  test accuracy {score.accuracy:.2%}"
                    )

            stops = progress.step < plan.total_steps and (
                should_stop() or progress.step == config.stop_at_step
            )
            is_last = stops or progress.step == plan.total_steps
            is_due = save_schedule.is_due(progress.step, ends_epoch=ends_epoch)
            saves = is_due or is_last
            if config.check_divergence and (saves or progress.step % config.check_divergence == 0):
                refuse_divergence(state, progress.step, saver, coordinator)
            if saves:
                saver.save(progress)
            if is_last:
                saver.finish()
            if stops:
                extra = resume_args(config, run.path)
                command = f"the same command{' with ' if extra else ''}{shlex.join(extra)}"
                log.info(f"stopped at step {progress.step}. To resume, run {command}.")
                return None
            if is_due or ends_epoch:
                timer.resume()

    per_rank_log.training_ends()
    if score is None and data.test is not None:  # resumed after the last step
        score = evaluate(model, data.test, config, device, batch_size=evaluation_batch)
    speed = measure_speed(timer, images_of_steps, device)
    return Summary(
        dataset=data.name,
        arch=config.arch,
        num_parameters=sum(p.numel() for p in model.parameters()),
        world_size=coordinator.world.world_size,
        num_nodes=coordinator.world.num_nodes or 1,
        hosts=dict(Counter(coordinator.hostnames)),
        global_batch_size=plan.shards.global_batch_size,
        epochs=config.epochs,
        steps=progress.step,
        train_loss=train_loss,
        test_accuracy=score.accuracy if score else None,
        test_images=score.num_images if score else None,
        images_per_s=speed.images_per_s,
        step_time_p50_s=speed.step_time_p50_s,
        step_time_p95_s=speed.step_time_p95_s,
        wall_s=time.monotonic() - started_at,
        parallel=config.parallel,
        tensor_bytes_of_rank=largest(memory.of_rank if memory else 0, device) or None,
        tensor_bytes_of_copy=memory.of_copy if memory else None,
    )


def build_state(inputs: TrainInputs) -> tuple[TrainState, nn.Module, Progress]:
    """Build the state of the training, fresh or from the checkpoint, and wrap or shard its model.

    A collective: every rank must call it.

    Returns:
        The state with the bare model, the model to call, and how far the training has come.
    """
    config, start, device = inputs.config, inputs.start, inputs.device
    received, shards = _receive_checkpoint(inputs)
    saved = received.common if received else None
    progress = saved.progress if saved else Progress()
    if (
        start.leaves_newer
    ):  # before anything that may fail: a restart would resume from the newer ones
        writer_ranks = inputs.file_systems.writers
        with inputs.coordinator.all_or_none():
            set_newer_aside(progress.step, inputs.run, inputs.coordinator, writer_ranks)
    model = to_device(inputs.model, config, device)
    wrapped = wrap(model, config, inputs.data.shape, inputs.copies)
    optimizer = build_optimizer(model, config)
    scaler = build_scaler(config, device)
    if saved:
        contents = {"model": saved.model, "trainer": saved.trainer}
        with inputs.coordinator.all_or_none():
            if shards is not None:
                like = checkpoint.sharded_like(model, optimizer)
                contents = shards.into(contents, like)
        model.load_state_dict(contents["model"])
        checkpoint.restore_optimizer(optimizer, contents["trainer"]["optimizer"])
        scaler.load_state_dict(contents["trainer"]["scaler"])
    torch.manual_seed(config.seed + 1 + inputs.coordinator.world.rank)
    if received:
        checkpoint.restore_rank(model, received, inputs.coordinator.world.world_size)
    return TrainState(model, optimizer, scaler), wrapped, progress


def _receive_checkpoint(
    inputs: TrainInputs,
) -> tuple[Received[Contents] | None, ShardFiles | None]:
    """Send the checkpoint to resume from to every rank, and its files to the hosts that lack them.

    A collective: every rank must call it.
    """
    return receive(
        inputs.start,
        inputs.run,
        inputs.file_systems.writers,
        inputs.coordinator,
        TensorGroup(inputs.device),
        timeout_s=inputs.config.timeout,
    )
