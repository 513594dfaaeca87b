"""The training loop, top to bottom: step, log, save, evaluate, in the order in which they happen."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from torch import nn

from mpiddp.checkpoints import replicas
from mpiddp.checkpoints.save_schedule import SaveSchedule
from mpiddp.errors import UserError
from mpiddp.runtime import stop_request
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.stop_request import should_stop
from mpiddp.text import percentile
from mpiddp.train import checkpoint
from mpiddp.train.checkpoint import Progress
from mpiddp.train.config import TrainConfig, resume_args
from mpiddp.train.data.prefetch import prefetched
from mpiddp.train.data.source import Data
from mpiddp.train.engine import backward, build_optimizer, to_device
from mpiddp.train.evaluate import Score, default_batch_size, evaluate
from mpiddp.train.metrics import StepTimer, Summary, slowest
from mpiddp.train.parallel import clear_gradients, wrap
from mpiddp.train.records import Records
from mpiddp.train.resume import Start, set_newer_aside
from mpiddp.train.saver import Saver
from mpiddp.train.schedule import learning_rate, scaled_lr
from mpiddp.train.sharding import Shards

MAX_WARMUP_EPOCHS = 5
STARTUP_STEPS = 3  # their times hold page faults and kernel choices, not the training


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from the configuration, the data and the job."""

    shards: Shards
    total_steps: int
    warmup_steps: int
    peak_lr: float
    schedule: str

    def lr(self, step: int) -> float:
        return learning_rate(
            step,
            self.total_steps,
            peak=self.peak_lr,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
        )


def make_plan(config: TrainConfig, data: Data, coordinator: Coordinator) -> Plan:
    """Derive the plan. Raises UserError where the global batch is larger than the data set."""
    shards = Shards(
        num_samples=data.train.num_images,
        global_batch_size=config.global_batch_size,
        grad_accum_steps=config.grad_accum_steps,
        rank=coordinator.world.rank,
        world_size=coordinator.world.world_size,
        seed=config.seed,
        keep_tail=config.keep_tail,
        max_steps=config.steps_per_epoch,
    )
    warmup_epochs = config.warmup_epochs
    if warmup_epochs is None:
        warmup_epochs = min(MAX_WARMUP_EPOCHS, config.epochs / 4)
    if shards.steps_per_epoch == 0:
        raise UserError(
            f"the global batch of {shards.global_batch_size} images is larger than the data set "
            f"({shards.num_samples}). Lower --batch-size, --global-batch-size or --grad-accum-steps."
        )
    return Plan(
        shards,
        total_steps=shards.steps_per_epoch * config.epochs,
        warmup_steps=round(shards.steps_per_epoch * warmup_epochs),
        peak_lr=scaled_lr(config.lr, shards.global_batch_size) if config.lr_scaling else config.lr,
        schedule=config.schedule,
    )


