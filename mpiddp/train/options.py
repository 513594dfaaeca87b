"""`mpiddp train`: its command line, made from the settings of `Config`. `mpiddp train --help` prints it.

This module does not import torch, so --help and option errors appear at once; `mpiddp.train.run` trains.
Underscores work too: --use_syn is --use-syn.
"""

from __future__ import annotations

import argparse
import difflib
import re
from argparse import Namespace
from dataclasses import fields
from typing import Any, NoReturn

import mpiddp
from mpiddp.errors import UserError
from mpiddp.train.config import GROUPS, Config


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
    group = parser.add_argument_group()
    for each in fields(Config):
        if each.name in GROUPS:
            group = parser.add_argument_group(GROUPS[each.name])
        if each.metadata:
            group.add_argument(f"--{each.name.replace('_', '-')}", **each.metadata)
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
