"""The training of `mpiddp train`: that of train.py, and what the options add to it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
import shlex
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import mpiddp
from mpiddp.checkpoints.folders import CONFIG, SUMMARY
from mpiddp.files import replace_file
from mpiddp.text import counted, duration
from mpiddp.train import parallel
from mpiddp.train.config import SCHEDULES, Config, fixed_of
from mpiddp.train.data import Data
from mpiddp.train.parallel import gathered
from mpiddp.train.train import STOPPED, Step, Training

AVERAGE_EVERY = 32  # steps between two updates of the average, as in torchvision's references
STARTUP_STEPS = 3  # slow because of page faults and kernel selection; left out of the speed
log = logging.getLogger("mpiddp.train")  # rank 0 prints it


class Trainer(Training):
    """The training of train.py with all options."""

    def __init__(self, config: Config, data: Data, world: mpiddp.World, out: Path) -> None:
        self.config, self.out = config, out
        # What the same command also needs to resume this run.
        self.resume_args = [] if config.out else ["--out", str(out)]
        self.average: dict[str, Tensor] = {}  # of the model's state_dict, once it has begun
        images = data.train.num_images
        if images < config.global_batch_size:
            batch = f"the global batch of {config.global_batch_size} images"
            sentence = f"{batch} is larger than the data set ({images} images)."
            raise mpiddp.UserError(sentence, fix="a smaller --batch-size or --global-batch-size")
        sizes = {name: getattr(config, name) for name in ("global_batch_size", "steps_per_epoch")}
        super().__init__(config, data, world, **sizes)
        if config.compile == "on":
            self.ddp = torch.compile(self.ddp)  # type: ignore[assignment]
            self.scored = torch.compile(self.model)  # type: ignore[assignment]
        self.log_every = config.log_every
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        self._by_side: dict[
            int, list[float]
        ] = {}  # the seconds of all steps, by the side of their images
        self._started_at = time.monotonic()

    def seed(self) -> None:
        super().seed()
        seed = self.config.seed + 1 + dist.get_rank()
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # numpy's largest

    def build_model(self) -> nn.Module:
        """fully_shard accepts contiguous weights only. A GPU computes in the images' layout all the same."""
        model = super().build_model()
        if self.config.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self.config.parallel != "ddp":
            return model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload, no-any-return]
        if self.device.type == "cuda":
            stride_as_gradients(model)
        return model

    def parallelize(self) -> nn.Module:
        if self.config.parallel == "ddp":
            return super().parallelize()
        num_hosts = self.world.num_nodes or 1 if self.config.parallel == "hsdp" else 1
        return parallel.shard(self.model, self.config.amp, copies=num_hosts)

    def build_optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        if config.optimizer == "adamw":
            groups = self.parameter_groups()
            return torch.optim.AdamW(groups, lr=config.lr, fused=not parallel.is_sharded(self.ddp))
        optimizer = super().build_optimizer()
        if config.amp == "fp16" and config.optimizer == "sgd":
            # If fp16 overflows at the very first step, torch 2.13's fused SGD skips the step but keeps the
            # uninitialized momentum that it has allocated. Zeros give the same first step.
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer

    def schedule(self, progress: float) -> float:
        return SCHEDULES[self.config.schedule](progress)

    def loss(self, images: Tensor, labels: Tensor, step: int) -> Tensor:
        """With --mixup, an image is mixed with its neighbour, by one draw for all ranks (Zhang 2017)."""
        if not self.config.mixup:
            return super().loss(images, labels, step)
        smoothing = self.config.label_smoothing
        cross_entropy = partial(F.cross_entropy, reduction="sum", label_smoothing=smoothing)
        draw = random.Random(f"{self.config.seed}/{step}")
        part = draw.betavariate(self.config.mixup, self.config.mixup)
        logits = self.ddp(part * images + (1 - part) * images.roll(1, 0))
        of_neighbours = cross_entropy(logits, labels.roll(1, 0))
        return part * cross_entropy(logits, labels) + (1 - part) * of_neighbours

    def autocast(self) -> torch.autocast:
        """A sharded model has its own policy instead, see parallel.py."""
        amp, is_on = self.config.amp, self.config.amp != "off" and self.config.parallel == "ddp"
        return torch.autocast(self.device.type, dtype=parallel.DTYPES.get(amp), enabled=is_on)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self, step: int) -> None:
        if self.config.clip_grad_norm is not None:  # torch takes the norm over all shards
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), self.config.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if weight := self.average_weight(step + 1):
            self.update_average(weight)

    def average_weight(self, step: int) -> float:
        """The weight of the model after this step, from 1 on, in the average; 0 leaves the average alone.

        As in torchvision's references, it is 1 in the warm-up. Afterwards --ema-decay is for one image
        between two updates of a training of one epoch, so the same value suits any batch and any epochs.
        """
        decay = self.config.ema_decay
        if decay is None or step % AVERAGE_EVERY != 1:
            return 0.0
        images, epochs = self.global_batch_size * AVERAGE_EVERY, self.config.epochs
        return 1.0 if step <= self.warmup_steps else min(1.0, (1 - decay) * images / epochs)

    @torch.no_grad()
    def update_average(self, weight: float) -> None:
        """Move the average by this part of its distance to the model. It begins as the model."""
        for name, value in self.model.state_dict().items():
            average = self.average.setdefault(name, value.clone())
            if average.is_floating_point():
                average.lerp_(value, weight)
            else:  # BatchNorm's count of batches
                average.copy_(value)

    def run(self, checkpoints: mpiddp.Checkpoints) -> int:
        code = super().run(checkpoints)
        if code == STOPPED:
            arguments = shlex.join(self.resume_args)
            command = f"the same command{' with ' if arguments else ''}{arguments}"
            log.info(f"stopped at step {self.step}. To resume, run {command}.")
            return code
        self.end()
        return code

    def should_stop(self, made: Step) -> bool:
        return mpiddp.should_stop() or made.number == self.config.stop_at_step

    def report(self, made: Step) -> None:
        number, before = made.number - self._first, self.train_loss
        if number == STARTUP_STEPS + 1:  # forget the first steps, which are slow
            self._seconds, self._by_side = [], {}
        if number == 2 * STARTUP_STEPS:
            self.read_clock(made)
            left = duration(self.seconds_left(made.number))
            log.info(f"{self.num_steps - made.number:,} steps to come, in about {left}")
        super().report(made)
        turns_bad = math.isfinite(before or 0.0) and not math.isfinite(self.train_loss or 0.0)
        if turns_bad and self.world.rank == 0:
            log.warning(
                f"warning: the loss is {self.train_loss} at step {made.number}. Stop the run, and start it "
                "again with a lower --lr or --clip-grad-norm: it resumes from its newest checkpoint."
            )
        if self.config.check_divergence and made.number % self.config.check_divergence == 0:
            self.check_divergence(made.number)

    def read_clock(self, made: Step) -> list[float]:
        seconds = super().read_clock(made)
        self._by_side.setdefault(made.side, []).extend(seconds)
        return seconds

    def left(self, made: Step) -> str:
        return f"  {duration(self.seconds_left(made.number))} left"

    def seconds_left(self, step: int) -> float:
        """About how long the rest takes after this step."""
        made = sum(pixels_of(side) * len(seconds) for side, seconds in self._by_side.items())
        epochs = self.recipe.epochs
        # An evaluation has no backward pass, and takes about a third of the time of steps.
        num_tested = self.data.test.num_images if self.data.test is not None else 0
        score = num_tested / self.global_batch_size / 3 * pixels_of(self.data.image_size)
        left = 0.0
        for epoch in range(epochs):
            end = (epoch + 1) * self.length
            left += min(self.length, max(0, end - step)) * pixels_of(self.side(epoch))
            views = self.recipe.views if epoch == epochs - 1 else 1
            left += score * views * (end > step and self.is_scored(epoch))
        return left / made * sum(map(sum, self._by_side.values()))

    def check_divergence(self, step: int) -> None:
        """End the job if the ranks' bits differ. Before a save: then a restart resumes from equal ranks."""
        with mpiddp.together():  # the ranks with other shards end, too
            same = parallel.ranks_with_same_shards(self.model)
            mpiddp.check_divergence(self.model, self.optimizer, step=step, group=same)

    def changed_to_score(self) -> Mapping[str, Tensor]:
        return self.average or super().changed_to_score()

    def save(self, checkpoints: mpiddp.Checkpoints, step: int) -> None:
        interval = self.config.check_divergence
        if interval and step % interval:
            self.check_divergence(step)
        super().save(checkpoints, step)

    def state(self) -> dict[str, Any]:
        state = {**super().state(), "scaler": self.scaler.state_dict()}
        if self.average:
            state["ema"] = parallel.mean_statistics(self.average, self.model)
        return state

    def state_of_rank(self) -> dict[str, Any]:
        names = parallel.statistics_of(self.model) if self.average else ()
        average = {"ema": {name: self.average[name] for name in names}} if names else {}
        return {**super().state_of_rank(), **average}

    def resume(self, checkpoints: mpiddp.Checkpoints) -> int:
        resume, weights = self.config.resume, self.config.weights
        with mpiddp.together():
            saved = checkpoints.resume()
            if resume != "auto":
                saved = saved or mpiddp.load(resume)
                require_same_settings(self.config, self.out, saved)
            if saved is not None:
                self.load(saved)
            elif weights:
                self.load_weights(weights)
        steps = gathered(saved and saved.step)
        with mpiddp.together():
            if len({*steps}) > 1:
                found = f"step {min(steps)} on one host, and {max(steps)} on another"
                fix = f"--resume {resume}/checkpoints/step_N, which all hosts have"
                raise mpiddp.UserError(f"the newest checkpoint of {resume} is {found}.", fix=fix)
        if checkpoints.is_writer:
            save_json(self.out / CONFIG, vars(self.config))
        return self.begin(saved.step if saved else 0)

    def begin(self, step: int) -> int:
        """Begin to train after this step, which it returns."""
        config, world = self.config, self.world
        ranks, hosts = counted(world.world_size, "rank"), counted(world.num_nodes or 1, "host")
        log.info(
            f"{ranks} on {hosts} over {world.backend}, {config.parallel}, {config.arch} ({config.stem} stem) "
            f"on {self.data.name}, amp {config.amp}, global batch {config.global_batch_size}, "
            f"--lr {config.lr:g}"
        )
        if config.compile == "on":
            log.info("compiling the model takes a minute; --compile off trains without a delay")
        self._first = step
        return step

    def load(self, saved: mpiddp.Resumed) -> None:
        if self.config.ema_decay is not None:
            average: dict[str, Any] = {"ema" if "ema" in saved.state else "model": self.model}
            saved.load_into(**average)  # through the model, which knows its shards
            self.update_average(1.0)
        super().load(saved)
        if saved.world_size == self.world_size:
            for name, value in saved.per_rank.get("ema", {}).items() if self.average else ():
                self.average[name].copy_(value)
        if saved.state["scaler"]:  # empty unless the saved run had --amp fp16
            self.scaler.load_state_dict(saved.state["scaler"])

    def load_weights(self, weights: str) -> None:
        """Begin with these weights, without the last layer if that has another number of classes."""
        saved = mpiddp.load(weights)
        # A .safetensors file has one entry, which is named after the file.
        name = next(iter(saved.state)) if len(saved.state) == 1 else "model"
        entry = saved.state.get(name)
        if not isinstance(entry, dict) or entry.keys() != self.model.state_dict().keys():
            raise mpiddp.UserError(
                f"--weights {weights}: it is of another model than --arch {self.config.arch}."
            )
        # It logs the tensors that have another shape.
        saved.load_into(strict=False, **{name: self.model})

    def end(self) -> None:
        """Write summary.json, and print it as a table. A collective."""
        summary = self._summary()
        if self.world.rank == 0:
            file = mpiddp.run_dir() / SUMMARY
            # If the resume had no step left, the summary that the run has written before is still true.
            if summary["train_loss"] is None and steps_in(file) == self.step:
                file.touch()
            else:
                save_json(file, summary)
            log.info(f"\n{table(summary, self.config)}\n{mpiddp.run_dir()}")

    def _summary(self) -> dict[str, Any]:
        config, world, data, score = self.config, self.world, self.data, self.last_score
        # There is no time of a step if the run has resumed after its last step.
        times, whole = [*chain(*self._by_side.values())], self._by_side.get(data.image_size)
        middle, high = np.percentile(whole, (50, 95)).tolist() if whole else (None, None)
        return {
            "dataset": data.name,
            "arch": config.arch,
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "hosts": dict(Counter(gathered(world.hostname))),
            "global_batch_size": config.global_batch_size,
            "epochs": config.epochs,
            "steps": self.step,
            "train_loss": self.train_loss,
            "test_accuracy": score and score.accuracy,
            "accuracy_of_views": score.accuracy_of_views if score and config.views > 1 else None,
            "test_images": None if data.test is None else data.test.num_images,
            "parallel": config.parallel,
            "images_per_s": config.global_batch_size / mean(times) if times else None,
            "step_time_p50_s": middle,
            "step_time_p95_s": high,
            "wall_s": time.monotonic() - self._started_at,
        }


