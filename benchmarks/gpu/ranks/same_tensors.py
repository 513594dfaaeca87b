"""Compare the tensors of two checkpoints bit by bit: `python -m benchmarks.gpu.ranks.same_tensors A B`.

Sends the number of tensors compared, and the names of those that differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpiddp.bench.result_lines import emit
from mpiddp.checkpoints.state import unpacked


def main(one: Path, other: Path) -> None:
    compared, different = 0, []
    names = sorted(path.name for path in one.glob("*.pt"))
    if names != sorted(path.name for path in other.glob("*.pt")) or not names:
        different.append(f"their files: {names} in {one.name}")
    for name in names:
        pair = [torch.load(each / name, weights_only=True) for each in (one, other)]
        if name == "ranks.pt":
            pair = [[unpacked(own) for own in ranks] for ranks in pair]
        leaves = [dict(_leaves(contents, name)) for contents in pair]
        for key in {**leaves[0], **leaves[1]}:
            if key.startswith("training.pt/options/"):  # they name the run's own folder
                continue
            compared += 1
            if not _is_same(leaves[0].get(key), leaves[1].get(key)):
                different.append(key)
    emit({"compared": compared, "different": different})


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each tensor and number within nested dicts and lists, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}/{index}")
    else:
        yield name, value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