def train(
    config: TrainConfig,
    plan: Plan,
    coordinator: Coordinator,
    data: Data,
    model: nn.Module,
    start: Start,
    writer_ranks: list[int],
    device: torch.device,
    out: Path,
    say: Callable[[str], None],
) -> Summary | None:
    """Train to the end, or until asked to stop: then a checkpoint is saved and None returned.

    Args:
        start: what to go on from.
        writer_ranks: the ranks that write into `out`, each for the hosts that share its file system.
        say: prints on rank 0 and does nothing elsewhere.
    """
    started_at = time.monotonic()
    receivers = [rank for rank in start.lacking if rank in writer_ranks]
    if start.folder is not None and receivers:
        replicas.send_missing_checkpoint(
            start.folder,
            start.holder,
            receivers,
            out,
            coordinator,
            device,
            timeout_s=config.timeout,
        )
    saved = checkpoint.broadcast(start.saved, start.holder)
    model = to_device(model, config, device)
    optimizer = build_optimizer(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")

    progress = saved.progress if saved else Progress()
    set_newer_aside(start, progress.step, out, coordinator, writer_ranks, say)
    if saved:
        model.load_state_dict(saved.model)
        checkpoint.restore_optimizer(optimizer, saved.trainer["optimizer"])
        scaler.load_state_dict(saved.trainer["scaler"])
    ddp = wrap(model, config, data.shape)
    torch.manual_seed(config.seed + 1 + coordinator.world.rank)
    if saved:
        checkpoint.restore_rank(model, saved.ranks)

    stop_request.current().count_from(progress.step)
    due = SaveSchedule(config.save_every, coordinator, progress.step, timeout_s=config.timeout)
    saver = Saver(
        out / "checkpoints",
        writer_ranks,
        coordinator,
        model,
        optimizer,
        scaler,
        config,
        data.contents,
    )
    records = Records(
        out / "metrics.jsonl" if coordinator.world.rank in writer_ranks else None, progress.step
    )
    timer = StepTimer(device)
    images_of_steps: list[int] = []
    evaluation_batch = max(config.batch_size, default_batch_size(data.shape))
    score: Score | None = None
    train_loss: float | None = None

    for epoch in range(progress.epoch, config.epochs):
        steps = list(plan.shards.steps(epoch, progress.position))
        order = [numbers for step in steps for numbers in step.micro_batches]
        batches = prefetched(data.train.batches(order, epoch=epoch), device)
        loss_sum, num_images = torch.zeros((), device=device), 0
        timer.resume()

        for step in steps:
            lr = plan.lr(progress.step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss_sum += backward(ddp, batches, step, scaler, config)
            num_images += step.num_images
            scaler.step(optimizer)
            scaler.update()
            clear_gradients(ddp, config)
            timer.tick()
            images_of_steps.append(step.num_images)
            progress = Progress(progress.step + 1, epoch, progress.position + step.num_images)

            if progress.step % config.log_every == 0 or step is steps[-1]:
                dist.all_reduce(loss_sum)
                train_loss = loss_sum.item() / num_images
                loss_sum, num_images = torch.zeros((), device=device), 0
                recent = timer.read()[-config.log_every :]
                speed = sum(images_of_steps[-len(recent) :]) / sum(recent)
                records.write(
                    step=progress.step,
                    epoch=epoch,
                    lr=lr,
                    train_loss=train_loss,
                    images_per_s=speed,
                    step_time_s=mean(recent),
                )
                say(
                    f"epoch {epoch + 1}/{config.epochs}  step {progress.step}/{plan.total_steps}  "
                    f"loss {train_loss:.4f}  lr {lr:.4f}  {speed:,.0f} images/s"
                )

            if step is steps[-1]:
                progress = Progress(progress.step, epoch + 1, 0)
                if data.test is not None:
                    score = evaluate(model, data.test, config, device, batch_size=evaluation_batch)
                    records.write(
                        step=progress.step,
                        epoch=epoch,
                        test_accuracy=score.accuracy,
                        test_loss=score.loss,
                    )
                    say(f"epoch {epoch + 1}/{config.epochs}  test accuracy {score.accuracy:.2%}")

            stops = progress.step < plan.total_steps and (
                should_stop() or progress.step == config.stop_at_step
            )
            is_last = stops or progress.step == plan.total_steps
            is_due = due.at(progress.step, ends_epoch=step is steps[-1])
            if is_due or is_last:
                saver.save(progress)
            if is_last:
                saver.finish()
            if stops:
                extra = resume_args(config, out)
                again = f"the same command{' with ' if extra else ''}{shlex.join(extra)}"
                say(f"stopped at step {progress.step}; {again} goes on.")
                return None
            if is_due or step is steps[-1]:
                timer.resume()

    if score is None and data.test is not None:  # resumed after the last step
        score = evaluate(model, data.test, config, device, batch_size=evaluation_batch)
    own_seconds = timer.read()
    if len(own_seconds) > 2 * STARTUP_STEPS:
        own_seconds = own_seconds[STARTUP_STEPS:]
    *seconds_of_steps, seconds = slowest([*own_seconds, sum(own_seconds)], device)
    images = sum(images_of_steps[-len(seconds_of_steps) :])
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
        images_per_s=images / seconds if seconds_of_steps else None,
        step_time_p50_s=percentile(seconds_of_steps, 50) if seconds_of_steps else None,
        step_time_p95_s=percentile(seconds_of_steps, 95) if seconds_of_steps else None,
        wall_s=time.monotonic() - started_at,
    )
