"""Stages that train: what is saved, what a resumed run computes, and settings that only a GPU has."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.jobs import (
    make_images,
    records,
    require_equal_checkpoints,
    run,
    summary,
    train,
    watched,
)
from benchmarks.gpu.stage import Context, NotHere

_LOG = ["--log-every=1", "--save-every=100000"]


def _folder_of_images(context: Context, *, size: int = 64) -> list[str]:
    """Options for real images, which workers decode and the side stream prepares."""
    images = make_images(context, context.size(512, 128))
    source = ["--dataset=image-folder", f"--data-dir={images}", f"--image-size={size}"]
    return [*source, "--num-workers=2", f"--batch-size={context.size(32, 8)}"]


def resume(context: Context) -> None:
    """A stopped and resumed run equals one without a stop, bit by bit; so does each save within a run.

    The first run saves at every step while it trains on. Its checkpoint of step 4 equals that of a run
    that stops there, so no later step has changed what was being copied.
    """
    arch = context.size(50, 18)
    steps = ["--epochs=1", "--steps-per-epoch=8", "--log-every=1", "--keep=100"]
    options = [*_folder_of_images(context), f"--arch=resnet{arch}", "--deterministic", *steps]
    straight, stopped = context.folder / "straight", context.folder / "stopped"
    run(context, train(1, straight, *options, "--save-every=1"))
    run(context, train(1, stopped, *options, "--stop-at-step=4"), codes=(75,))
    require_equal_checkpoints(context, straight, stopped, 4)
    run(context, train(1, stopped, *options))
    require_equal_checkpoints(context, straight, stopped, 8)


def two_ranks(context: Context) -> None:
    """The same over NCCL with two ranks: gathers, broadcasts and scatters of states, and DDP's sums."""
    steps = ["--epochs=1", "--steps-per-epoch=6", *_LOG]
    options = [*_folder_of_images(context), "--arch=resnet18", "--deterministic", *steps]
    straight, stopped = context.folder / "straight", context.folder / "stopped"
    run(context, train(2, straight, *options))
    run(context, train(2, stopped, *options, "--stop-at-step=3"), codes=(75,))
    run(context, train(2, stopped, *options))
    require_equal_checkpoints(context, straight, stopped, 6)


def fp16(context: Context) -> None:
    """A run in fp16 resumes with its gradient scale."""
    steps = ["--epochs=1", "--steps-per-epoch=8", *_LOG]
    options = ["--use-syn", "--arch=resnet20", "--batch-size=16", "--amp=fp16", "--deterministic"]
    straight, stopped = context.folder / "straight", context.folder / "stopped"
    run(context, train(1, straight, *options, *steps))
    run(context, train(1, stopped, *options, *steps, "--stop-at-step=4"), codes=(75,))
    run(context, train(1, stopped, *options, *steps))
    require_equal_checkpoints(context, straight, stopped, 8)


def sync_bn(context: Context) -> None:
    """Two ranks with SyncBatchNorm compute the losses of one rank with the same global batch."""
    if context.is_tiny:
        options = [
            "--use-syn",
            "--arch=resnet20",
            "--batch-size=8",
            "--epochs=1",
            "--steps-per-epoch=2",
        ]
        run(context, train(2, context.folder / "two", *options, "--sync-bn"))
        raise NotHere("torch's SyncBatchNorm needs a GPU")
    source = [word for word in _folder_of_images(context) if not word.startswith("--batch-size")]
    options = [*source, "--global-batch-size=16", "--arch=resnet18", "--amp=off"]
    options += ["--epochs=1", "--steps-per-epoch=5", "--lr=0.05", *_LOG]
    precise = {"NVIDIA_TF32_OVERRIDE": "0"}  # TF32 would hide the statistics of half a batch
    losses = {}
    for name, ranks, extra in (
        ("one rank", 1, []),
        ("two ranks, --sync-bn", 2, ["--sync-bn"]),
        ("two ranks", 2, []),
    ):
        out = context.folder / name.replace(" ", "-")
        run(context, train(ranks, out, *options, *extra), env=precise)
        losses[name] = _losses(out)
    context.figure(losses=losses)
    # In the first step the weights are equal, so only the statistics of BatchNorm differ.
    expected = losses["one rank"][:1]
    error = _distance(losses["two ranks, --sync-bn"][:1], expected)
    without = _distance(losses["two ranks"][:1], expected)
    context.figure(error=error, error_without=without)
    context.require(
        error < without / 10,
        f"the first loss differs by {error:.1e} from that of one rank, without --sync-bn by {without:.1e}",
    )


def _losses(out: Path) -> list[float]:
    return [record["train_loss"] for record in records(out) if "train_loss" in record]


def _distance(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two series of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def graphs(context: Context) -> None:
    """--compile reduce-overhead captures CUDA graphs: its losses are those without it, also accumulated."""
    steps = context.size(30, 2)
    options = ["--use-syn", "--arch=resnet20", f"--batch-size={context.size(128, 4)}"]
    options += ["--epochs=1", f"--steps-per-epoch={steps}", "--amp=off", "--lr=0.02", *_LOG]
    passes = ["--grad-accum-steps=2"]
    variants = {"one pass": [], "two passes": passes}
    for name, extra in variants.items():
        losses = {}
        for mode in ("off", "reduce-overhead"):
            compiled = [] if mode == "off" else [f"--compile={mode}"]
            out = context.folder / f"{name.replace(' ', '-')}-{mode}"
            ended = watched(context, "train", f"--out={out}", *options, *extra, *compiled)
            losses[mode] = _losses(out)
            context.figure(**{f"{name}, {mode}, images/s": summary(out)["images_per_s"]})
        # torch silently runs without graphs where it cannot capture them.
        replays = ended.results[0]["graph_replays"]
        context.figure(**{f"{name}, replays of a graph": replays})
        context.require(
            context.is_tiny or replays >= steps, f"{name}: {replays} replays in {steps} steps"
        )
        error = _distance(losses["reduce-overhead"], losses["off"])
        context.figure(**{f"{name}, largest difference of a loss": error})
        context.require(error < 0.03, f"{name}: the losses differ by {error:.1%}")
        if context.is_tiny:
            return


def layout(context: Context) -> None:
    """A run resumes in channels_last from a checkpoint in NCHW, with its momentum in the new layout."""
    options = ["--use-syn", "--arch=resnet18", f"--batch-size={context.size(64, 4)}", "--amp=off"]
    options += ["--epochs=1", "--steps-per-epoch=6", "--lr=0.02", *_LOG]
    nchw, mixed = context.folder / "nchw", context.folder / "mixed"
    run(context, train(1, nchw, *options, "--no-channels-last"))
    stops = ["--no-channels-last", "--stop-at-step=3"]
    run(context, train(1, mixed, *options, *stops), codes=(75,))
    ended = watched(context, "train", f"--out={mixed}", *options)
    [found] = ended.results
    error = _distance(_losses(mixed), _losses(nchw))
    context.figure(**found, largest_difference_of_a_loss=error)
    context.require(found["steps"] == 3, f"{found['steps']} steps after the resume instead of 3")
    context.require(
        not found["wrong_layouts"], f"{found['wrong_layouts']} momenta have another layout"
    )
    context.require(error < 0.02, f"the losses differ by {error:.1%}")
