"""`mpiddp train`: the training of train.py with all options, for many kinds of machines.

    mpiddp launch -n 2 -m mpiddp train --epochs 2 --out runs/a
    cp mpiddp/train/train.py mine.py && mpiddp launch -n 2 mine.py --epochs 2 --out runs/a

It adds to train.py: options with checks and help, random images, mixup, schedules, AdamW, clipping, an
average, fp16, compiling, shards, batches that stay the same on other numbers of ranks, checks of the ranks, a
forecast and a summary. With the same recipe, both have the same bits.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

import mpiddp
from mpiddp.arguments import flag_of
from mpiddp.text import counted
from mpiddp.train import data as datasets
from mpiddp.train.config import IMAGES_PER_PASS, Config, fixed_of, parse, resolve
from mpiddp.train.data import DATASETS, Data
from mpiddp.train.parallel import gathered
from mpiddp.train.train import DONE
from mpiddp.train.trainer import Trainer

log = logging.getLogger("mpiddp.train")  # rank 0 prints it


def main(argv: list[str] | None = None) -> int:
    """Train as one rank of a job, or alone. Returns the exit code: DONE, or STOPPED on request."""
    options = parse(sys.argv[1:] if argv is None else argv)
    with mpiddp.process_group(backend=options.backend) as world:
        device = torch.device(str(world.device))
        # A check may fail on some ranks: then all ranks refuse, before anything is written.
        with mpiddp.together():
            config = resolve(options, world.world_size, device)
            choose_kernels(config)
        data = open_config(config, world)
        started = gathered(time.strftime("%Y%m%d-%H%M%S"))[0]
        out = Path(config.out or Path("runs") / f"{started}-{config.arch}")
        with mpiddp.together():
            check_ranks(config, data, world)
        if config.check_determinism:

            def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor]]:
                fresh = Trainer(config, data, world, out)
                return fresh.model, fresh.optimizer, (made.loss_sum for made in fresh.steps(0))

            tensors = mpiddp.check_determinism(begin, steps=config.check_determinism)
            where = f"{counted(world.world_size, 'rank')}, in each of {tensors} tensors of a step"
            runs = f"two runs of {config.check_determinism} steps from the same start"
            log.info(f"{runs} are equal bit for bit on {where}.")
            return DONE
        try:
            training = Trainer(config, data, world, out)
            mpiddp.announce(  # what the launcher needs to restart this run, on fewer hosts too
                resume_args=training.resume_args,
                global_batch_size=config.global_batch_size,
                max_ranks=max(world.world_size, config.global_batch_size // IMAGES_PER_PASS),
            )
            with open_checkpoints(training) as checkpoints:
                return training.run(checkpoints)
        except torch.OutOfMemoryError as error:
            raise mpiddp.JobFailed(str(error), fix=half_the_memory(options, config)) from error


def choose_kernels(config: Config) -> None:
    """Before the first operation on a GPU: cuDNN's fastest kernels, or reproducible ones."""
    torch.backends.cudnn.benchmark = not config.deterministic
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # an operation without such a kernel raises


def open_config(config: Config, world: mpiddp.World) -> Data:
    """Open the data set, or random images in its shape. A collective. Raises UserError or JobFailed."""
    source = DATASETS[config.dataset]
    if config.use_syn:
        shape = source.num_images, source.num_classes, config.image_size, config.batch_size
        seed, device = config.seed * 1_000_003 + world.rank, torch.device(str(world.device))
        images = datasets.RandomImages(*shape, seed, device)
        return Data(
            f"synthetic {config.dataset}", source.num_classes, config.image_size, images, None
        )
    with mpiddp.together():
        folder = Path(config.data_dir or datasets.default_folder())
        if config.data_dir and not folder.is_dir():
            where = f"{config.data_dir} is not a folder (looked in {Path.cwd()})."
            raise mpiddp.UserError(f"--data-dir {where}")
    skipped: set[str] = set()

    def skip(problem: str) -> None:
        skipped.add(problem)
        log.warning(f"warning: {problem} Skipped: {len(skipped)} on this rank so far.")

    skips = skip if config.skip_bad_images else None
    how = config.image_size, config.max_shift, config.num_workers, skips
    return datasets.open_data(source, folder, world, datasets.Opening(config.seed, *how))


def open_checkpoints(training: Trainer) -> mpiddp.Checkpoints:
    """The checkpoints of the run. They refuse a resume with other fixed options or data."""
    config, out = training.config, training.out
    with mpiddp.together():
        contents = data_of_run(out, config, training.data) if training.world.rank == 0 else ""
    return mpiddp.Checkpoints(
        out,
        keep=config.keep,
        every=config.save_every or training.length,
        config={"program": "mpiddp train", "data": gathered(contents)[0], **fixed_of(config)},
    )


def data_of_run(out: Path, config: Config, data: Data) -> str:
    """The data that the run began with, because --skip-bad-images lets images be removed. For rank 0."""
    if config.skip_bad_images:
        # A run has no checkpoint yet, or one of another program.
        with suppress(mpiddp.UserError, KeyError):
            before = str(mpiddp.load(out).about.config["data"])
            if before != data.contents:
                told = f"the run began with other data: {before}, now {data.contents}."
                log.info(f"{told} The images come in another order from here on.")
            return before
    return data.contents


def check_ranks(config: Config, data: Data, world: mpiddp.World) -> None:
    """Raise UserError unless all ranks train the same. A collective."""
    # Other settings follow from --amp, so it comes first. Some are of each host.
    compared = {"--amp": config.amp}
    compared |= {flag_of(name): str(value) for name, value in vars(config).items()}
    compared |= {"--backend": str(world.backend), "--num-workers": "", "--data-dir": ""}
    compared["the data set"] = data.contents
    fixes = {
        "the data set": "use the same --data-dir on every host",
        "--amp": "--amp off, because not all hosts compute bf16 fast",
    }
    if config.parallel == "hsdp":  # the ranks of a host share a copy of the model
        compared["the number of ranks of a host"] = f"{world.local_world_size}"
        fixes["the number of ranks of a host"] = "give equal slots, or use --parallel fsdp"
        if config.check_divergence and world.num_nodes in (None, 1):
            copies = "copies of the model, and --parallel hsdp has one on one host"
            raise mpiddp.UserError(f"--check-divergence compares {copies}.", fix="leave one out")
    by_rank = gathered(compared)
    for name in compared:
        values = [of_rank.get(name) for of_rank in by_rank]
        if len(set(values)) > 1:
            ranks = {value: values.index(value) for value in values}
            listed = ", ".join(f"{value} (rank {rank})" for value, rank in ranks.items())
            fix = fixes.get(name, "give all ranks the same options")
            raise mpiddp.UserError(f"{name} differs: {listed}.", fix=fix)


def half_the_memory(options: argparse.Namespace, config: Config) -> str:
    """The options that keep the global batch, for a GPU whose memory is full."""
    place = " in the place of --batch-size" if options.batch_size else ""
    batch = f"--global-batch-size {config.global_batch_size}"
    passes = f"{batch} --grad-accum-steps {2 * config.grad_accum_steps}{place}"
    return f"for the same global batch in half of the memory: {passes}"


if __name__ == "__main__":
    sys.exit(main())
