"""The text of the training: characters as numbers, and the windows that the model reads.

The default text ships with Python: `pydoc_data.topics`, the pages of `help("LISTS")` and its like. It has
some 465,000 characters, and differs a little between versions of Python.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import mpiddp

VALIDATION = 0.1  # the last part of the text


class Text(NamedTuple):
    """A text as numbers. The number of a character is its place in `characters`, which are sorted."""

    characters: str
    train: Tensor  # int64 [characters], the first nine tenths
    validation: Tensor  # int64 [characters], the rest

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[number] for number in tokens.tolist())


def load_text(file: str | None, context: int) -> Text:
    """The text of a file, or by default the one that ships with Python.

    Raises:
        UserError: a file that cannot be read, or a text too short for one window in each part.
    """
    text = _read(file)
    held_out = int(VALIDATION * len(text))
    if held_out <= context:
        raise mpiddp.UserError(
            f"--text has {len(text):,} characters. With --context {context} a training needs "
            f"{math.ceil((context + 1) / VALIDATION):,}. Name a longer text."
        )
    # Sorted distinct characters, and each character's place among them, without a loop in Python.
    codes = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    distinct, tokens = codes.unique(return_inverse=True)
    characters = "".join(map(chr, distinct.tolist()))
    return Text(characters, tokens[:-held_out], tokens[-held_out:])


def _read(file: str | None) -> str:
    try:
        if file is not None:
            return Path(file).read_text(encoding="utf-8")
        from pydoc_data.topics import topics
    except (OSError, UnicodeDecodeError) as error:
        raise mpiddp.UserError(f"--text {file}: {error}. Name a text in UTF-8.") from None
    except ImportError:
        raise mpiddp.UserError("this Python has no pydoc_data. Name a text: --text FILE") from None
    return "\n".join(topics.values())


def windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """The windows that begin at `starts` [B], and the characters that follow: int64 [B, context] each."""
    rows = tokens[starts[:, None] + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]
