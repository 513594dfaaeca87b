"""The text of the training: characters as numbers, a part for validation, windows of each step, documents.

The default text ships with Python: `pydoc_data.topics`, the pages of `help("LISTS")` and its like. It has
some 465,000 characters, and differs a little between versions of Python.
"""

from __future__ import annotations

import errno
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import mpiddp

VALIDATION = 0.1  # the last part of the text
SHIPPED = "pydoc_data.topics"


@dataclass(frozen=True)
class Text:
    """A text as numbers. A character's number is its place in `characters`, which are sorted.

    `train` and `validation` are parts of the text in its order, int64 [N] and [M].
    """

    name: str
    digest: str  # SHA-256 of the text
    characters: str
    train: Tensor
    validation: Tensor

    def encode(self, text: str) -> Tensor:
        """The numbers of these characters [len(text)]. Raises KeyError for one that the text lacks."""
        numbers = {character: number for number, character in enumerate(self.characters)}
        return torch.tensor([numbers[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[number] for number in tokens.tolist())


def load_text(file: str | None, context: int) -> Text:
    """The text of a file, or by default the one that ships with Python.

    Raises:
        UserError: no such file; not UTF-8; too short for one window of `context` in each part.
    """
    text = "\n".join(entries()) if file is None else _read(Path(file))
    name = SHIPPED if file is None else file
    held_out = int(VALIDATION * len(text))
    if held_out <= context:
        needed = math.ceil((context + 1) / VALIDATION)
        raise mpiddp.UserError(
            f"--text {name} has {len(text):,} characters. With --context {context} a training needs "
            f"{needed:,}, the last tenth of them for validation. Name a longer text."
        )
    # Sorted distinct characters, and each character's place among them, without a loop in Python.
    codes = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    distinct, tokens = codes.unique(return_inverse=True)
    return Text(
        name=name,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        characters="".join(map(chr, distinct.tolist())),
        train=tokens[:-held_out],
        validation=tokens[-held_out:],
    )


def _read(path: Path) -> str:
    try:
        if not path.is_file():  # a pipe or /dev/zero may never end
            found = "is not a file" if path.exists() else "does not exist"
            raise mpiddp.UserError(f"--text {path} {found}. Name a file of text in UTF-8.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise mpiddp.UserError(
            f"--text {path} is not UTF-8 at byte {error.start:,}. Convert it, for example with iconv."
        ) from None
    except OSError as error:
        kind = mpiddp.JobFailed if error.errno == errno.EIO else mpiddp.UserError
        raise kind(f"--text {path}: {error.strerror}.") from None


def entries() -> list[str]:
    """The pages of Python's help, one text for each topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise mpiddp.UserError(
            f"this Python comes without {SHIPPED}. Name a text of your own: --text FILE"
        ) from None
    return list(topics.values())


def paragraphs(texts: Sequence[str]) -> list[str]:
    """The parts between blank lines, without those of a single character, which have no next one."""
    parts = (part for text in texts for part in text.split("\n\n"))
    return [part for part in parts if len(part.strip()) > 1]


def require_same_text(text: Text) -> None:
    """Raise UserError on all ranks unless all have read the same text. A collective.

    Hosts with unequal versions of Python, or unequal files, would train different models as one.
    """
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, text.digest)
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise mpiddp.UserError(
            f"{text.name} on rank {different[0]} differs from that on rank 0. "
            "Name a file that is the same on all hosts: --text FILE"
        )


def batch_of_step(
    tokens: Tensor, step: int, size: int, context: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The windows of a step over all ranks: inputs and the characters that follow, both [size, context].

    They depend on the step and the seed only. So a run resumes with its step as the only state, and has the
    same batches at any number of ranks.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - context, (size,), generator=generator)
    return windows(tokens, starts, context)


def windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """The inputs and the targets of the windows that begin at `starts` [B]: two tensors [B, context]."""
    rows = tokens[starts[:, None] + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]
