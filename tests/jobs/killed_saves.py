"""A training of one rank that saves at every step, killed again and again at a random instant.

    python -m tests.jobs.killed_saves ROOT KILLS

Each time what is left in ROOT must be valid and no older than one step before the save that was under
way; then another one goes on from there. Children are forked, for torch takes seconds to import.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from mpiddp.checkpoints import directory
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.train.checkpoint import Progress
from mpiddp.train.saver import Saver
from mpiddp.world import World
from tests.training import configured


def save_for_ever(root: Path, start: int, told: int) -> None:
    """Begin a save at each step after `start`, and write the step into the pipe `told` then."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    coordinator = Coordinator(World(0, 1, 0, 1), store)
    coordinator.hostnames = ("here",)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    saver = Saver(root, [0], coordinator, model, optimizer, scaler, configured(), "no data")
    for step in count(start + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        saver.save(Progress(step))
        os.write(told, step.to_bytes(8, "little"))


def main(root: Path, kills: int) -> None:
    torch.optim.SGD([torch.zeros(1)])  # what it imports, no child has to
    draw = random.Random(kills)
    step = 0
    in_mid_write = 0
    for number in range(kills):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            save_for_ever(root, step, write_end)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as told:
            begun = [told.read(8) for _ in range(3)]
            time.sleep(draw.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            rest = told.read()
        last = int.from_bytes(rest[-8:] or begun[-1], "little")
        in_mid_write += any(root.glob(".unfinished-*"))

        newest, broken = directory.survey(root)
        assert newest is not None, f"kill {number}: no valid checkpoint"
        assert broken == [], f"kill {number}: {broken}"
        found = directory.step_of(newest)
        assert last - 1 <= found <= last + 1, f"kill {number} at step {last} left step {found}"
        weights = torch.load(newest / "model.pt")
        assert bool((weights["0.weight"] == found).all()), f"kill {number}: another step's weights"
        step = found
    print(f"{kills} kills, {in_mid_write} in mid-write, step {step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
