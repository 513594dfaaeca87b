"""What a run leaves beside its checkpoints: its lines and numbers, its summary, the facts of each start.

RUN/starts/start_0001.json is that of the first start, start_0002.json that of the first restart or resume.
Neither the environment nor a diff is stored, so that no secret can leak from there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

import mpiddp
from mpiddp.train.config import Config
from mpiddp.train.data import Data
from mpiddp.train.measure import measured
from mpiddp.train.state import State
from mpiddp.train.train import Hook, Score, Step

_GIT_S = 10.0
log = logging.getLogger("mpiddp")  # rank 0 prints it


class Records(Hook):
    """The lines and records of a training, and at its end the summary."""

    def __init__(
        self,
        config: Config,
        world: mpiddp.World,
        data: Data,
        state: State,
        total_steps: int,
        record: Callable[..., None] = mpiddp.log_metrics,
    ) -> None:
        """`record` takes a step, and values by name."""
        self._config, self._world, self._data, self._timer = config, world, data, state.timer
        self._num_parameters = sum(each.numel() for each in state.model.parameters())
        self._total_steps, self._record = total_steps, record
        self._started_at = time.monotonic()
        self._loss_sum, self._num_images = torch.zeros((), device=data.train.device), 0
        self._train_loss: float | None = None
        self._steps_before = 0  # those that the timer had when the epoch began
        self._epoch: int | None = None
        self._epochs_s: list[float] = []
        self.summary: dict[str, Any] = {}  # of a run that has ended

    def on_step(self, step: Step, *, saves: bool) -> None:
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            self._say(f"Local Rank: {self._world.local_rank}, Epoch: {step.epoch}, Training ...")
        self._loss_sum += step.loss_sum
        self._num_images += self._config.global_batch_size
        logs = step.number % self._config.log_every == 0 or step.ends_epoch
        if logs:
            self._log(step)
        mpiddp.progress(step.number, self._total_steps)

    def _log(self, step: Step) -> None:
        """Record the loss and the speed since the last time."""
        config, timer = self._config, self._timer
        dist.all_reduce(self._loss_sum)
        was_finite = self._train_loss is None or math.isfinite(self._train_loss)
        self._train_loss = self._loss_sum.item() / self._num_images
        if was_finite and not math.isfinite(self._train_loss) and self._world.rank == 0:
            log.warning(
                f"warning: the loss is {self._train_loss} at step {step.number}. Stop the run, and start it "
                "again with a lower --lr or --clip-grad-norm: it resumes from its newest finite checkpoint."
            )
        self._loss_sum, self._num_images = torch.zeros_like(self._loss_sum), 0
        recent = mean(timer.read()[-config.log_every :])
        images_per_s = config.global_batch_size / recent
        values = {"train_loss": self._train_loss, "images_per_s": images_per_s}
        self._record(step.number, epoch=step.epoch, lr=step.lr, **values, step_time_s=recent)
        log.info(
            f"epoch {step.epoch + 1}/{config.epochs}  step {step.number}/{self._total_steps}  "
            f"loss {self._train_loss:.4f}  lr {step.lr:.4f}  {images_per_s:,.0f} images/s"
        )

    def on_epoch(self, step: Step, score: Score | None) -> None:
        own = self._timer.read()[self._steps_before :]
        self._steps_before += len(own)
        self._epochs_s.append(sum(own))
        self._say(f"num_steps_per_gpu: {len(own)}, avg_step_time: {mean(own):.4f}")
        if score is not None:
            values = {"test_accuracy": score.accuracy, "test_loss": score.loss}
            self._record(step.number, epoch=step.epoch, **values)
            shown = f"test accuracy {score.accuracy:.2%}"
            log.info(f"epoch {step.epoch + 1}/{self._config.epochs}  {shown}")

    def on_end(self, step: int, score: Score | None) -> None:
        config, world, test = self._config, self._world, self._data.test
        if self._epochs_s:  # the run has not resumed after its last step
            # As in the guides, the first epoch is left out, unless it is the only one.
            self._say(f"Average epoch time: {mean(self._epochs_s[1:] or self._epochs_s):.4f}")
        self.summary = {
            "dataset": self._data.name,
            "arch": config.arch,
            "num_parameters": self._num_parameters,
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
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

    def _say(self, line: str) -> None:
        """With --per-rank-log, print a line of the multi-node guides' script on every rank."""
        if self._config.per_rank_log:
            print(f"{line}\n", end="", flush=True)  # in one write, as other ranks print too


def table(summary: Mapping[str, Any], out: Path) -> str:
    """The table that a run prints at its end."""

    def shown(name: str, form: str, factor: float = 1.0) -> str:
        value = summary[name]
        return "-" if value is None or not math.isfinite(value) else format(factor * value, form)

    hosts = ", ".join(f"{name} {count}" for name, count in summary["hosts"].items())
    spent = {name: value for name, value in summary["phases"].items() if value > 0}
    shares = ", ".join(f"{name} {value / sum(spent.values()):.0%}" for name, value in spent.items())
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
        "test accuracy": "no test set"
        if summary["test_accuracy"] is None
        else f"{summary['test_accuracy']:.2%} of {summary['test_images']:,} images",
        "wall time": f"{summary['wall_s']:.0f} s",
        "run folder": str(out),
    }
    return "\n".join(f"{name:<15}{value}" for name, value in rows.items())


def save_summary(run: Path, summary: Mapping[str, Any], hosts: Sequence[str]) -> str:
    """Write summary.json, unless nothing was trained after an earlier one, and return the table."""
    whole = {**summary, "hosts": dict(Counter(hosts))}
    if summary["train_loss"] is not None or not (run / "summary.json").exists():
        save_json(run / "summary.json", whole)
    return table(whole, run)


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
        with (
            contextlib.suppress(OSError),
            path.open("a", errors="backslashreplace", encoding="utf-8") as file,
        ):
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} {text}\n")

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


def save_start(run: Path, world: mpiddp.World, hosts: list[str], started: str) -> None:
    """Write the record of this start. For rank 0 alone, before workers fork: it starts git."""
    facts = {
        "started": started,  # local time, 20261122-070847
        "command": shlex.join([sys.executable, *sys.argv]),
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "started_by": world.launcher.name,
        "hosts_of_ranks": hosts,
        "packages": {str(each.metadata["Name"]): each.version for each in distributions()},
        "git_commit": commit_of(Path.cwd()) or None,
    }
    with contextlib.suppress(OSError):  # the training matters more than its record
        (run / "starts").mkdir(exist_ok=True)
        number = 1 + len(list((run / "starts").glob("start_*.json")))
        save_json(run / "starts" / f"start_{number:04d}.json", facts)


def commit_of(folder: Path) -> str:
    """The commit of a folder, with "-dirty" if files differ from it; "" outside of a repository."""
    options = ("--always", "--abbrev=40", "--exclude=*", "--dirty")
    command = ["git", "--no-optional-locks", "describe", *options]
    pipe: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "capture_output": True}
    try:
        return str(subprocess.run(command, cwd=folder, timeout=_GIT_S, **pipe).stdout).strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
