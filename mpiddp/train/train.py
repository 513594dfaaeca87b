"""Train a ResNet on the ranks of a job: `mpiddp launch -n 2 -m mpiddp train`, or `mpiddp train` alone.

Read it from top to bottom: join, data, model, DDP, resume, step, log, evaluate, save, summary. It uses public
names of mpiddp only, and so does every file that it imports from here: copy any of them into your own
project, and change it.
"""

from __future__ import annotations

import logging
import math
import os
import random
import shlex
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import mpiddp
from mpiddp.errors import DONE, STOPPED, UserError
from mpiddp.train.config import IMAGES_PER_PASS, gathered, require_equal, resolve, resume_args
from mpiddp.train.datasets import Data, batches, open_data, prepare
from mpiddp.train.determinism import check_determinism
from mpiddp.train.measure import PHASES, counted, measured, table
from mpiddp.train.options import FIXED, NOTED
from mpiddp.train.order import Order
from mpiddp.train.parallel import find_copies, ranks_with_same_shards
from mpiddp.train.record import check_packages, following, rank_log, save_json, start_record
from mpiddp.train.step import (
    State,
    averaged_buffers,
    build_model,
    build_state,
    choose_kernels,
    evaluate,
    learning_rate,
    restore_buffers,
    train_step,
)

PREPARE_TIMEOUT_S = 1800.0  # the download of a data set over a slow connection
log = logging.getLogger("mpiddp")  # rank 0 prints it


def main(options: Namespace) -> int:
    """Train with these options of `parse`, and return the exit code: DONE, or STOPPED on request."""
    # torch's flight recorder writes NCCL's last operations if a collective times out. To read the files:
    # python -m torch.distributed.flight_recorder.fr_trace --prefix nccl_rank_ LOGS
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
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
            choose_kernels(config)
            model = build_model(config, data, device)
        choice = f"{world.backend}, {config.arch}, amp {config.amp}, batch size {config.batch_size}"
        hosts = gathered(world.hostname)
        started = gathered(time.strftime("%Y%m%d-%H%M%S"))[0]
        out = Path(config.out or Path("runs") / f"{started}-{config.arch}")
        with mpiddp.together():
            automatic = "the automatic choice of settings"
            require_equal(automatic, choice, "Set --backend, --arch, --amp.")
            require_equal("the data set", data.contents, "Use the same --data-dir on every host.")
            copies = find_copies(config, world)
            refuse_existing_run(out, config)
            if world.rank == 0:
                check_packages(config.log_to)
        if world.rank == 0 and config.check_divergence and len(copies) == 1:
            log.warning(
                "warning: --check-divergence compares nothing: the ranks share one copy of the model."
            )

        if config.check_determinism:
            return check_determinism(config, data, order, world, copies)

        state = build_state(model, config, copies)
        mpiddp.announce(  # what the launcher needs to restart this run, on fewer hosts too
            resume_args=resume_args(config, out),
            global_batch_size=config.global_batch_size,
            max_ranks=max(world.world_size, config.global_batch_size // IMAGES_PER_PASS),
        )
        checkpoints = open_checkpoints(out, config, data.contents)
        with checkpoints:
            with mpiddp.together():
                step = resume(checkpoints, state, config)
            logs = (out / "logs").absolute()
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(logs / "nccl_rank_"))
            logs.mkdir(exist_ok=True)
            if checkpoints.is_writer:
                save_json(out / "config.json", vars(config))
            if world.rank == 0:
                start_record(out, world, hosts, started)
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
                try:
                    summary = fit(
                        config, world, data, order, state, checkpoints, step, record=record
                    )
                except torch.OutOfMemoryError as error:
                    raise mpiddp.JobFailed(out_of_memory(error, options, config)) from error
        if summary is None:
            return STOPPED
        summary["hosts"] = dict(Counter(hosts))
        has_steps = summary["train_loss"] is not None
        if world.rank == 0 and (has_steps or not (out / "summary.json").exists()):
            save_json(out / "summary.json", summary)
        log.info(f"\n{table(summary, out)}")
    return DONE


