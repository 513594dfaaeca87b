"""What a run leaves beside its checkpoints: its lines and numbers, its summary, and the log of each rank."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

import mpiddp
from mpiddp.errors import UserError
from mpiddp.train.config import Config
from mpiddp.train.data import Data
from mpiddp.train.measure import Forecast, duration, gathered, measured
from mpiddp.train.state import State
from mpiddp.train.train import Hook, Score, Step, time_passes

log = logging.getLogger("mpiddp")  # rank 0 prints it


Sink = Callable[..., None]  # takes a step, and values by name, as mpiddp.log_metrics does


class Records(Hook):
    """The lines and the numbers of a training, and its summary."""

    def __init__(
        self,
        config: Config,
        world: mpiddp.World,
        data: Data,
        state: State,
        total_steps: int,
        sinks: Sequence[Sink] = (mpiddp.log_metrics,),
    ) -> None:
        self._config, self._world, self._data, self._timer = config, world, data, state.timer
        self._num_parameters = sum(each.numel() for each in state.model.parameters())
        self._state, self._total_steps, self._sinks = state, total_steps, sinks
        self._forecast: Forecast | None = None  # until `begin`
        self._step_s: float | None = None  # of the last steps
        self._evaluated = 0  # the last step after which the model was scored
        self._started_at = time.monotonic()
        self._loss_sum, self._num_images = torch.zeros((), device=data.train.device), 0
        self._train_loss: float | None = None

    def begin(self, step: int) -> None:
        """Say how long the training will take from this step on. A collective: every rank must call it."""
        config, test = self._config, self._data.test
        pass_s = time_passes(self._state, config)
        num_batches = test.num_images / config.global_batch_size if test else 0.0
        # An evaluation has no backward pass, which takes about two thirds of the time.
        evaluation_s = pass_s.get(config.image_size, 0.0) * num_batches / 3
        length = self._total_steps // config.epochs
        self._forecast = Forecast(config, length, pass_s, evaluation_s)
        self._evaluated = step
        epochs = f"{config.epochs - step / length:.3g} of {counted(config.epochs, 'epoch')}"
        log.info(f"{epochs} to come, in about {duration(self._forecast.left_s(step, step))}")

    def _left(self, step: int) -> str:
        if self._forecast is None:
            return ""
        return f"  {duration(self._forecast.left_s(step, self._evaluated, self._step_s))} left"

    def on_step(self, step: Step, *, saves: bool) -> None:
        self._loss_sum += step.loss_sum
        self._num_images += self._config.global_batch_size
        if step.number % self._config.log_every == 0 or step.ends_epoch:
            self._log(step)
        mpiddp.progress(step.number, self._total_steps)

    def _log(self, step: Step) -> None:
        """Record the loss and the speed since the last time."""
        config = self._config
        dist.all_reduce(self._loss_sum)
        was_finite = self._train_loss is None or math.isfinite(self._train_loss)
        self._train_loss = loss = self._loss_sum.item() / self._num_images
        if was_finite and not math.isfinite(loss) and self._world.rank == 0:
            log.warning(
                f"warning: the loss is {loss} at step {step.number}. Stop the run, and start it again with a "
                "lower --lr or --clip-grad-norm: it resumes from its newest finite checkpoint."
            )
        self._loss_sum, self._num_images = torch.zeros_like(self._loss_sum), 0
        self._step_s = step_s = mean(self._timer.read()[-config.log_every :])
        speed = config.global_batch_size / step_s
        values = {"lr": step.lr, "train_loss": loss, "images_per_s": speed, "step_time_s": step_s}
        self._record(step, **values)
        log.info(
            f"epoch {step.epoch + 1}/{config.epochs}  step {step.number}/{self._total_steps}  "
            f"loss {loss:.4f}  lr {step.lr:.4f}  {speed:,.0f} images/s{self._left(step.number)}"
        )

    def on_epoch(self, step: Step, score: Score | None) -> None:
        if score is not None:
            values = {"test_accuracy": score.accuracy, "test_loss": score.loss}
            self._record(step, **values)
            accuracy = f"test accuracy {score.accuracy:.2%}"
            self._evaluated = step.number
            epoch = f"epoch {step.epoch + 1}/{self._config.epochs}"
            log.info(f"{epoch}  {accuracy}{self._left(step.number)}")

    def _record(self, step: Step, **values: float) -> None:
        for sink in self._sinks:
            sink(step.number, epoch=step.epoch, **values)

    def summary(self, step: int, score: Score | None) -> dict[str, Any]:
        """The figures of a run that has ended with this step. A collective: every rank must call it."""
        config, world, test = self._config, self._world, self._data.test
        return {
            "dataset": self._data.name,
            "arch": config.arch,
            "num_parameters": self._num_parameters,
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "hosts": dict(Counter(gathered(world.hostname))),
            "global_batch_size": config.global_batch_size,
            "epochs": config.epochs,
            "steps": step,
            "train_loss": self._train_loss,
            "test_accuracy": None if score is None else score.accuracy,
            "test_images": None if test is None else test.num_images,
            "parallel": config.parallel,
            **measured(self._timer, config.global_batch_size, self._data.train.device),
            "wall_s": time.monotonic() - self._started_at,
        }

    def on_end(self, step: int, score: Score | None) -> None:
        summary, run = self.summary(step, score), mpiddp.run_dir()
        if self._world.rank == 0:
            file = run / "summary.json"
            # After a resume that had no step left, the summary of the start before has the figures.
            if summary["train_loss"] is None and _steps_of(file) == step:
                file.touch()  # it is still true
            else:
                save_json(file, summary)
            log.info(f"\n{table(summary, run)}")


def _steps_of(summary: Path) -> Any:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return json.loads(summary.read_bytes())["steps"]


def tensorboard(run: Path, config: Config, step: int) -> Sink:
    """Write all numbers after this step into RUN/tensorboard. Earlier records of later steps go."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
    if step == 0:
        writer.add_text("config", f"```json\n{json.dumps(vars(config), indent=1)}\n```")

    def record(step: int, **values: Any) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return record


