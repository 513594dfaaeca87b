"""A training uses each image exactly once per epoch, despite kills and with any number of ranks.

Tests mpiddp/train/order.py, mpiddp/train/resume.py.
python -m pytest tests/ranks/checkpoints/test_exactly_once.py
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
from tests.support.ranks import mpirun

GLOBAL_BATCH = 12
STEPS_PER_EPOCH = -(-NUM_IMAGES // GLOBAL_BATCH)  # the last batch is smaller
OPTIONS = [
    "--arch=resnet20", "--epochs=2", f"--global-batch-size={GLOBAL_BATCH}",
    "--amp=off", "--save-every=2", "--log-every=1000",
]  # fmt: skip


def records_of(job: Path) -> tuple[int, list[list[dict[str, Any]]]]:
    """The first step of a job, and for each rank one record per batch."""
    files = [path.read_text().splitlines() for path in sorted(job.glob("rank_*.jsonl"))]
    records = [[json.loads(line) for line in lines] for lines in files]
    (start,) = {rank[0]["start"] for rank in records}
    assert len(records) == records[0][0]["ranks"]
    return start, [rank[1:] for rank in records]


def images_by_epoch(jobs: list[Path]) -> tuple[dict[int, list[int]], int]:
    """The images of each epoch that contribute to the final weights, and the number of other images.

    The steps of a job after the checkpoint that the next job resumes are lost.
    """
    found = [records_of(job) for job in jobs]
    ends = [start for start, _ in found[1:]] + [2 * STEPS_PER_EPOCH]
    images: dict[int, list[int]] = defaultdict(list)
    lost = 0
    for (start, ranks), end in zip(found, ends, strict=True):
        for rank in ranks:
            for epoch, batches in itertools.groupby(rank, key=lambda batch: int(batch["epoch"])):
                for step, batch in enumerate(batches, max(start, epoch * STEPS_PER_EPOCH)):
                    if step < end:
                        images[epoch] += batch["images"]
                    else:
                        lost += len(batch["images"])
    return images, lost


@pytest.mark.slow
def test_each_image_is_used_once_per_epoch(tmp_path: Path) -> None:
    """Three kills. The next job has as many ranks, then more, then fewer."""
    draw = random.Random(0)
    sizes = (2, 2, 3, 1)
    jobs = [tmp_path / f"job_{number}" for number in range(len(sizes))]
    half = STEPS_PER_EPOCH // 2
    die_at = [
        draw.randint(3, half),
        draw.randint(half + 3, STEPS_PER_EPOCH - 1),
        draw.randint(STEPS_PER_EPOCH + 1, 2 * STEPS_PER_EPOCH - 1),
        -1,
    ]
    for job, ranks, step in zip(jobs, sizes, die_at, strict=True):
        job.mkdir()
        done = mpirun(
            ranks, "-m", "tests.jobs.recorded_training", str(job), str(step), *OPTIONS,
            "--out", str(tmp_path / "out"),
        )  # fmt: skip
        assert (done.returncode == 0) == (step < 0), done.stderr
    images, lost = images_by_epoch(jobs)
    assert images.keys() == {0, 1}
    for epoch in images.values():
        assert sorted(epoch) == list(range(NUM_IMAGES))
    assert lost > 0, "no kill lost a step, so the test could not have failed"
