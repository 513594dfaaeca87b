"""A training that saves at every step, and whose ranks are killed again and again at a random moment.

    python tests/programs/killed_saves.py FOLDER KILLS whole      # one rank
    python tests/programs/killed_saves.py FOLDER KILLS sharded    # two ranks with half of each tensor

After each kill the next attempt must resume a checkpoint whose tensors are all of its step, and whose step
is that of the save under way at the kill, or one beside it. The ranks are forked, because importing torch
takes seconds.
"""

import os
import random
import signal
import sys
import time
import traceback
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mpiddp
from tests.support import forked
from tests.support.machine import reserved

IMPORTED = (DefaultLoadPlanner, DefaultSavePlanner)  # here, not in every child
SIZE = 300


def save_forever(folder: Path, rank: int, ranks: int, port: int, steps: int) -> None:
    """Report the step that this rank resumes, then each step whose save it has begun, into `steps`."""
    if ranks > 1:
        os.environ |= forked.variables(["localhost"] * ranks, "127.0.0.1", port)[rank]
    checkpoints = mpiddp.Checkpoints(folder, keep=2, every=None)
    if ranks > 1:
        dist.init_process_group("gloo")
    saved = checkpoints.resume()
    weight = torch.zeros(SIZE, SIZE)
    if ranks > 1:
        weight = distribute_tensor(weight, init_device_mesh("cpu", (ranks,)), [Shard(0)])
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight)
    if saved is not None:
        saved.load_into(model=module)
        own = module.weight.to_local() if ranks > 1 else module.weight
        assert bool((own == saved.step).all()), f"rank {rank}: another step's weights"
        assert saved.state["step"] == saved.step
    first = saved.step if saved else 0
    os.write(steps, first.to_bytes(8, "little"))
    for step in count(first + 1):
        with torch.no_grad():
            module.weight.fill_(step)
        checkpoints.save(step, {"model": module.state_dict(), "step": step})
        os.write(steps, step.to_bytes(8, "little"))


def run_until_killed(folder: Path, ranks: int, draw: random.Random) -> tuple[int, int]:
    """The step that an attempt resumed, and the last one whose save rank 0 began before the kill."""
    reservation = reserved("127.0.0.1")
    port = reservation.getsockname()[1]
    read_end, write_end = os.pipe()
    elsewhere = os.open(os.devnull, os.O_WRONLY)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                save_forever(folder, rank, ranks, port, elsewhere if rank else write_end)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    os.close(write_end)
    os.close(elsewhere)
    with os.fdopen(read_end, "rb") as steps:
        begun = [steps.read(8) for _ in range(4)]
        time.sleep(draw.uniform(0, 0.05))
        for child in draw.sample(children, ranks):  # one first, the other a moment later
            os.kill(child, signal.SIGKILL)
            time.sleep(draw.choice((0, 0.01)))
        assert all(begun), "the ranks have ended"
        rest = steps.read()
    for child in children:
        os.waitpid(child, 0)
    reservation.close()
    first, last = begun[0], rest[-8:] or begun[-1]
    return int.from_bytes(first, "little"), int.from_bytes(last, "little")


def main(folder: Path, kills: int, form: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # a forked rank does not have the threads of OpenMP
    draw = random.Random(kills)
    last = torn = 0
    for number in range(kills):
        first, now = run_until_killed(folder, 2 if form == "sharded" else 1, draw)
        assert number == 0 or last - 1 <= first <= last + 1, f"killed at {last}, resumed {first}"
        last = now
        names = [path.name for path in (folder / "checkpoints").iterdir()]
        torn += any(not name.startswith("step_") for name in names)
    print(f"{kills} kills, {torn} in the middle of a save, step {last}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