def require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise UserError(
            f"--log-to tensorboard needs tensorboard, which {sys.executable} does not have. "
            f"Run: {sys.executable} -m pip install tensorboard"
        )


def table(summary: Mapping[str, Any], run: Path) -> str:
    """The table that a run prints at its end."""

    def shown(name: str, form: str, factor: float = 1.0) -> str:
        value = summary[name]
        return "-" if value is None else format(factor * value, form)

    hosts = ", ".join(f"{name} {count}" for name, count in summary["hosts"].items())
    spent = {name: value for name, value in summary["phases"].items() if value > 0}
    shares = ", ".join(f"{name} {value / sum(spent.values()):.0%}" for name, value in spent.items())
    accuracy = f"{shown('test_accuracy', '.2%')} of {summary['test_images'] or 0:,} images"
    rows = {
        "data set": summary["dataset"],
        "arch": f"{summary['arch']} ({summary['num_parameters']:,} parameters)",
        "ranks": f"{summary['world_size']} on {counted(summary['num_nodes'], 'host')} ({hosts})",
        "steps": f"{summary['steps']:,} of {summary['global_batch_size']} images",
        "images/s": f"{shown('images_per_s', ',.0f')} over all ranks",
        "step time": f"p50 {shown('step_time_p50_s', '.1f', 1000)} ms, "
        f"p95 {shown('step_time_p95_s', '.1f', 1000)} ms",
        "time": shares or "-",
        "train loss": shown("train_loss", ".4f"),
        "test accuracy": accuracy if summary["test_images"] else "no test set",
        "wall time": f"{summary['wall_s']:.0f} s",
        "run folder": str(run),
    }
    return "\n".join(f"{name:<15}{value}" for name, value in rows.items())


def counted(number: int, noun: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the file, or on an error leave the existing one. NaN and infinities become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(finite, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def rank_log(path: Path, world: mpiddp.World) -> Iterator[None]:
    """Write logs/rank_00003.log: the rank's identity, and the traceback if the body fails."""

    def write(text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} {text}\n"
        with contextlib.suppress(OSError), path.open("ab") as file:
            file.write(line.encode(errors="backslashreplace"))

    who = f"rank {world.rank} of {world.world_size}, local rank {world.local_rank}"
    where = f"node {world.node_rank}, host {world.hostname}, pid {os.getpid()}"
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    write(f"started: {who}, {where}, {versions}, by {world.launcher.name}")
    try:
        yield
    except BaseException:
        write(f"failed\n{traceback.format_exc()}")
        raise
    write("done")
