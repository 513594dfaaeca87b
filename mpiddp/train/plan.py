"""The sizes of a run: its order of the data, its number of steps, and the learning rate of each step."""

from __future__ import annotations

from dataclasses import dataclass

from mpiddp.errors import UserError
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.train.config import TrainConfig
from mpiddp.train.data.dataset import Data
from mpiddp.train.order import Order
from mpiddp.train.schedule import learning_rate, scaled_lr

MAX_WARMUP_EPOCHS = 5


@dataclass(frozen=True)
class TrainPlan:
    """Sizes that follow from the configuration, the data and the job."""

    order: Order
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


def plan_training(config: TrainConfig, data: Data, coordinator: Coordinator) -> TrainPlan:
    """Derive the plan. Raises UserError if the global batch is larger than the data set."""
    order = Order(
        num_samples=data.train.num_images,
        global_batch_size=config.global_batch_size,
        grad_accum_steps=config.grad_accum_steps,
        rank=coordinator.world.rank,
        world_size=coordinator.world.world_size,
        seed=config.seed,
        keep_tail=config.keep_tail,
        max_steps=config.steps_per_epoch,
        equal_passes=config.parallel != "ddp",
    )
    warmup_epochs = config.warmup_epochs
    if warmup_epochs is None:
        warmup_epochs = min(MAX_WARMUP_EPOCHS, config.epochs / 4)
    if order.steps_per_epoch == 0:
        raise UserError(
            f"the global batch of {order.global_batch_size} images is larger than the data set "
            f"({order.num_samples} images). Lower --batch-size, --global-batch-size or "
            "--grad-accum-steps."
        )
    return TrainPlan(
        order,
        total_steps=order.steps_per_epoch * config.epochs,
        warmup_steps=round(order.steps_per_epoch * warmup_epochs),
        peak_lr=scaled_lr(config.lr, order.global_batch_size) if config.lr_scaling else config.lr,
        schedule=config.schedule,
    )