def pixels_of(side: int) -> int:
    """The pixels to which the time of a step is proportional, as if each image had some more."""
    return side**2 + 128


def stride_as_gradients(model: nn.Module) -> None:
    """Give the weights of 1×1 convolutions the strides of their gradients under channels_last.

    Both strides describe the same memory. cuDNN writes gradients with channels_last's strides, and torch
    leaves such weights as they are, so DDP would copy each of these gradients in every step, and warn.
    """
    for parameter in model.parameters():
        if parameter.ndim == 4 and parameter.shape[2:] == (1, 1):
            channels = parameter.shape[1]
            strides = (channels, 1, channels, channels)
            parameter.data = parameter.data.as_strided(parameter.shape, strides)


def require_same_settings(config: Config, out: Path, saved: mpiddp.Resumed) -> None:
    """Raise UserError unless --resume names another run, which was made with the same options."""
    resume = config.resume
    if Path(resume).resolve().is_relative_to(out.resolve()):
        fix = f"to go back, mpiddp checkpoints rewind {out} STEP, and leave --resume out"
        raise mpiddp.UserError(f"--resume {resume} is of this run.", fix=fix)
    rows = [(name, saved.about.config.get(name), now) for name, now in fixed_of(config).items()]
    if different := [f"{name} {old!r}, now {now!r}" for name, old, now in rows if old != now]:
        sentence = f"{resume} was made with another config: {'; '.join(different)}."
        raise mpiddp.UserError(
            sentence, fix=f"use the same config, or begin with its weights: --weights {resume}"
        )


# --- files ---


def table(summary: Mapping[str, Any], config: Config) -> str:
    """A line for each value of the summary. The training loss cannot be compared with a loss of tests."""
    shown = {name: f"{value:.4g}" for name, value in summary.items() if isinstance(value, float)}
    hosts = ", ".join(f"{name} {count}" for name, count in summary["hosts"].items())
    lines = {**summary, **shown, "hosts": hosts}
    smoothing = f"label smoothing {config.label_smoothing:g}"
    lines["train_loss"] = f"{lines['train_loss']}  (augmented images, {smoothing})"
    rows = {name: "-" if value is None else value for name, value in lines.items()}
    return "\n".join(f"{name:<18} {value}" for name, value in rows.items())


def steps_in(summary: Path) -> Any:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return json.loads(summary.read_bytes())["steps"]


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the file, or on an error leave the existing one. NaN and infinities become null."""
    bad = {
        name for name, value in values.items() if value in (math.inf, -math.inf) or value != value
    }
    finite = {name: None if name in bad else value for name, value in values.items()}
    replace_file(path, f"{json.dumps(finite, indent=1)}\n".encode())
