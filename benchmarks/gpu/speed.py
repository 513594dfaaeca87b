"""Stages that measure. Each figure is written as soon as it is there; the variants of a ratio alternate."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from typing import Any

from benchmarks.gpu.jobs import launch, mpiddp, records, run, summary, train, watched
from benchmarks.gpu.stage import Context, NotHere
from mpiddp.bench.launch import SCRIPT
from mpiddp.bench.rounds import ratios, turns

FP32 = ("--amp=off", "--no-channels-last")
PLAIN = "fp32, NCHW"
DEFAULTS = "the defaults"
SETTINGS: dict[str, tuple[str, ...]] = {
    PLAIN: FP32,
    "fp32, channels_last": ("--amp=off",),
    "bf16, NCHW": ("--no-channels-last",),
    DEFAULTS: (),
}
COMPILED: dict[str, tuple[str, ...]] = {
    "--compile default": ("--compile=default",),
    "--compile reduce-overhead": ("--compile=reduce-overhead",),
}
AUTOTUNED: dict[str, tuple[str, ...]] = {  # alone, because it compiles for minutes
    "--compile max-autotune": ("--compile=max-autotune",),
}
TARGET_ACCURACY = 0.94
# The peak learning rate is 0.4: --lr is for 256 images and grows with the batch.
CIFAR10 = ("--arch=resnet18", "--batch-size=512", "--lr=0.2")
EPOCHS = (24, 16, 12, 10)
MORE_EPOCHS = 36
NO_SAVES = "--save-every=100000"


def resnet50(context: Context) -> None:
    """ResNet-50 with the defaults, at two batch sizes."""
    for number, batch in turns([256, 512], context.size(2, 1)):
        name = f"batch {batch}"
        speed = _images_per_s(context, f"{batch}-{number}", *_imagenet(context, batch))
        _append(context, name, speed)


def settings(context: Context) -> None:
    """ResNet-50 with each of the defaults switched off."""
    for number, name in turns(list(SETTINGS), context.size(2, 1)):
        options = [*_imagenet(context, 256, steps=60), *SETTINGS[name]]
        _append(context, name, _images_per_s(context, f"{name}-{number}", *options))


def compiled(context: Context) -> None:
    """ResNet-50 under torch.compile, each mode once. The first steps, which compile, do not count."""
    for name, options in list(COMPILED.items())[: context.size(len(COMPILED), 1)]:
        _compile(context, name, options)


def autotuned(context: Context) -> None:
    """The same with the mode that measures many kernels before it chooses one."""
    for name, options in AUTOTUNED.items():
        _compile(context, name, ("--compile=default",) if context.is_tiny else options)


def _compile(context: Context, name: str, options: tuple[str, ...]) -> None:
    settings = [*_imagenet(context, 256, steps=60), *options]
    _append(context, name, _images_per_s(context, name, *settings))


def _imagenet(context: Context, batch: int, *, steps: int = 100) -> list[str]:
    if context.is_tiny:
        small = ["--dataset=cifar10", "--arch=resnet20", "--batch-size=4", "--steps-per-epoch=2"]
        return ["--use-syn", "--epochs=1", NO_SAVES, *small]
    model = ["--dataset=image-folder", "--arch=resnet50", f"--batch-size={batch}"]
    return ["--use-syn", "--epochs=1", NO_SAVES, *model, f"--steps-per-epoch={steps}"]


def _images_per_s(context: Context, name: str, *options: str) -> float:
    out = context.folder / re.sub(r"\W+", "-", name)
    run(context, train(1, out, *options))
    speed: float = summary(out)["images_per_s"]
    return round(speed, 1)


def _append(context: Context, name: str, value: float) -> None:
    context.figure(**{name: [*context.record.figures.get(name, []), value]})


def _update_ratio(context: Context, ours: str, theirs: str) -> None:
    """Write the median ratio of the rounds that are complete, if there is one."""
    speeds = [context.record.figures.get(name, []) for name in (ours, theirs)]
    rounds = min(map(len, speeds))
    if rounds:
        ratio = statistics.median(ratios(*(each[:rounds] for each in speeds)))
        context.figure(ratio=round(ratio, 3))


def profile(context: Context) -> None:
    """The kernels of a step of ResNet-50 with the defaults, and the peak memory of the GPU."""
    span = "1:2" if context.is_tiny else "30:40"
    options = _imagenet(context, 256, steps=50)
    out = f"--out={context.folder / 'run'}"
    [found] = watched(context, "--profile", span, "train", out, *options).results
    context.figure(**found)
    context.require(bool(found.get("profile", {}).get("top")), "the profile has no kernel")


def resnet152(context: Context) -> None:
    """ResNet-152 at 32×32 with 8192 images: the defaults and the fp32 of the guides, in turn."""
    model = ["--use-syn", "--arch=resnet152", "--stem=imagenet", "--batch-size=8192"]
    model.append("--epochs=8")  # of 6 steps each
    if context.is_tiny:
        model = ["--use-syn", "--arch=resnet20", "--batch-size=8", "--epochs=1"]
        model.append("--steps-per-epoch=2")
    for number, name in turns([DEFAULTS, PLAIN], context.size(2, 1)):
        precision = FP32 if name == PLAIN else ()
        speed = _images_per_s(context, f"{name}-{number}", *model, *precision, NO_SAVES)
        _append(context, name, speed)
        _update_ratio(context, DEFAULTS, PLAIN)


def cifar10(context: Context) -> None:
    """CIFAR-10 to 94 %: ever fewer epochs, as long as they reach it; more if the first are too few."""
    for epochs in EPOCHS[: context.size(len(EPOCHS), 1)]:
        if _cifar10_accuracy(context, epochs) < TARGET_ACCURACY:
            if epochs == EPOCHS[0] and not context.is_tiny:
                _cifar10_accuracy(context, MORE_EPOCHS)
            break


def _cifar10_accuracy(context: Context, epochs: int) -> float:
    """Train with the recipe, and return the accuracy on the test images."""
    if context.data is None:
        raise NotHere("the pieces of the kit with CIFAR-10 are not unpacked")
    recipe = [*CIFAR10, f"--epochs={epochs}"]
    if context.is_tiny:
        recipe = ["--arch=resnet20", "--batch-size=32", "--steps-per-epoch=2", "--epochs=1"]
    out = context.folder / f"{epochs}-epochs"
    ended = run(context, train(1, out, f"--data-dir={context.data}", *recipe, NO_SAVES))
    found = summary(out)
    images = found["steps"] * found["global_batch_size"]
    accuracy: float = found["test_accuracy"]
    figures = {
        "test_accuracy": accuracy,
        "steps_s": round(images / found["images_per_s"], 2),
        "training_s": round(found["wall_s"], 2),  # with the evaluations
        "command_s": ended.seconds,  # from the command to its end
        "accuracies": [r["test_accuracy"] for r in records(out) if "test_accuracy" in r],
    }
    context.figure(**{f"{epochs} epochs": figures})
    return accuracy


def loader(context: Context) -> None:
    """Decoding JPEGs on all cores, beside the speed of ResNet-50."""
    sizes = ["--arch=resnet50", "--batch-size=256", "--images=2048", "--batches=24"]
    sizes += ["--workers=8,12,16", "--rounds=2"]
    if context.is_tiny:
        sizes = ["--arch=resnet20", "--batch-size=4", "--images=8", "--batches=2", "--workers=1"]
        sizes.append("--rounds=1")
    found = _bench(context, "loader", *sizes)["sources"]
    context.figure(sources=found)


def step(context: Context) -> None:
    """The runner's loop beside a bare loop, and the parts of a step."""
    sizes = ["--dataset=image-folder", "--arch=resnet50", "--batch-size=256", "--rounds=3"]
    if context.is_tiny:
        sizes = ["--arch=resnet20", "--batch-size=4", "--rounds=1", "--steps=4"]
    found = _bench(context, "step", *sizes, "--use-syn")
    context.figure(loops=found["loops"], ranks=found["ranks"])


def _bench(context: Context, name: str, *options: str) -> dict[str, Any]:
    out = context.folder / "bench"
    run(context, mpiddp("bench", name, "-H", "localhost:1", *options, f"--out={out}"))
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())["results"]
    return found


def start(context: Context) -> None:
    """From the command to the end of the first all-reduce: `mpiddp launch` and torchrun, in turn."""
    job = (SCRIPT, "gloo" if context.is_tiny else "nccl")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *job]
    commands = {"mpiddp launch": launch(1, *job), "torchrun": torchrun}
    rounds = context.size(5, 1)
    for number, name in turns(list(commands), rounds, warmup=1):
        since = time.time()
        ended = run(context, commands[name])
        [at] = re.findall(r"1 ranks at ([\d.]+)", ended.output)
        if number > 0:
            _append(context, name, round(float(at) - since, 3))
            _update_ratio(context, "mpiddp launch", "torchrun")