def fit(
    config: Namespace,
    world: mpiddp.World,
    data: Data,
    order: Order,
    state: State,
    checkpoints: mpiddp.Checkpoints,
    step: int,
    *,
    record: Callable[..., None] = mpiddp.log_metrics,
) -> dict[str, Any] | None:
    """Train to the end and return the summary. If a stop is requested, save a checkpoint and return None.

    `step` is the number of steps that it has made. `record` takes a step, and values by name.
    """
    started_at = time.monotonic()
    device = data.train.device
    total_steps = order.steps_per_epoch * config.epochs
    timer = state.timer
    epochs_s: list[float] = []
    train_loss: float | None = None
    accuracy: float | None = None

    for epoch in range(step // order.steps_per_epoch, config.epochs):
        first = step
        steps = order.steps(epoch, step % order.steps_per_epoch)
        images_of_epoch = batches(data.train, steps, config, epoch=epoch)
        loss_sum, num_images = torch.zeros((), device=device), 0
        say(config, f"Local Rank: {world.local_rank}, Epoch: {epoch}, Training ...")
        timer.resume()

        while step < (epoch + 1) * order.steps_per_epoch:
            lr = learning_rate(step, order.steps_per_epoch, config)
            loss_sum += train_step(state, images_of_epoch, lr, config)
            timer.tick()
            step, num_images = step + 1, num_images + config.global_batch_size
            ends_epoch = step % order.steps_per_epoch == 0
            shown: dict[str, Any] = {}

            if step % config.log_every == 0 or ends_epoch:
                dist.all_reduce(loss_sum)
                was_finite = train_loss is None or math.isfinite(train_loss)
                train_loss = loss_sum.item() / num_images
                if was_finite and not math.isfinite(train_loss) and world.rank == 0:
                    log.warning(
                        f"warning: the loss is {train_loss} at step {step}. Stop the run, and start it "
                        "again with a lower --lr or --clip-grad-norm: it resumes from its newest finite "
                        "checkpoint."
                    )
                loss_sum, num_images = torch.zeros((), device=device), 0
                recent = timer.read()[-config.log_every :]
                images_per_s = config.global_batch_size / mean(recent)
                spent = {phase: timer.spent[phase] for phase in PHASES}
                shown["phases"] = {"steps": len(timer.read()), **spent}
                speed = {"images_per_s": images_per_s, "step_time_s": mean(recent)}
                record(step, epoch=epoch, lr=lr, train_loss=train_loss, **speed)
                log.info(
                    f"epoch {epoch + 1}/{config.epochs}  step {step}/{total_steps}  "
                    f"loss {train_loss:.4f}  lr {lr:.4f}  {images_per_s:,.0f} images/s"
                )
            mpiddp.progress(step, total_steps, **shown)

            if ends_epoch:
                own = timer.read()[first - step :]
                epochs_s.append(sum(own))
                say(config, f"num_steps_per_gpu: {len(own)}, avg_step_time: {mean(own):.4f}")
                # After an epoch on smaller images, the accuracy on whole ones tells little.
                is_full_size = epoch >= config.low_res_epochs or epoch + 1 == config.epochs
                if data.test is not None and is_full_size:
                    accuracy, loss = evaluate(state.model, data.test, config)
                    record(step, epoch=epoch, test_accuracy=accuracy, test_loss=loss)
                    log.info(f"epoch {epoch + 1}/{config.epochs}  test accuracy {accuracy:.2%}")
                    timer.resume("evaluation")

            # Before should_stop: due() is true at a stop too, and the stop is then one save, of this step.
            is_due = checkpoints.due(step) or (config.save_every is None and ends_epoch)
            is_last = step == total_steps
            stops = not is_last and (mpiddp.should_stop() or step == config.stop_at_step)
            saves = is_due or stops or is_last
            if config.check_divergence and (saves or step % config.check_divergence == 0):
                # Before every save, so that a restart resumes from bits in which all ranks agreed.
                with mpiddp.together():  # the ranks with other shards do not know
                    same = ranks_with_same_shards(state.model)
                    mpiddp.check_divergence(state.model, state.optimizer, step=step, group=same)
                timer.resume()
            if saves:
                save(checkpoints, state, step, config)
                timer.resume("save")
            if stops:
                extra = resume_args(config, mpiddp.run_dir())
                command = f"the same command{' with ' if extra else ''}{shlex.join(extra)}"
                checkpoints.close()  # waits for the save
                log.info(f"stopped at step {step}. To resume, run {command}.")
                return None

    timer.resume()
    checkpoints.close()  # waits for the last save
    timer.resume("save")
    if epochs_s:  # the run has not resumed after its last step
        # As in the guides, the first epoch is left out, unless it is the only one.
        say(config, f"Average epoch time: {mean(epochs_s[1:] or epochs_s):.4f}")
    if accuracy is None and data.test is not None:  # resumed after the last step
        accuracy, _ = evaluate(state.model, data.test, config)
    return {
        "dataset": data.name,
        "arch": config.arch,
        "num_parameters": sum(p.numel() for p in state.model.parameters()),
        "world_size": world.world_size,
        "num_nodes": world.num_nodes,
        "global_batch_size": config.global_batch_size,
        "epochs": config.epochs,
        "steps": step,
        "train_loss": train_loss,
        "test_accuracy": accuracy,
        "test_images": data.test.num_images if data.test is not None else None,
        "parallel": config.parallel,
        **measured(timer, config.global_batch_size, device),
        "wall_s": time.monotonic() - started_at,
    }


def open_checkpoints(folder: Path, config: Namespace, data: str) -> mpiddp.Checkpoints:
    """Those of the run in `folder`. They refuse a resume with other FIXED options or other data."""
    fixed = {f"--{name.replace('_', '-')}": getattr(config, name) for name in FIXED}
    settings = {"program": "mpiddp train", "data": data, **fixed}
    return mpiddp.Checkpoints(folder, keep=config.keep, every=config.save_every, config=settings)


def save(checkpoints: mpiddp.Checkpoints, state: State, step: int, config: Namespace) -> None:
    """Start to save the checkpoint of this step. A collective: every rank must call it.

    The model can be loaded by any program: it is the bare one, with averaged BatchNorm statistics. The
    learning rate and the order of the images are functions of the step.
    """
    with averaged_buffers(state.model) as own:
        checkpoints.save(
            step,
            {
                "model": state.model.state_dict(),
                "optimizer": state.optimizer.state_dict(),
                "scaler": state.scaler.state_dict(),
                "training": {"options": vars(config)},
            },
            per_rank={"buffers": own},
        )


def resume(checkpoints: mpiddp.Checkpoints, state: State, config: Namespace) -> int:
    """Open the run's folder, and restore the newest checkpoint, or that of --resume. A collective.

    A job with another number of ranks keeps the averaged statistics and freshly seeded generators. Returns
    the number of steps that it has made; 0 without a checkpoint.
    """
    saved = checkpoints.resume(None if config.resume in ("auto", "never") else config.resume)
    if saved is not None:
        if changes := noted_changes(saved.state["training"]["options"], config):
            log.info(
                f"resuming with other options: {'; '.join(changes)}. The learning rate of each step is now "
                "that of a run that has had them from its start."
            )
        load(saved, state)
        if saved.world_size == dist.get_world_size():
            restore_buffers(state.model, saved.per_rank["buffers"])
            return saved.step
    seed = config.seed + 1 + dist.get_rank()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # numpy's largest
    return saved.step if saved else 0


def noted_changes(saved: Mapping[str, Any], config: Namespace) -> list[str]:
    """The options with other values than in `saved`, a config.json, that a resume may change."""
    return [
        f"--{name.replace('_', '-')} {saved.get(name)}, now {getattr(config, name)}"
        for name in NOTED
        if saved.get(name) != getattr(config, name)
    ]


def load(saved: mpiddp.Resumed, state: State) -> None:
    """Load the model, the optimizer and the scaler, with the settings of this version of the program."""
    optimizer = state.optimizer
    settings = [{**group} for group in optimizer.param_groups]
    saved.load_into(model=state.model, optimizer=optimizer)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    # The fused kernels read a parameter and its momentum element by element in memory order, and the
    # saved run may have had another layout.
    for parameter, held in optimizer.state.items():
        if held.get("momentum_buffer") is not None:
            held["momentum_buffer"] = torch.empty_like(parameter).copy_(held["momentum_buffer"])
    if saved.state["scaler"]:  # empty unless the saved run had --amp fp16
        state.scaler.load_state_dict(saved.state["scaler"])


def say(config: Namespace, line: str) -> None:
    """With --per-rank-log, print a line of the multi-node guides' script on every rank."""
    if config.per_rank_log:
        print(f"{line}\n", end="", flush=True)  # in one write, as other ranks print too


def out_of_memory(error: BaseException, options: Namespace, config: Namespace) -> str:
    """The sentence for a GPU whose memory is full. It says how to keep the global batch."""
    cause = "".join(str(error).partition("is free.")[:2])  # then torch lists who has the rest
    place = " in the place of --batch-size" if options.batch_size else ""
    batch = f"--global-batch-size {config.global_batch_size}"
    passes = f"{batch} --grad-accum-steps {2 * config.grad_accum_steps}{place}"
    return f"{cause} The same global batch in half of the memory: {passes}."


def refuse_existing_run(out: Path, config: Namespace) -> None:
    """Raise UserError if --resume never names the folder of a run. A restart resumes its own run."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # mpiddp sets it too
    if config.resume == "never" and not is_restart and (out / "checkpoints").exists():
        raise UserError(
            f"--resume never, but --out {out} already holds a run (checkpoints). Name another --out, or omit "
            "--resume to resume the run."
        )
