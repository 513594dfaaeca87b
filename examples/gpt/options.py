"""The options that train.py and sharded.py share. A wrong one is one sentence and exit code 2."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from data import SHIPPED
from model import Shape

import mpiddp


class Parser(argparse.ArgumentParser):
    """Raises its errors. Every rank parses, and argparse would print each error once for each rank."""

    def error(self, message: str) -> NoReturn:
        raise mpiddp.UserError(f"{self.prog}: {message}. See: {self.prog} --help")


def parser(description: str, *, steps: int) -> Parser:
    """A parser with the options of the text, the model and the steps."""
    made = Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add("--text", metavar="FILE", help=f"text in UTF-8; without it {SHIPPED}, which has Python")
    add("--steps", type=whole(1), default=steps, metavar="N", help="steps of the training")
    add(
        "--batch-size",
        type=whole(1),
        default=16,
        metavar="N",
        help="windows of a step over all ranks",
    )
    add("--context", type=whole(1), default=128, metavar="N", help="characters of a window")
    add("--layers", type=whole(1), default=3, metavar="N", help="blocks")
    add("--width", type=whole(2), default=128, metavar="N", help="numbers for each character")
    add("--heads", type=whole(1), default=4, metavar="N", help="attention heads of a block")
    add("--lr", type=positive, default=4e-3, metavar="X", help="highest learning rate of AdamW")
    add("--seed", type=whole(0), default=0, metavar="N", help="of the weights and the batches")
    # torch.distributed.launch adds this option.
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    return made


def whole(low: int) -> Callable[[str], int]:
    """A parser for whole numbers from `low` up, below a billion."""

    def whole_number(text: str) -> int:
        is_whole = text.isascii() and text.isdigit() and len(text) < 10
        if not is_whole or int(text) < low:
            raise argparse.ArgumentTypeError(
                f"expected a whole number, {low} or more, not {text[:60]!r}"
            )
        return int(text)

    return whole_number


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text[:60]!r}")
    return number


def shape_of(values: argparse.Namespace, vocabulary: int) -> Shape:
    """The model's sizes. Raises UserError if the width cannot be divided among the heads."""
    unit = 2 * values.heads
    if values.width % unit:
        raise mpiddp.UserError(
            f"--width {values.width} is not a multiple of 2 × --heads {values.heads}: every head takes an "
            f"even part of it. Example: --width {unit * math.ceil(values.width / unit)}"
        )
    return Shape(vocabulary, values.layers, values.width, values.heads)


def require_divisible(batch_size: int, ranks: int, what: str) -> None:
    """Raise UserError unless the windows of a step can be divided evenly."""
    if batch_size % ranks:
        below = batch_size // ranks * ranks
        fits = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise mpiddp.UserError(
            f"--batch-size {batch_size} cannot be divided by {ranks} {what}. Use {fits}."
        )
