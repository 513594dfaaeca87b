"""Train a ResNet on CIFAR or on a folder of images. Copy this file to change it: a copy works as it is.

    mpiddp launch -n 2 train.py --out runs/a     # Ctrl-C saves, and the same command goes on
    torchrun --nproc-per-node 2 train.py --epochs 2 --lr 0.3

Read it from top to bottom: the recipes, the model, the optimizer, a step, the score, the run with its stop,
checkpoints, the command line. `mpiddp train` (main.py) adds options to this training, and has the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import mpiddp
from mpiddp.train import data as datasets
from mpiddp.train import parallel
from mpiddp.train.data import IGNORED, Data, Dataset
from mpiddp.train.muon import Muon, fast_dtype
from mpiddp.train.resnet import ARCHS, WhitenedResNet

DONE, STOPPED = 0, 75  # exit codes
log = logging.getLogger("mpiddp.train")  # rank 0 prints it


@dataclass(frozen=True)
class Recipe:
    """All that decides the result, apart from the number of ranks. Each field is an option."""

    dataset: str = "cifar10"  # a row of DATASETS in data.py
    image_size: int = 32  # pixels; that of the data set, if its row has one
    arch: str = "resnet18"  # a row of ARCHS in resnet.py
    stem: str = "cifar"  # its first layers
    batch_size: int = 256  # images of a rank and a backward pass
    grad_accum_steps: int = 1  # backward passes of a step
    epochs: int = 30
    sides: tuple[int, ...] = ()  # pixels of the images in each epoch; stretched over the epochs
    max_shift: int = 4  # pixels by which CIFAR's images are shifted
    optimizer: str = "sgd"  # or "muon"
    lr: float = 0.4  # peak; that of sgd is for 256 images, and scales with the batch
    momentum: float = 0.9  # Nesterov's
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    views: int = 1  # of an image in the last score: 2 with its mirror image, 6 with shifts as well
    amp: str = "bf16"  # or "off"
    seed: int = 0  # of weights, order and augmentation


# A small net learns CIFAR in few epochs. It learns shapes in less time on smaller images (DAWNBench 2018).
_SMALL = Recipe(arch="whitened_resnet8", stem="whitened", batch_size=128, max_shift=2,
                optimizer="muon", lr=0.25, label_smoothing=0.1, views=6)  # fmt: skip
_FOLDER = Recipe("image-folder", 224, stem="imagenet", weight_decay=1e-4)  # as torchvision
RECIPES = {
    "cifar10, cpu with bf16": replace(_SMALL, epochs=13, sides=(16,) * 5 + (24,) * 3 + (32,) * 5),
    "cifar10, cpu": replace(_SMALL, epochs=6, sides=(16, 16, 16, 24, 32, 32), amp="off"),
    "cifar10, gpu": Recipe(),
    "image-folder, cpu with bf16": replace(_FOLDER, batch_size=128, epochs=13, max_shift=2),
    "image-folder, cpu": replace(_FOLDER, batch_size=128, epochs=6, max_shift=2, amp="off"),
    "image-folder, gpu": _FOLDER,
}
for _name in ("cpu with bf16", "cpu", "gpu"):
    RECIPES[f"cifar100, {_name}"] = replace(RECIPES[f"cifar10, {_name}"], dataset="cifar100")
# A resume may not change these settings.
FIXED = ("arch", "stem", "dataset", "image_size", "optimizer", "seed")
BATCH_PIXELS = 500 * 32 * 32  # in a batch of an evaluation, if the training batch is smaller


def recipe_for(dataset: str, device: torch.device, amp: str | None = None) -> Recipe:
    """The recipe of a data set on this device, with mixed precision or "off"; None chooses by the device."""
    amp = amp or ("bf16" if fast_dtype(device) is torch.bfloat16 else "off")
    on_cpu = "cpu with bf16" if amp == "bf16" else "cpu"
    recipe = RECIPES[f"{dataset}, {'gpu' if device.type == 'cuda' else on_cpu}"]
    image_size = datasets.DATASETS[dataset].image_size or recipe.image_size
    return replace(recipe, image_size=image_size, amp=amp)


@dataclass(frozen=True)
class Step:
    """A step that was made."""

    number: int  # from 1 on, over all epochs
    epoch: int  # from 0 on
    side: int  # pixels of its images
    lr: float
    loss_sum: Tensor  # of this rank's images: a scalar on the device
    seconds: float  # on the host; a GPU may compute later, see `Training.read_clock`
    ends_epoch: bool
    is_last: bool  # of the training


@dataclass(frozen=True)
class Score:
    """The score of the model on all images for testing."""

    accuracy: float  # the fraction of images that it classifies
    loss: float  # the mean cross-entropy, without label smoothing
    accuracy_of_views: float  # by the mean of the logits of several views of each image


class Training:
    """A training: its recipe, its data, and everything that a step changes. All ranks make the same calls."""

    def __init__(
        self, recipe: Recipe, data: Data, world: mpiddp.World, **batches: int | None
    ) -> None:
        """`batches` are a global_batch_size and steps_per_epoch that do not follow from the recipe."""
        self.recipe, self.data, self.world = recipe, data, world
        self.log_every = 50  # steps
        self.device, self.world_size = data.train.device, world.world_size
        count, passes = data.train.num_images, recipe.grad_accum_steps
        batch = recipe.batch_size * passes * world.world_size
        sizes: dict[str, Any] = {"global_batch_size": batch, "batches_per_step": passes, **batches}
        self.sampler = mpiddp.Sampler(count, seed=recipe.seed, **sizes)
        self.global_batch_size = self.sampler.global_batch_size
        self.length = self.sampler.steps_per_epoch
        self.num_steps = self.length * recipe.epochs
        self.warmup_steps = round(self.length * min(5, recipe.epochs / 4))
        self.model = self.build_model()  # without any wrapper
        self.ddp = self.parallelize()  # a step calls this module
        self.scored = self.model  # an evaluation calls this module
        self.optimizer = self.build_optimizer()
        self._loss_sum, self._reported = torch.zeros((), device=self.device), 0
        self._seconds: list[float] = []  # of the steps since the clock was last read
        self.train_loss: float | None = None
        self.last_score: Score | None = None
        self.seed()

    def seed(self) -> None:
        torch.manual_seed(self.recipe.seed + 1 + self.world.rank)

    def build_model(self) -> nn.Module:
        """The bare model on the device, the same on every rank, in the memory layout of the images."""
        recipe, train = self.recipe, self.data.train
        torch.manual_seed(recipe.seed)
        model: nn.Module = ARCHS[recipe.arch](num_classes=self.data.num_classes, stem=recipe.stem)
        if isinstance(model, WhitenedResNet):
            numbers = torch.arange(min(1000, train.num_images))  # they stand for all images
            ((images, _),) = train.batches([numbers], epoch=0)
            model.whiten(images.cpu())
        return model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def parallelize(self) -> nn.Module:
        ((images, _),) = self.data.train.batches([torch.arange(2)], epoch=0)
        return parallel.wrap_in_ddp(self.model, images)

    def build_optimizer(self) -> torch.optim.Optimizer:
        recipe, (decayed, undecayed) = self.recipe, self.parameter_groups()
        if recipe.optimizer == "muon":
            # SGD trains the last layer, and a convolution of the images: its filters are few and small.
            matrices = decayed["params"]
            hidden = [p for p in matrices if p.ndim == 4 and p.shape[1] > 3]
            ends = [p for p in matrices if p.ndim != 4 or p.shape[1] <= 3]
            others = ({**decayed, "params": ends}, undecayed)
            return Muon(hidden, others, lr=recipe.lr, momentum=recipe.momentum)
        assert recipe.optimizer == "sgd", recipe.optimizer
        is_sharded = parallel.is_sharded(self.ddp)  # torch has no fused SGD for shards
        return torch.optim.SGD(
            (decayed, undecayed),
            lr=recipe.lr,
            momentum=recipe.momentum,
            nesterov=recipe.momentum > 0,  # torch refuses it otherwise
            **{"foreach" if is_sharded else "fused": True},
        )

    def parameter_groups(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weight decay is on convolutions and the last layer's matrix only."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim > 1]
        vectors = [p for p in trained if p.ndim <= 1]  # BatchNorm and biases
        decayed = {"params": matrices, "weight_decay": self.recipe.weight_decay}
        return decayed, {"params": vectors, "weight_decay": 0.0}

    def learning_rate(self, step: int) -> float:
        """The rate of a step, from 0 on. That of SGD scales with the batch (Goyal et al. 2017)."""
        peak, warmup = self.recipe.lr, self.warmup_steps
        if self.recipe.optimizer == "sgd":
            peak *= self.global_batch_size / 256
        if step < warmup:
            return peak * (step + 1) / warmup
        return peak * self.schedule((step - warmup) / max(1, self.num_steps - warmup))

    def schedule(self, progress: float) -> float:
        """The part of the peak after this part of the steps: along a line (Smith & Topin 2017)."""
        return 1 - progress

    def side(self, epoch: int) -> int:
        """The height and width of an epoch's images, in pixels. The last epoch has the last of the sides."""
        sides, epochs = self.recipe.sides or (self.data.image_size,), self.recipe.epochs
        return sides[-1 - (epochs - 1 - epoch) * len(sides) // epochs]

    def steps(self, step: int) -> Iterator[Step]:
        """Make the steps after `step`, one for each iteration, to the end of the last epoch."""
        # The ranks take the mean of their gradients; the weight makes it the mean over the global batch.
        weight = self.world_size / self.global_batch_size
        for epoch in range(step // self.length, self.recipe.epochs):
            side, indices = self.side(epoch), self.sampler.indices(epoch, first=step % self.length)
            passes = [numbers for of_step in indices for numbers in of_step]
            batches = datasets.on_a_side_stream(
                self.data.train.batches(passes, epoch=epoch), self.device
            )
            while step < (epoch + 1) * self.length:
                began, lr = time.perf_counter(), self.learning_rate(step)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                self.optimizer.zero_grad()
                loss_sum = torch.zeros((), device=self.device)
                for left in reversed(range(self.recipe.grad_accum_steps)):
                    images, labels = next(batches)  # float [N, 3, H, W], int64 [N]
                    if side != images.shape[-1]:
                        images = F.adaptive_avg_pool2d(images, side)
                    with parallel.reducing(self.ddp, left == 0):
                        with self.autocast():
                            loss = self.loss(images, labels, step)
                        self.backward(loss * weight)
                    loss_sum += loss.detach()
                self.update(step)
                step += 1
                ends_epoch, seconds = step % self.length == 0, time.perf_counter() - began
                yield Step(
                    step, epoch, side, lr, loss_sum, seconds, ends_epoch, step == self.num_steps
                )

    def loss(self, images: Tensor, labels: Tensor, step: int) -> Tensor:
        """The sum of the losses of these images; an image whose label is IGNORED has none: a scalar."""
        smoothing = self.recipe.label_smoothing
        return F.cross_entropy(self.ddp(images), labels, reduction="sum", label_smoothing=smoothing)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.amp == "bf16")

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self, step: int) -> None:
        self.optimizer.step()

    def is_scored(self, epoch: int) -> bool:
        """Whether the model is scored after this epoch: at the end, and once it trains on whole images."""
        is_whole = self.side(epoch) == self.data.image_size or epoch == self.recipe.epochs - 1
        return is_whole and self.data.test is not None

    @torch.no_grad()
    def evaluate(self, dataset: Dataset, *, views: int = 1) -> Score:
        """Score the model on all images, each of which counts on one rank. A collective."""
        largest = max(self.recipe.batch_size, BATCH_PIXELS // self.data.image_size**2)
        numbers, beyond = parallel.share_of_rank(dataset.num_images, largest)
        batches = datasets.on_a_side_stream(dataset.batches(numbers, epoch=0), self.device)
        totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        with parallel.scored_weights(self.model, self.changed_to_score()), self.autocast():
            for (images, labels), is_beyond in zip(batches, beyond, strict=True):
                labels = labels.masked_fill(is_beyond.to(self.device), IGNORED)
                parts, shown = zip(*datasets.views_of(images, views), strict=True)
                by_view = [self.scored(view).float() for view in shown]  # first the image itself
                mixed = sum(part * logits for part, logits in zip(parts, by_view, strict=True))
                totals[0] += (by_view[0].argmax(1) == labels).sum()
                totals[1] += F.cross_entropy(by_view[0], labels, reduction="sum")
                totals[2] += (labels != IGNORED).sum()
                totals[3] += (mixed.argmax(1) == labels).sum()
        dist.all_reduce(totals)
        accuracy, loss, _, of_views = (totals / totals[2]).tolist()
        return Score(accuracy, loss, of_views)

    def changed_to_score(self) -> Mapping[str, Tensor]:
        return parallel.statistics_of(self.model)

    def run(self, checkpoints: mpiddp.Checkpoints) -> int:
        """Train to the end, or until a stop is requested, and save the last step. Returns the exit code."""
        self.step = self._reported = self.resume(checkpoints)
        for made in self.steps(self.step):
            self.step = made.number
            is_due = checkpoints.due(made.number)  # asked first, because a stop is due as well
            stops = not made.is_last and self.should_stop(made)
            self.report(made)
            if is_due or stops or made.is_last:  # before the score, whose end may never come
                self.save(checkpoints, made.number)
            if made.ends_epoch and self.is_scored(made.epoch):
                self.score(made)
            if stops:
                checkpoints.close()  # waits for the save
                return STOPPED
        checkpoints.close()
        if self.last_score is None and self.data.test is not None:  # resumed after the last step
            self.last_score = self.evaluate(self.data.test, views=self.recipe.views)
            log.info(f"test accuracy {self.last_score.accuracy:.2%}")
        return DONE

    def should_stop(self, made: Step) -> bool:
        return mpiddp.should_stop()

    def report(self, made: Step) -> None:
        """Print and record the mean loss and the speed of the last steps. A collective."""
        self._loss_sum += made.loss_sum
        self._seconds.append(made.seconds)
        mpiddp.progress(made.number, self.num_steps)
        if made.number % self.log_every and not made.ends_epoch:
            return
        dist.all_reduce(self._loss_sum)
        images = (made.number - self._reported) * self.global_batch_size
        step_s, self.train_loss = mean(self.read_clock(made)), self._loss_sum.item() / images
        speed = self.global_batch_size / step_s
        values = {
            "lr": made.lr,
            "train_loss": self.train_loss,
            "images_per_s": speed,
            "step_time_s": step_s,
        }
        mpiddp.log_metrics(made.number, epoch=made.epoch, **values)
        at = f"epoch {made.epoch + 1}/{self.recipe.epochs}  step {made.number}/{self.num_steps}"
        line = (
            f"loss {self.train_loss:.4f}  lr {made.lr:.4f}  {speed:,.0f} images/s{self.left(made)}"
        )
        log.info(f"{at}  {line}")
        self._loss_sum.zero_()
        self._reported = made.number

    def read_clock(self, made: Step) -> list[float]:
        """The seconds of each step since the last call, up to this one. Of a GPU, only their mean is known."""
        seconds, self._seconds = self._seconds, []
        if seconds and self.device.type == "cuda":
            began = time.perf_counter()
            torch.cuda.synchronize()
            seconds = [(sum(seconds) + time.perf_counter() - began) / len(seconds)] * len(seconds)
        return seconds

    def left(self, made: Step) -> str:
        return ""

    def score(self, made: Step) -> None:
        """Score the model, and record it. A collective."""
        assert self.data.test is not None
        views = self.recipe.views if made.is_last else 1
        self.last_score = score = self.evaluate(self.data.test, views=views)
        values = {"test_accuracy": score.accuracy, "test_loss": score.loss}
        mpiddp.log_metrics(made.number, epoch=made.epoch, **values)
        by_views = f" ({score.accuracy_of_views:.2%} by {views} views)" if views > 1 else ""
        line = f"test accuracy {score.accuracy:.2%}{by_views}{self.left(made)}"
        log.info(f"epoch {made.epoch + 1}/{self.recipe.epochs}  {line}")

    def save(self, checkpoints: mpiddp.Checkpoints, step: int) -> None:
        """Start to save a checkpoint. The rate and the order of images follow from the step. A collective."""
        checkpoints.save(step, self.state(), per_rank=self.state_of_rank())

    def state(self) -> dict[str, Any]:
        model = parallel.mean_statistics(self.model.state_dict(), self.model)
        return {"model": model, "optimizer": self.optimizer.state_dict()}

    def state_of_rank(self) -> dict[str, Any]:
        return {"model": parallel.statistics_of(self.model)}

    def resume(self, checkpoints: mpiddp.Checkpoints) -> int:
        """Restore the newest checkpoint, and return the number of steps that it has made; 0 without one."""
        saved = checkpoints.resume()
        if saved is not None:
            self.load(saved)
        return saved.step if saved else 0

    def load(self, saved: mpiddp.Resumed) -> None:
        """Load a checkpoint, with the optimizer's settings of this recipe."""
        settings = [{**group} for group in self.optimizer.param_groups]
        saved.load_into(model=self.model, optimizer=self.optimizer)
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        if saved.per_rank and saved.world_size == self.world_size:
            self.model.load_state_dict(saved.per_rank["model"], strict=False)
        else:  # other ranks, or runs, begin with the mean of all statistics, and freshly seeded generators
            self.seed()


def parse() -> argparse.Namespace:
    """The options of the command line. Each field of the recipe is one; without a value, it is left out."""
    parser = argparse.ArgumentParser(description="Train a ResNet.")
    parser.add_argument("--data-dir", type=Path, default=datasets.default_folder())
    parser.add_argument("--out", default="runs/train", help="folder of the run")
    choices: dict[str, Any] = {
        "dataset": datasets.DATASETS,
        "arch": ARCHS,
        "optimizer": ("sgd", "muon"),
    }
    for field in dataclasses.fields(Recipe):
        is_tuple = isinstance(field.default, tuple)
        kind: dict[str, Any] = (
            {"type": int, "nargs": "*"} if is_tuple else {"type": type(field.default)}
        )
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(
            option, default=argparse.SUPPRESS, choices=choices.get(field.name), **kind
        )
    return parser.parse_args()


def main() -> int:
    """Train as one rank of a job, or alone. Returns the exit code: DONE, or STOPPED on request."""
    given = vars(parse())
    folder, out = given.pop("data_dir"), given.pop("out")
    torch.backends.cudnn.benchmark = True
    with mpiddp.process_group() as world:
        device = torch.device(str(world.device))
        default = recipe_for(given.get("dataset", Recipe.dataset), device, given.get("amp"))
        recipe = replace(default, **given)
        opening = datasets.Opening(recipe.seed, recipe.image_size, recipe.max_shift)
        data = datasets.open_data(datasets.DATASETS[recipe.dataset], folder, world, opening)
        training = Training(recipe, data, world)
        config = {name: getattr(recipe, name) for name in FIXED}
        config |= {"data": data.contents, "global_batch_size": training.global_batch_size}
        with mpiddp.Checkpoints(out, every=training.length, config=config) as checkpoints:
            return training.run(checkpoints)


if __name__ == "__main__":
    sys.exit(main())
