"""Batches of documents of uneven length: padded, bucketed by length, or packed.

    for step in packed(lengths, rows=4, ranks=2, width=512, seed=0):
        batch = collate(documents, step[rank])
        loss = summed_loss(net(batch.tokens, batch.mask), batch.targets) / count_targets(documents, step)

A plan is a list of steps; a step has a list of rows for each rank; a row is a list of documents, by their
numbers. Every document is in a plan once. Plans depend on the lengths and the seed only, so every rank
knows what the others have, and how many targets a step has over all ranks, without a message.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -1  # the target of a position that counts for no loss, as in model.py
Row = list[int]  # documents
Step = list[list[Row]]  # the rows of each rank


@dataclass(frozen=True)
class Batch:
    """The rows of one rank in one step: B rows of T positions.

    A target is the character after a position, within the same document. The last character of a document
    is no input, so a document of N characters has N - 1 positions.
    """

    tokens: Tensor  # int64 [B, T]; 0 in padding
    targets: Tensor  # int64 [B, T]; IGNORED in padding
    documents: Tensor  # int64 [B, T]: the document of each position; IGNORED in padding
    mask: Tensor | None  # bool [B, 1, T, T]: what each position may see; None for all before it


def padded(lengths: Sequence[int], rows: int, ranks: int, seed: int) -> list[Step]:
    """One document in each row, in random order: `rows` of each rank, as long as the longest of them."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    return _dealt([[document] for document in order], rows, ranks)


def bucketed(lengths: Sequence[int], rows: int, ranks: int, seed: int) -> list[Step]:
    """As `padded`, but the documents of a step are of similar length. The steps come in random order."""
    shuffled = random.Random(seed)
    order = list(range(len(lengths)))
    shuffled.shuffle(order)  # documents of equal length meet others in every epoch
    order.sort(key=lambda document: lengths[document])
    steps = _dealt([[document] for document in order], rows, ranks)
    shuffled.shuffle(steps)
    return steps


def packed(lengths: Sequence[int], rows: int, ranks: int, width: int, seed: int) -> list[Step]:
    """Several documents in each row, up to `width` positions. The rows come in random order.

    Best fit, from the longest document to the shortest: each goes where it leaves the least space.

    Raises:
        ValueError: a document does not fit into a row.
    """
    if longest := max((length - 1 for length in lengths if length - 1 > width), default=0):
        raise ValueError(f"a document of {longest} positions does not fit into a row of {width}")
    filled: list[Row] = []
    space: list[tuple[int, int]] = []  # the free positions of each row, and its number; sorted
    for document in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        needed = lengths[document] - 1
        place = bisect_left(space, (needed, 0))
        if place == len(space):
            free, row = width, len(filled)
            filled.append([])
        else:
            free, row = space.pop(place)
        filled[row].append(document)
        insort(space, (free - needed, row))
    random.Random(seed).shuffle(filled)
    return _dealt(filled, rows, ranks)


def _dealt(rows: list[Row], each: int, ranks: int) -> list[Step]:
    """Deal the rows in turn: neighbours go to different ranks. In the last step a rank may have none."""
    size = each * ranks
    return [
        [rows[start + rank : start + size : ranks] for rank in range(ranks)]
        for start in range(0, len(rows), size)
    ]


def collate(documents: Sequence[Tensor], rows: Sequence[Row], width: int | None = None) -> Batch:
    """The tensors of these rows.

    Args:
        documents: int64 [length] each, 2 characters or more.
        width: the positions of every row; by default those of the longest. A rank without rows gets one of
            a single position that counts for nothing, since its backward pass must meet the others'.
    """
    used = [sum(len(documents[each]) - 1 for each in row) for row in rows]
    shape = (max(1, len(rows)), width or max(used, default=1))
    tokens, targets = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
    owners = torch.full(shape, IGNORED)
    for index, row in enumerate(rows):
        start = 0
        for number in row:
            document = documents[number]
            end = start + len(document) - 1
            tokens[index, start:end] = document[:-1]
            targets[index, start:end] = document[1:]
            owners[index, start:end] = number
            start = end
    is_packed = any(len(row) > 1 for row in rows)
    return Batch(tokens, targets, owners, block_diagonal(owners) if is_packed else None)


def block_diagonal(documents: Tensor) -> Tensor:
    """What each position may see: those of the same document up to itself. [B, T] → bool [B, 1, T, T].

    A row of one document needs no mask: its padding comes after it, and no position sees what follows.
    """
    is_same = documents[:, None, :, None] == documents[:, None, None, :]
    return is_same.tril()


def count_targets(documents: Sequence[Tensor], step: Step) -> int:
    """The targets of a step over all ranks, by which each rank divides its summed loss."""
    return sum(len(documents[each]) - 1 for rows in step for row in rows for each in row)
