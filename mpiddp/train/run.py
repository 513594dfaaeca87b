"""A run of `mpiddp train` on the ranks of a job: join, check, resume, train, and write what remains.

    mpiddp launch -n 2 -m mpiddp train --epochs 2 --out runs/a

The training itself is `mpiddp.train.train.fit`.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import mpiddp
from mpiddp.errors import DONE, STOPPED, UserError
from mpiddp.train.checks import Divergence, check_determinism, gathered, require_equal
from mpiddp.train.config import FIXED, IMAGES_PER_PASS, NOTED, Config, resolve
from mpiddp.train.data import Data, open_data, prepare
from mpiddp.train.order import Order
from mpiddp.train.records import Records, counted, rank_log, save_json, save_start, save_summary
from mpiddp.train.sharded import find_copies
from mpiddp.train.state import State, build_model, build_state, choose_kernels
from mpiddp.train.tools import check_packages, following
from mpiddp.train.train import Hook, fit, resume

PREPARE_TIMEOUT_S = 1800.0  # the download of a data set over a slow connection
log = logging.getLogger("mpiddp")  # rank 0 prints it


def run(options: Namespace) -> int:
    """Train with these options of `parse`, and return the exit code: DONE, or STOPPED on request."""
    # torch's flight recorder writes NCCL's last operations if a collective times out. To read the files:
    # python -m torch.distributed.flight_recorder.fr_trace --prefix nccl_rank_ LOGS
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
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
        hosts = gathered(world.hostname)
        nodes = gathered(f"{world.hostname} (node {world.node_rank})")
        started = gathered(time.strftime("%Y%m%d-%H%M%S"))[0]
        out = Path(config.out or Path("runs") / f"{started}-{config.arch}")
        with mpiddp.together():
            automatic = "the automatic choice of settings"
            require_equal(automatic, choice, "Set --backend, --arch, --amp.")
            require_equal("the data set", data.contents, "Use the same --data-dir on every host.")
            copies = find_copies(config.parallel, nodes)
            refuse_existing_run(out, config)
            if world.rank == 0:
                check_packages(config.log_to)
        if config.check_determinism:
            check_determinism(config, data, order, world, copies)
            return DONE

        state = build_state(model, config, copies)
        mpiddp.announce(  # what the launcher needs to restart this run, on fewer hosts too
            resume_args=resume_args(config, out),
            global_batch_size=config.global_batch_size,
            max_ranks=max(world.world_size, config.global_batch_size // IMAGES_PER_PASS),
        )
        with mpiddp.together():
            began_with = data_of_run(out, config, data) if world.rank == 0 else ""
        with open_checkpoints(out, config, gathered(began_with)[0]) as checkpoints:
            with mpiddp.together():
                step = open_run(checkpoints, state, config)
            logs = (out / "logs").absolute()
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(logs / "nccl_rank_"))
            logs.mkdir(exist_ok=True)
            if checkpoints.is_writer:
                save_json(out / "config.json", vars(config))
            if world.rank == 0:
                save_start(out, world, hosts, started)
            tools = config.log_to if world.rank == 0 else None
            with (
                rank_log(logs / f"rank_{world.rank:05d}.log", world),
                following(tools, out, vars(config), step=step) as record,
            ):
                log.info(
                    f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes or 1, 'host')} over "
                    f"{world.backend}, {config.parallel}, {config.arch} ({config.stem} stem) on "
                    f"{data.name}, amp {config.amp}, global batch {config.global_batch_size}, "
                    f"--lr {config.lr:g}"
                )
                if config.compile != "off":
                    log.info(
                        "compiling the model takes up to a minute; --compile off trains at once"
                    )
                total = order.steps_per_epoch * config.epochs
                records = Records(config, world, data, state, total, record)
                hooks: list[Hook] = [records]
                if config.check_divergence:
                    hooks.append(Divergence(config.check_divergence, state))
                try:
                    step = fit(config, data, order, state, checkpoints, step, hooks)
                except torch.OutOfMemoryError as error:
                    raise mpiddp.JobFailed(out_of_memory(error, options, config)) from error
                if step < total:
                    extra = resume_args(config, mpiddp.run_dir())
                    command = f"the same command{' with ' if extra else ''}{shlex.join(extra)}"
                    log.info(f"stopped at step {step}. To resume, run {command}.")
                    return STOPPED
        if world.rank == 0:
            log.info(f"\n{save_summary(out, records.summary, hosts)}")
    return DONE


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


def refuse_existing_run(out: Path, config: Config) -> None:
    """Raise UserError if --resume never names the folder of a run. A restart resumes its own run."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # mpiddp sets it too
    if config.resume == "never" and not is_restart and (out / "checkpoints").exists():
        raise UserError(
            f"--resume never, but --out {out} already holds a run (checkpoints). Name another --out, or omit "
            "--resume to resume the run."
        )


def resume_args(config: Config, out: Path) -> list[str]:
    """The options that the same command also needs to resume this run, which writes to `out`.

    A --resume that names another run counts until this run has a checkpoint, so it stays.
    """
    args = [] if config.out else ["--out", str(out)]
    goes_back = Path(config.resume).resolve().parent == (out / "checkpoints").resolve()
    return [*args, "--resume", "auto"] if config.resume == "never" or goes_back else args


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


def open_run(checkpoints: mpiddp.Checkpoints, state: State, config: Config) -> int:
    """Open the run's folder, and restore the newest checkpoint, or that of --resume. Returns its step."""
    saved = checkpoints.resume(None if config.resume in ("auto", "never") else config.resume)
    if saved is not None and (changes := noted_changes(saved.state["training"]["options"], config)):
        log.info(
            f"resuming with other options: {'; '.join(changes)}. The learning rate of each step is now "
            "that of a run that has had them from its start."
        )
    return resume(saved, state, config)


def noted_changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """The options with other values than in `saved`, a config.json, that a resume may change."""
    return [
        f"--{name.replace('_', '-')} {saved[name]}, now {getattr(config, name)}"
        for name in NOTED
        if name in saved and saved[name] != getattr(config, name)
    ]


def out_of_memory(error: BaseException, options: Namespace, config: Config) -> str:
    """The sentence for a GPU whose memory is full. It says how to keep the global batch."""
    place = " in the place of --batch-size" if options.batch_size else ""
    batch = f"--global-batch-size {config.global_batch_size}"
    passes = f"{batch} --grad-accum-steps {2 * config.grad_accum_steps}{place}"
    return f"{error} The same global batch in half of the memory: {passes}."
