"""Log a record for each step, and save once: records.py FOLDER FIRST LAST saves after step FIRST + 1."""

import sys

import torch

import mpiddp

folder, first, last = sys.argv[1], *map(int, sys.argv[2:])
checkpoints = mpiddp.Checkpoints(folder)
saved = checkpoints.resume()
for step in range(saved.step + 1 if saved else 1, last + 1):
    values = {"loss": torch.tensor(0.5), "lr": 0.1, "best": float("nan"), "name": "a"}
    mpiddp.log_metrics(step, first=first, **values)
    if step in (first + 1, last):
        checkpoints.save(step, {})
