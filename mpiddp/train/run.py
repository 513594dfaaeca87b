"""A run of `mpiddp train` on the ranks of a job: join, check, resume, train, and write what remains.

    mpiddp launch -n 2 -m mpiddp train --epochs 2 --out runs/a

The training itself is `mpiddp.train.train.fit`.
"""

from __future__ import annotations

import logging
import shlex
import time
from argparse import Namespace
from pathlib import Path

import torch

import mpiddp
from mpiddp.errors import DONE, STOPPED, UserError
from mpiddp.train.checks import Divergence, check_determinism, require_equal
from mpiddp.train.config import FIXED, IMAGES_PER_PASS, Config, resolve
from mpiddp.train.data import Data, open_data, prepare
from mpiddp.train.measure import gathered
from mpiddp.train.order import Order
from mpiddp.train.records import (
    Records,
    counted,
    rank_log,
    require_tensorboard,
    save_json,
    tensorboard,
)
from mpiddp.train.state import build_model, build_state, choose_kernels
from mpiddp.train.train import Hook, fit, resume

PREPARE_TIMEOUT_S = 1800.0  # the download of a data set over a slow connection
log = logging.getLogger("mpiddp")  # rank 0 prints it


def run(options: Namespace) -> int:
    """Train with these options of `config.parse`, and return the exit code: DONE, or STOPPED on request."""
    with mpiddp.process_group(backend=options.backend) as world:
        device = torch.device(str(world.device))

        # Every check that may fail on some ranks: all ranks refuse, or none. Nothing is written before.
        with mpiddp.together(timeout_s=PREPARE_TIMEOUT_S):
            config = resolve(options, world.world_size, device)
            if world.local_rank == 0:
                prepare(config)  # downloads the data set
        with mpiddp.together():
            data = open_data(config, device)
            order = plan_order(config, world, data)
            choose_kernels(config)
            model = build_model(config, data, device)
        choice = f"{world.backend}, {config.arch}, amp {config.amp}, batch size {config.batch_size}"
        started = gathered(time.strftime("%Y%m%d-%H%M%S"))[0]
        out = Path(config.out or Path("runs") / f"{started}-{config.arch}")
        with mpiddp.together():
            automatic = "the automatic choice of settings"
            require_equal(automatic, choice, "Set --backend, --arch, --amp.")
            require_equal("the data set", data.contents, "Use the same --data-dir on every host.")
            if config.log_to and world.rank == 0:
                require_tensorboard()
            if config.parallel == "hsdp":  # the ranks of a host share a copy of the model
                hint = "Give equal slots, or use --parallel fsdp."
                require_equal("the number of ranks of a host", f"{world.local_world_size}", hint)
                if config.check_divergence and world.num_nodes in (None, 1):
                    copies = "copies of the model, and --parallel hsdp has one on one host"
                    raise UserError(f"--check-divergence compares {copies}. Leave one out.")
        if config.check_determinism:
            check_determinism(config, data, order, world)
            return DONE

        state = build_state(model, config, world.num_nodes or 1)
        mpiddp.announce(  # what the launcher needs to restart this run, on fewer hosts too
            resume_args=resume_args(config, out),
            global_batch_size=config.global_batch_size,
            max_ranks=max(world.world_size, config.global_batch_size // IMAGES_PER_PASS),
        )
        with mpiddp.together():
            began_with = data_of_run(out, config, data) if world.rank == 0 else ""
        with open_checkpoints(out, config, gathered(began_with)[0]) as checkpoints:
            with mpiddp.together():
                saved = checkpoints.resume(None if config.resume == "auto" else config.resume)
                step = resume(saved, state, config)
            logs = (out / "logs").absolute()
            logs.mkdir(exist_ok=True)
            if checkpoints.is_writer:
                save_json(out / "config.json", vars(config))
            with rank_log(logs / f"rank_{world.rank:05d}.log", world):
                log.info(
                    f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes or 1, 'host')} over "
                    f"{world.backend}, {config.parallel}, {config.arch} ({config.stem} stem) on "
                    f"{data.name}, amp {config.amp}, global batch {config.global_batch_size}, "
                    f"--lr {config.lr:g}"
                )
                if config.compile == "on":
                    log.info(
                        "compiling the model takes up to a minute; --compile off trains at once"
                    )
                total = order.steps_per_epoch * config.epochs
                sinks = [mpiddp.log_metrics]
                if config.log_to and world.rank == 0:
                    sinks.append(tensorboard(out, config, step))
                records = Records(config, world, data, state, total, sinks)
                hooks: list[Hook] = [records]
                if config.check_divergence:
                    hooks.append(Divergence(config.check_divergence, state))
                try:
                    records.begin(step)
                    step = fit(config, data, order, state, checkpoints, step, hooks)
                except torch.OutOfMemoryError as error:
                    raise mpiddp.JobFailed(out_of_memory(error, options, config)) from error
                if step >= total:
                    return DONE
                extra = resume_args(config, mpiddp.run_dir())
                command = f"the same command{' with ' if extra else ''}{shlex.join(extra)}"
                log.info(f"stopped at step {step}. To resume, run {command}.")
                return STOPPED


def plan_order(config: Config, world: mpiddp.World, data: Data) -> Order:
    """The images of this rank at each step. Raises UserError if an epoch has none."""
    order = Order(
        num_samples=data.train.num_images,
        global_batch_size=config.global_batch_size,
        grad_accum_steps=config.grad_accum_steps,
        rank=world.rank,
        world_size=world.world_size,
        seed=config.seed,
        max_steps=config.steps_per_epoch,
    )
    if order.steps_per_epoch == 0:
        raise UserError(
            f"the global batch of {config.global_batch_size} images is larger than the data set "
            f"({order.num_samples} images). Lower --batch-size or --global-batch-size."
        )
    return order


def resume_args(config: Config, out: Path) -> list[str]:
    """The options that the same command also needs to resume this run, which writes to `out`.

    A --resume that names another run counts until this run has a checkpoint, so it stays.
    """
    args = [] if config.out else ["--out", str(out)]
    goes_back = Path(config.resume).resolve().parent == (out / "checkpoints").resolve()
    return [*args, "--resume", "auto"] if goes_back else args


def open_checkpoints(folder: Path, config: Config, data: str) -> mpiddp.Checkpoints:
    """Those of the run in `folder`. They refuse a resume with other FIXED options or other data."""
    fixed = {f"--{name.replace('_', '-')}": getattr(config, name) for name in FIXED}
    settings = {"program": "mpiddp train", "data": data, **fixed}
    return mpiddp.Checkpoints(folder, keep=config.keep, every=config.save_every, config=settings)


def data_of_run(out: Path, config: Config, data: Data) -> str:
    """The data of the run that --skip-bad-images resumes: images may have been removed since. For rank 0."""
    for path in (out, Path(config.resume)) if config.skip_bad_images else ():
        try:
            before = str(mpiddp.load(path).config["data"])
        except (UserError, KeyError):  # there is none: Checkpoints judges it
            continue
        if before != data.contents:
            log.info(
                f"the run began with other data: {before}, now {data.contents}. The images come in another "
                "order from here on."
            )
        return before
    return data.contents


def out_of_memory(error: BaseException, options: Namespace, config: Config) -> str:
    """The sentence for a GPU whose memory is full. It says how to keep the global batch."""
    place = " in the place of --batch-size" if options.batch_size else ""
    batch = f"--global-batch-size {config.global_batch_size}"
    passes = f"{batch} --grad-accum-steps {2 * config.grad_accum_steps}{place}"
    return f"{error} The same global batch in half of the memory: {passes}."
