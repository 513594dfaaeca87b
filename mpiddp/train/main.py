"""`mpiddp train`: one rank of a ResNet training, from its options to the last table.

The same under mpirun, srun and torchrun; alone it is a job of one rank, and says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mpiddp.errors import DONE, STOPPED, UserError, silence_stdout
from mpiddp.runtime import control_client
from mpiddp.runtime.announcement import announce, announced
from mpiddp.runtime.control_client import reporting
from mpiddp.runtime.process_setup import configure_process
from mpiddp.runtime.stop_request import declare_support, listen_when_alone, stopped
from mpiddp.text import counted
from mpiddp.train.config import TrainConfig, out_dir, parse, resume_args, settle
from mpiddp.train.restart import IMAGES_PER_PASS, keep_global_batch
from mpiddp.world import World

PREPARE_TIMEOUT_S = 1800.0  # a slow line may need this long for a data set


def main(argv: list[str]) -> int:
    """Train, and return the exit code: DONE, or STOPPED where it ends early on request.

    Raises:
        UserError, SystemExit: bad input, see `mpiddp.runtime.coordinator`.
    """
    world = World.from_env()
    try:
        config: TrainConfig | UserError = parse(argv)
    except UserError as error:
        if world.world_size == 1:
            raise
        config = error  # for all ranks to hear, once they have met
    configure_process(world)
    with reporting(world):
        declare_support()
        return _train(config, world)


def _train(config: TrainConfig | UserError, world: World) -> int:
    # Only now torch: --help and a wrong option answer at once.
    from mpiddp.checkpoints import replicas
    from mpiddp.runtime.join import join
    from mpiddp.runtime.process_group import choose_backend, default_group, device_of
    from mpiddp.train import flight_recorder, resume
    from mpiddp.train.data import open_data, prepare
    from mpiddp.train.engine import build_model, choose_kernels, computes_in_bf16
    from mpiddp.train.loop import make_plan, train
    from mpiddp.train.metrics import Summary, table
    from mpiddp.train.parallel import check_compression
    from mpiddp.train.records import save_json

    with join(world) as coordinator:
        world = coordinator.world

        def say(text: str) -> None:
            if world.rank == 0:
                try:
                    print(text, flush=True)
                except BrokenPipeError:  # no reason to end
                    silence_stdout()

        with coordinator.all_or_none():
            if isinstance(config, UserError):
                raise config
            backend = choose_backend(config.backend)
            device = device_of(world, backend)
            config = keep_global_batch(config, announced(), world.world_size)
            config = settle(
                config, world, on_gpu=device.type != "cpu", has_bf16=computes_in_bf16(device)
            )
            check_compression(config, device)
        with coordinator.all_or_none():
            coordinator.require_equal(
                "what the ranks chose",
                f"{backend}, {config.arch}, amp {config.amp}, {config.batch_size} images a rank",
                hint="Name it: --backend, --arch, --amp, --batch-size.",
            )
        if world.launcher.name == "none":
            say("no launcher: training alone, as rank 0 of 1. For more: mpiddp launch --help")
        with coordinator.all_or_none(timeout_s=PREPARE_TIMEOUT_S):
            if world.local_rank == 0:
                prepare(config)
        out = out_dir(config, coordinator.broadcast_json(time.strftime("%Y%m%d-%H%M%S")))
        with coordinator.all_or_none():
            data = open_data(config, world, device)
        with coordinator.all_or_none():
            coordinator.require_equal(
                "the data of the ranks", data.contents, hint="Give every host the same --data-dir."
            )
        with coordinator.all_or_none():
            plan = make_plan(config, data, coordinator)
            model = build_model(config, data)
        start = resume.find(coordinator, config, data.contents, out, say)
        shards = plan.shards
        announce(
            resume_args=resume_args(config, out),
            global_batch_size=shards.global_batch_size,
            max_ranks=max(1, shards.global_batch_size // IMAGES_PER_PASS),
        )
        with coordinator.all_or_none(), _writing(out):  # all is well: only now something is written
            for folder in (out / "logs", out / "checkpoints"):  # on every host
                folder.mkdir(parents=True, exist_ok=True)
        writer_ranks = replicas.find_writer_ranks(coordinator, out, timeout_s=config.timeout)
        with coordinator.all_or_none(), _writing(out):
            if world.rank in writer_ranks:
                save_json(out / "config.json", config.as_json())
                (out / "metrics.jsonl").touch()

        if backend == "nccl":
            os.environ.update(flight_recorder.settings(out / "logs", os.environ))
        choose_kernels(config)
        with (
            default_group(coordinator, backend, device, timeout_s=config.timeout),
            _log(out, world),
        ):
            say(
                f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes or 1, 'host')} "
                f"over {backend}, {config.arch} on {data.name}, amp {config.amp}, global batch "
                f"{plan.shards.global_batch_size}, peak lr {plan.peak_lr:g} "
                f"(--lr {config.lr:g}{' scaled by batch/256' if config.lr_scaling else ''})"
            )
            if world.launcher.name == "none":
                listen_when_alone()
            summary = train(
                config, plan, coordinator, data, model, start, writer_ranks, device, out, say
            )

        if summary is None:
            stopped()
            return STOPPED
        if world.rank == 0:
            path = out / "summary.json"
            if summary.images_per_s is None:  # it was over: what it found stands
                with contextlib.suppress(OSError, ValueError, TypeError):
                    summary = Summary(**json.loads(path.read_bytes()))
            try:
                save_json(path, dataclasses.asdict(summary))
            except OSError as error:
                print(f"warning: {path}: {error.strerror}.", file=sys.stderr, flush=True)
        say(f"\n{table(summary, out)}")
    return DONE


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """A body that writes into the run's folder. Raises UserError where it cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written: {error.strerror}. Name another folder."
        ) from None


class _log:
    """This rank's log: who it is, and the traceback that ended it, if one did."""

    def __init__(self, out: Path, world: World) -> None:
        logging.raiseExceptions = False  # a full disk: the checkpoints tell of it
        self._logger = logging.Logger("mpiddp")
        path = out / "logs" / f"rank_{world.rank:05d}.log"
        control_client.send("log", path=str(path))
        handler = logging.FileHandler(path)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._logger.addHandler(handler)
        self._world = world

    def __enter__(self) -> None:
        import torch

        world = self._world
        self._logger.info(
            "started: rank %d of %d, local rank %d, node %s, host %s, pid %d, python %s, torch %s, by %s",
            world.rank,
            world.world_size,
            world.local_rank,
            world.node_rank,
            world.hostname,
            os.getpid(),
            platform.python_version(),
            torch.__version__,
            world.launcher.name,
        )

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._logger.info("done")
        else:
            self._logger.error("failed", exc_info=error)
        logging.shutdown()
