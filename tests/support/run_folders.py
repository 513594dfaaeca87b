"""Folders of runs as `mpiddp train` writes them, without a training: for the tests of `mpiddp runs`."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0


def write_run(
    folder: Path,
    *,
    steps: int = 100,
    restarts_at: Sequence[int] = (),
    failures: dict[int, str] | None = None,
    ends: bool = True,
) -> Path:
    """Write the folder of a run whose steps take a second each, with an hour between its starts.

    Args:
        restarts_at: the steps of the saves from which later starts resumed. Each start before them failed
            10 s after its save.
        failures: the exceptions of these ranks, in this order, a second apart.
        ends: whether it came to its summary. Otherwise the last start failed, too.
    """
    (folder / "checkpoints" / f"step_{steps:08d}").mkdir(parents=True)
    metrics: list[dict[str, Any]] = [
        {
            "step": step,
            "train_loss": 2.3 * math.exp(-3 * step / steps) + 0.1 * math.sin(step),
            "images_per_s": 1000 + 50 * math.sin(step / 7),
        }
        for step in range(1, steps + 1)
    ]
    metrics.append({"step": steps, "test_accuracy": 0.91})
    starts: list[dict[str, Any]] = []
    for number, failed_after in enumerate((*(step + 10 for step in restarts_at), steps)):
        begun = BEGAN + 3600 * number
        starts.append({"event": "started", "at": begun})
        if ends and number == len(restarts_at):
            starts.append({"event": "ended", "at": begun + steps, "rank": 0, "outcome": "done"})
            continue
        for late, (rank, failure) in enumerate((failures or {}).items()):
            end = {"event": "ended", "at": begun + failed_after + late, "rank": rank}
            starts.append({**end, "outcome": "failed", "failure": failure})
    for name, lines in (("metrics", metrics), ("attempts", starts)):
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "config.json").write_text(json.dumps({"arch": "resnet20"}))
    if ends:
        summary = {"test_accuracy": 0.91, "images_per_s": 1000.0, "wall_s": 100.0}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
