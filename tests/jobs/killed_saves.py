"""A training of one rank that saves at every step and is killed repeatedly at a random instant.

    python -m tests.jobs.killed_saves ROOT KILLS

After each kill, the newest checkpoint in ROOT must be verified and at most one step older than the save
in progress. The next training resumes from it. Children are forked, because importing torch takes
seconds.
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

from mpiddp.checkpoints import folder as directory
from mpiddp.checkpoints.run import Run, RunDir
from mpiddp.checkpoints.save import Saver
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.world import World
from tests.support import checkpoint_folders


def save_forever(root: Path, start: int, steps: int) -> None:
    """Start a save at each step after `start`, then write the step into the pipe `steps`."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    coordinator = Coordinator(World(0, 1, 0, 1), None, hostnames=("here",))
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(RunDir(root), coordinator, None, 60.0, (0,))
    saver = Saver(run, keep=2, must_succeed=False)
    for step in count(start + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saver.meet(step)
        saver.save(step, state, {}, {})
        os.write(steps, step.to_bytes(8, "little"))


def main(root: Path, kills: int) -> None:
    torch.set_num_threads(1)  # a forked training does not have the threads of OpenMP
    torch.optim.SGD([torch.zeros(1)])  # import its modules here, not in every child
    draw = random.Random(kills)
    step = 0
    in_mid_write = 0
    for number in range(kills):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            save_forever(root, step, write_end)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as steps:
            started = [steps.read(8) for _ in range(3)]
            time.sleep(draw.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            rest = steps.read()
        last = int.from_bytes(rest[-8:] or started[-1], "little")
        in_mid_write += any((root / "checkpoints").glob(".unfinished-*"))

        newest, broken = checkpoint_folders.survey(root / "checkpoints")
        assert newest is not None, f"kill {number}: no verified checkpoint"
        assert broken == [], f"kill {number}: {broken}"
        found = directory.step_of(newest)
        assert last - 1 <= found <= last + 1, f"kill {number} at step {last} left step {found}"
        weights = torch.load(newest / "model.pt")
        assert bool((weights["0.weight"] == found).all()), f"kill {number}: another step's weights"
        step = found
    print(f"{kills} kills, {in_mid_write} in mid-write, step {step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
