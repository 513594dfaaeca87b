"""Folders of runs as `mpiddp train` writes them, without a training: for the tests of `mpiddp runs`."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

BEGAN = 1_700_000_000.0


def write_run(
    folder: Path,
    *,
    steps: int = 100,
    every: int = 1,
    restarts_at: Sequence[int] = (),
    saves: Sequence[int] = (50, 100),
    num_ranks: int = 2,
    failures: dict[int, str] | None = None,
    ends: bool = True,
) -> Path:
    """Write the folder of a run whose steps take a second each, with an hour between its starts.

    Args:
        restarts_at: the steps of the saves that later starts resumed from, 10 s after each save.
        failures: the exceptions with which these ranks ended, in this order, a second apart. The first
            start ends so too, if there are several.
        ends: whether it came to its summary.
    """
    failures = failures or {}
    (folder / "checkpoints").mkdir(parents=True)
    starts = [BEGAN + 3600 * number for number in range(len(restarts_at) + 1)]
    ended = [begun + 10 + step for begun, step in zip(starts, restarts_at, strict=False)]
    for step in saves:
        save = folder / "checkpoints" / f"step_{step:08d}"
        save.mkdir()
        earlier = sum(step > restart for restart in restarts_at)
        os.utime(save, times=(starts[earlier] + step,) * 2)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(every, steps + 1, every):
            record = {
                "step": step,
                "epoch": 0,
                "lr": 0.1 * (1 - step / steps),
                "train_loss": 2.3 * math.exp(-3 * step / steps) + 0.1 * math.sin(step),
                "images_per_s": 1000 + 50 * math.sin(step / 7),
                "step_time_s": 0.02,
            }
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps({"step": steps, "epoch": 0, "test_accuracy": 0.91}) + "\n")
    hosts = [f"gpu{rank // 2:03d}" for rank in range(num_ranks)]
    with (folder / "attempts.jsonl").open("w") as file:
        for number, begun in enumerate(starts):
            step = [0, *restarts_at][number]
            about = {"event": "started", "at": begun, "step": step, "hosts": hosts}
            file.write(json.dumps({**about, "versions": "python 3.11.7, torch 2.13.0"}) + "\n")
            is_last = number == len(starts) - 1
            at = begun + steps if is_last else ended[number]
            if is_last and ends:
                end = {"event": "ended", "at": at, "rank": 0, "outcome": "done"}
                file.write(json.dumps(end) + "\n")
                continue
            for late, (rank, failure) in enumerate(failures.items()):
                end = {"event": "ended", "at": at + late, "rank": rank, "host": hosts[rank]}
                end |= {"outcome": "failed", "failure": failure}
                file.write(json.dumps(end) + "\n")
    (folder / "config.json").write_text(json.dumps({"arch": "resnet20", "lr": 0.4}))
    if ends:
        summary = {"dataset": "cifar10", "arch": "resnet20", "test_accuracy": 0.91}
        summary |= {"images_per_s": 1000.0, "wall_s": 100.0}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
