"""No image is lost or seen twice within an epoch, over kills and at any number of ranks.

Tests mpiddp/train/sharding.py, mpiddp/train/resume.py.
python -m pytest tests/test_exactly_once.py
"""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.recorded_training import NUM_IMAGES
from tests.ranks import mpirun

GLOBAL_BATCH = 12
EPOCH = -(-NUM_IMAGES // GLOBAL_BATCH)  # steps; the last one is a tail
OPTIONS = [
    "--arch=resnet20", "--epochs=2", "--keep-tail", f"--global-batch-size={GLOBAL_BATCH}",
    "--amp=off", "--save-every=2", "--log-every=1000",
]  # fmt: skip


def notes_of(turn: Path) -> tuple[int, list[list[dict[str, Any]]]]:
    """The step at which a turn started, and by rank what it was given: one note a batch."""
    files = [path.read_text().splitlines() for path in sorted(turn.glob("rank_*.jsonl"))]
    notes = [[json.loads(line) for line in lines] for lines in files]
    (start,) = {rank[0]["start"] for rank in notes}
    assert len(notes) == notes[0][0]["ranks"]
    return start, [rank[1:] for rank in notes]


def seen(turns: list[Path]) -> tuple[dict[int, list[int]], int]:
    """By epoch the images of every step that the final weights hold; and how many more were given.

    The steps of a turn beyond the checkpoint that the next one starts from are lost with their weights.
    """
    found = [notes_of(turn) for turn in turns]
    ends = [start for start, _ in found[1:]] + [2 * EPOCH]
    images: dict[int, list[int]] = defaultdict(list)
    lost = 0
    for (start, ranks), end in zip(found, ends, strict=True):
        for rank in ranks:
            for epoch, batches in itertools.groupby(rank, key=lambda note: int(note["epoch"])):
                for step, note in enumerate(batches, max(start, epoch * EPOCH)):
                    if step < end:
                        images[epoch] += note["images"]
                    else:
                        lost += len(note["images"])
    return images, lost


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 1)], ids=["same size", "other sizes"])
def test_each_image_once_an_epoch(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    draw = random.Random(str(sizes))
    turns = [tmp_path / f"turn_{number}" for number in range(len(sizes))]
    die_at = [draw.randint(3, EPOCH - 1), draw.randint(EPOCH + 1, 2 * EPOCH - 1), -1]
    for turn, ranks, step in zip(turns, sizes, die_at, strict=True):
        turn.mkdir()
        job = mpirun(
            ranks, "-m", "tests.jobs.recorded_training", str(turn), str(step), *OPTIONS,
            "--out", str(tmp_path / "out"),
        )  # fmt: skip
        assert (job.returncode == 0) == (step < 0), job.stderr
    images, lost = seen(turns)
    assert images.keys() == {0, 1}
    for epoch in images.values():
        assert sorted(epoch) == list(range(NUM_IMAGES))
    assert lost > 0, "no kill took a step with it: the test could not have failed"
