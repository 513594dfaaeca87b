"""The training loop: step, log, evaluate, save, in this order."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import mean

import torch
import torch.distributed as dist
from torch import nn

from mpiddp.checkpoints.run_dir import RunDir, log_metrics
from mpiddp.checkpoints.script import Checkpoints
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import current
from mpiddp.runtime.log import log
from mpiddp.runtime.torch.steps import should_stop
from mpiddp.train import checkpoint
from mpiddp.train.checkpoint import Progress, exiting_together
from mpiddp.train.config import TrainConfig, resume_args
from mpiddp.train.copies import Copies
from mpiddp.train.data.dataset import Data
from mpiddp.train.divergence import refuse_divergence
from mpiddp.train.engine import (
    TrainState,
    build_optimizer,
    build_scaler,
    mark_last_gradient,
    to_device,
    train_step,
)
from mpiddp.train.evaluate import Score, default_batch_size, evaluate
from mpiddp.train.metrics import StepTimer, Summary, mean_phases, measure_speed
from mpiddp.train.opening import batches_of
from mpiddp.train.parallel import clear_gradients, wrap
from mpiddp.train.per_rank_log import PerRankLog
from mpiddp.train.plan import TrainPlan
from mpiddp.train.profiling import StepProfiler


@dataclass(frozen=True)
class TrainInputs:
    """The model and data of a rank, the ranks it trains with, and the folder of its results."""

    config: TrainConfig
    plan: TrainPlan
    data: Data
    model: nn.Module  # on the CPU, with fresh weights
    coordinator: Coordinator
    device: torch.device
    run: RunDir
    copies: Copies = field(default_factory=list)  # the ranks of each copy of a sharded model


def train(
    inputs: TrainInputs,
    state: TrainState,
    ddp: nn.Module,
    progress: Progress,
    checkpoints: Checkpoints,
) -> Summary | None:
    """Train to the end and return the summary. If a stop is requested, save a checkpoint and return None.

    Args:
        state: that of `build_state`, restored from the newest of the open `checkpoints`.
        ddp: the model to call.
        progress: how far the training has come.
    """
    started_at = time.monotonic()
    current().show({"total": inputs.plan.total_steps})
    config, plan, data, device = inputs.config, inputs.plan, inputs.data, inputs.device
    coordinator, run, model = inputs.coordinator, inputs.run, state.model
    timer = StepTimer(device)
    mark_last_gradient(ddp, timer.phase_ends)
    per_rank_log = PerRankLog(coordinator.world.local_rank, is_wanted=config.per_rank_log)
    profiler = StepProfiler(config, run, coordinator.world.rank)
    images_of_steps: list[int] = []
    evaluation_batch = max(config.batch_size, default_batch_size(data.shape))
    score: Score | None = None
    train_loss: float | None = None

    for epoch in range(progress.epoch, config.epochs):
        steps = list(plan.order.steps(epoch, progress.position))
        batches = batches_of(steps, data, config, device, epoch=epoch)
        loss_sum, num_images = torch.zeros((), device=device), 0
        per_rank_log.epoch_begins(epoch)
        timer.resume()

        for step in steps:
            profiler.before(progress.step + 1)
            lr = plan.lr(progress.step)
            loss_sum += train_step(
                state, ddp, batches, step, lr, config, phase_ends=timer.phase_ends
            )
            num_images += step.num_images
            clear_gradients(ddp, config)
            timer.tick()
            images_of_steps.append(step.num_images)
            progress = Progress(progress.step + 1, epoch, progress.position + step.num_images)
            ends_epoch = step is steps[-1]
            if profiler.after(progress.step):
                timer.resume()

            if progress.step % config.log_every == 0 or ends_epoch:
                dist.all_reduce(loss_sum)
                was_finite = train_loss is None or math.isfinite(train_loss)
                train_loss = loss_sum.item() / num_images
                is_first = was_finite and not math.isfinite(train_loss)
                if is_first and coordinator.world.rank == 0:
                    log.warning(
                        f"warning: the loss is {train_loss} at step {progress.step}. Stop the run, and "
                        "continue from an earlier checkpoint with a lower --lr or --clip-grad-norm."
                    )
                loss_sum, num_images = torch.zeros((), device=device), 0
                recent = timer.read()[-config.log_every :]
                current().tell_phases(len(timer.read()), timer.phases)
                images_per_s = sum(images_of_steps[-len(recent) :]) / sum(recent)
                log_metrics(
                    progress.step,
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
                # After an epoch on smaller images, the accuracy on whole ones tells little.
                is_whole = epoch >= config.low_res_epochs or epoch + 1 == config.epochs
                if data.test is not None and is_whole:
                    score = evaluate(model, data.test, config, device, batch_size=evaluation_batch)
                    log_metrics(
                        progress.step,
                        epoch=epoch,
                        test_accuracy=score.accuracy,
                        test_loss=score.loss,
                    )
                    log.info(
                        f"epoch {epoch + 1}/{config.epochs}  test accuracy {score.accuracy:.2%}"
                    )
                    timer.resume("evaluation")

            # Before should_stop, whose answer it foretells: a stop is then one save, of this step.
            is_due = checkpoints.due(progress.step) or (config.save_every is None and ends_epoch)
            stops = progress.step < plan.total_steps and (
                should_stop() or progress.step == config.stop_at_step
            )
            is_last = stops or progress.step == plan.total_steps
            saves = is_due or is_last
            if config.check_divergence and (saves or progress.step % config.check_divergence == 0):
                refuse_divergence(state, progress.step, checkpoints, coordinator)
                timer.resume()
            if saves:
                with exiting_together(coordinator):
                    checkpoint.save(checkpoints, state, progress, config, data.contents)
                timer.resume("save")
            if is_last:
                profiler.close()
                timer.resume()
                with exiting_together(coordinator):
                    checkpoints.close()
                timer.resume("save")
            if stops:
                extra = resume_args(config, run.path)
                command = f"the same command{' with ' if extra else ''}{shlex.join(extra)}"
                log.info(f"stopped at step {progress.step}. To resume, run {command}.")
                return None

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
        global_batch_size=plan.order.global_batch_size,
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
        phases=mean_phases(timer, device),
    )


def build_state(inputs: TrainInputs) -> tuple[TrainState, nn.Module]:
    """Build the state of the training with fresh weights, and wrap or shard its model.

    A collective: every rank must call it.

    Returns:
        The state with the bare model, and the model to call.
    """
    config, device = inputs.config, inputs.device
    model = to_device(inputs.model, config, device)
    wrapped = wrap(model, config, inputs.data.shape, inputs.copies)
    state = TrainState(model, build_optimizer(model, config), build_scaler(config, device))
    torch.manual_seed(config.seed + 1 + inputs.coordinator.world.rank)
    return state, wrapped
