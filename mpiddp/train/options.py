"""`mpiddp train`: its options, one a line. `mpiddp train --help` prints them.

This module does not import torch, so --help and option errors appear at once. `mpiddp.train.config` fills in
the defaults that depend on the machines, and `mpiddp.train.run` trains.
Underscores work too: --use_syn is --use-syn.
"""

from __future__ import annotations

import argparse
import difflib
import re
from argparse import ArgumentTypeError, Namespace
from typing import Any, NoReturn

import mpiddp
from mpiddp.errors import UserError

ARCHS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnet20", "resnet32", "resnet44", "resnet56", "resnet110", "wide_resnet14_2"),
)
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")  # torch.compile's own
SCHEDULES = ("one-cycle", "cosine", "step", "constant")
SINKS = ("tensorboard", "wandb", "mlflow", "trackio")

# The length of a run, its files and its checks, which a benchmark of single steps does not have.
OF_RUN = (
    *("epochs", "steps_per_epoch", "resume", "save_every", "keep", "log_to", "per_rank_log"),
    *("stop_at_step", "check_determinism", "check_divergence"),
)


class _Parser(argparse.ArgumentParser):
    """Raises its errors as UserError. Of the ranks of a job, only rank 0 prints the help."""

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (--[^\s=]+).*", message, re.DOTALL)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions) if unknown else []
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise UserError(f"{self.prog}: {message}.{hint} See: {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        if mpiddp.World.from_env().rank == 0:
            super().print_help(file)


def count(low: int, metavar: str = "N") -> dict[str, Any]:
    """The keywords of an option that takes a whole number from `low` on."""

    def whole(text: str) -> int:
        if not re.fullmatch("[0-9]{1,12}", text, re.ASCII) or int(text) < low:
            raise ArgumentTypeError(f"expected a whole number, {low} or more, not {text[:80]!r}")
        return int(text)

    return {"type": whole, "metavar": metavar}


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 1e-12 <= value < float("inf"):
        raise ArgumentTypeError(f"expected a number of at least 1e-12, not {text[:80]!r}")
    return value


def fraction(text: str) -> float:
    """A number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1:
        raise ArgumentTypeError(f"expected a number from 0 to below 1, not {text[:80]!r}")
    return value


def interval(text: str) -> str:
    """20 (steps), 30s, 10m or 1.5h: `mpiddp.Checkpoints` takes the text."""
    if not re.fullmatch(r"0*[1-9]\d{0,8}|(?=[0.]*[1-9])\d{1,6}(\.\d+)?[smh]", text, re.ASCII):
        raise ArgumentTypeError(
            f"expected steps, or a time such as 30s, 10m or 1h, not {text[:80]!r}"
        )
    return text


def path(text: str) -> str:
    """A path as written. An empty one usually comes from a shell variable that is not set."""
    if not text:
        raise ArgumentTypeError("expected a path, not an empty string")
    return text


def tools(text: str) -> str:
    """Names of SINKS, separated by commas."""
    given = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in given if name not in SINKS]:
        raise ArgumentTypeError(f"expected some of {', '.join(SINKS)}, not {unknown[0][:80]!r}")
    return ",".join(given)


def option_parser() -> argparse.ArgumentParser:
    """The parser of every option, with dashes."""
    parser = _Parser(
        prog="mpiddp train",
        usage="%(prog)s [options]\n\n"
        "  mpiddp launch -n 2 -m mpiddp train --epochs 2 --out runs/a\n"
        "  mpiddp train --use-syn --arch resnet20 --steps-per-epoch 10",
        description="Train a ResNet, as one rank of a job or alone.",
        allow_abbrev=False,
    )
    # fmt: off
    add = parser.add_argument_group("model").add_argument
    add("--arch", choices=ARCHS, metavar="ARCH", help=f"{', '.join(ARCHS)} (default: by the device)")
    add("--stem", choices=("auto", "imagenet", "cifar", "half"), default="auto", help="of the model")
    add("--weights", type=path, metavar="PATH", help="a torchvision state_dict, or a run, to start from")
    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=("cifar10", "image-folder"), default="cifar10", help="(default: cifar10)")
    add("--data-dir", type=path, metavar="DIR", help="(default: $MPIDDP_DATA, else ~/.cache/mpiddp)")
    add("--use-syn", action="store_true", help="random images and labels in the data set's shape")
    add("--image-size", **count(1), help="pixels of an image folder's images (default: 224)")
    add("--num-workers", **count(0), help="processes that decode, per rank (default: a rank's cores)")
    add("--skip-bad-images", action="store_true", help="go on without images that cannot be read")
    add("--batch-size", **count(1), help="images per rank and pass (default: 64 on CPUs, 256 on GPUs)")
    add("--global-batch-size", **count(1), help="images per step over all ranks; or --batch-size")
    add("--grad-accum-steps", **count(1), default=1, help="backward passes per step (default: 1)")
    add = parser.add_argument_group("schedule").add_argument
    add("--epochs", **count(1), help="(default: 7 on CPUs, 30 on GPUs)")
    add("--steps-per-epoch", **count(1), help="end every epoch after this many steps")
    add("--low-res-epochs", **count(0), help="on 3/4 of the pixels (default: half of them on CPUs)")
    add("--lr", type=positive, default=0.4, help="peak for 256 images; scales with the batch")
    add("--schedule", choices=SCHEDULES, default="one-cycle", help="learning rate (default: one-cycle)")
    add("--optimizer", choices=("sgd", "muon"), help="(default: muon for wide_resnet14_2 on CPUs, else sgd)")
    add("--momentum", type=fraction, default=0.9, help="Nesterov's (default: 0.9)")
    add("--weight-decay", type=fraction, help="(default: 5e-4 for cifar10, 1e-4 for image folders)")
    add("--label-smoothing", type=fraction, default=0.0, help="of the training loss (default: 0)")
    add("--zero-init", action="store_true", help="each block of the model begins as its shortcut")
    add("--clip-grad-norm", type=positive, metavar="NORM", help="limit of the gradients' norm")
    add("--ema-decay", type=fraction, help="average the weights, and score the average, as torchvision")
    add("--ema-steps", **count(1), default=32, help="between two updates of the average (default: 32)")
    add = parser.add_argument_group("engine").add_argument
    add("--backend", choices=("nccl", "gloo"), help="(default: nccl with a GPU, else gloo)")
    add("--amp", choices=("auto", "bf16", "fp16", "off"), default="auto", help="dtype")
    add("--parallel", choices=("ddp", "fsdp", "hsdp"), default="ddp", help="copies or shards")
    add("--sync-bn", action="store_true", help="BatchNorm statistics over all ranks")
    modes = ("auto", "off", *COMPILE_MODES)
    add("--compile", nargs="?", const="default", default="auto", choices=modes, help="(default: auto)")
    add("--grad-compression", choices=("off", "bf16"), default="off", help="of the all-reduce")
    add("--seed", **count(0), default=0, help="of weights, order and augmentation (default: 0)")
    add("--deterministic", action="store_true", help="deterministic kernels, on GPUs too")
    add = parser.add_argument_group("run").add_argument
    add("--out", type=path, metavar="DIR", help="folder of the run (default: runs/<time>-<arch>)")
    add("--resume", type=path, default="auto", metavar="auto|never|PATH", help="(default: auto)")
    add("--save-every", type=interval, metavar="STEPS|TIME", help="20, 30s or 10m (default: per epoch)")
    add("--keep", **count(2), default=2, help="checkpoints to keep (default: 2)")
    add("--log-every", **count(1, "STEPS"), default=50, help="(default: 50)")
    add("--log-to", type=tools, metavar="TOOLS", help=f"also show the run in {', '.join(SINKS)}")
    add("--per-rank-log", action="store_true", help="print the lines of mpirun tutorials, on every rank")
    add("--stop-at-step", **count(1, "STEP"), help="save after this step and exit with code 75")
    add = parser.add_argument_group("checks").add_argument
    add("--check-determinism", nargs="?", const=10, **count(1), help="compare two runs of 10 steps, or N")
    add("--check-divergence", **count(1, "STEPS"), help="compare the ranks so often")
    # fmt: on
    # torch.distributed.launch passes it to every script. The value comes from the environment.
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def parse(argv: list[str]) -> Namespace:
    """The options as written; None where the user has set none. Raises UserError."""
    # --use_syn=1 becomes --use-syn=1; the value keeps its underscores.
    dashed = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), each) for each in argv]
    options = option_parser().parse_args(dashed)
    del options.local_rank
    _refuse_contradictions(options)
    return options


def _refuse_contradictions(options: Namespace) -> None:
    sharded, is_sharded = f"--parallel {options.parallel}", options.parallel != "ddp"
    goes_back = options.resume not in ("auto", "never")
    for one, other, are_given in (
        ("--batch-size", "--global-batch-size", options.batch_size and options.global_batch_size),
        ("--check-determinism", "--resume PATH", options.check_determinism and goes_back),
        ("--compile", sharded, is_sharded and options.compile not in ("auto", "off")),
        ("--grad-compression", sharded, is_sharded and options.grad_compression != "off"),
        ("--optimizer muon", sharded, is_sharded and options.optimizer == "muon"),
        ("--sync-bn", sharded, is_sharded and options.sync_bn),
        ("--check-divergence", sharded, options.parallel == "fsdp" and options.check_divergence),
    ):
        if are_given:
            raise UserError(f"{one} and {other} are mutually exclusive. Leave one out.")
    if options.image_size and options.dataset != "image-folder":
        raise UserError("--image-size applies to image folders only. Leave it out.")


def main(argv: list[str]) -> int:
    """Train, and return the exit code. With bad input all ranks exit, and rank 0 prints the sentence."""
    try:
        options = parse(argv)
    except UserError as error:
        if mpiddp.World.from_env().world_size == 1:
            raise
        with mpiddp.process_group(backend="gloo"), mpiddp.together():
            raise error from None
    from mpiddp.train.run import run  # only now: it imports torch

    return run(options)
