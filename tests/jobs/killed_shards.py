"""A sharded training of two ranks that saves at every step and is killed repeatedly at a random instant.

    python -m tests.jobs.killed_shards ROOT KILLS

One rank is killed first, the other a moment later. Afterwards the newest checkpoint in ROOT must be verified,
have the shards of one save, and be at most one step older than the save in progress. The next training
resumes from it. The ranks are forked, because importing torch takes seconds, and from a process without
threads, because a child may wait for ever for a lock that another thread held.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mpiddp.checkpoints import folder as directory
from mpiddp.checkpoints.contents import export
from mpiddp.checkpoints.run import Run, RunDir
from mpiddp.checkpoints.save import Saver
from mpiddp.runtime.job.connect import Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.world import World
from tests.support import checkpoint_folders
from tests.support.channels import member, serving

RANKS = 2
START_TIMEOUT_S = 150  # in which ranks save three times, or print their stacks and end
IMPORTED = (DefaultLoadPlanner, DefaultSavePlanner)  # here, not in every child


def fork(function: Callable[[], None]) -> int:
    """Run a function that does not return in a child, and return the child's id."""
    child = os.fork()
    if child == 0:
        function()
    return child


def serve(addresses: int) -> None:
    """Run torch's store and a server of the job channel, and write where they listen into a pipe."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with serving(RANKS) as server:
        os.write(addresses, json.dumps([store.port, server.address, server.key]).encode())
        while True:
            signal.pause()


def save_forever(root: Path, start: int, port: int, server: Server, rank: int, steps: int) -> None:
    """Start a save at each step after `start`, and on rank 0 then write the step into the pipe `steps`."""
    faulthandler.dump_traceback_later(START_TIMEOUT_S, exit=True)
    connection = dist.TCPStore("127.0.0.1", port, is_master=False)
    store = dist.PrefixStore(server.key, connection)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    world, channel = World(rank, RANKS, rank, RANKS), member(server, rank, RANKS)
    coordinator = Coordinator(world, channel, hostnames=("here",) * RANKS)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(RunDir(root), coordinator, dist.group.WORLD, 60.0, (0,) * RANKS)
    saver = Saver(run, keep=2, must_succeed=False)
    for step in count(start + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saver.meet(step)
        saver.save(step, state, {}, {})
        if rank == 0:
            os.write(steps, step.to_bytes(8, "little"))


def main(root: Path, kills: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # a forked rank does not have the threads of OpenMP
    torch.optim.SGD([torch.zeros(1)])
    draw = random.Random(kills)
    step = in_mid_write = 0
    (root / "checkpoints").mkdir(parents=True)
    checkpoints = root / "checkpoints"
    for number in range(kills):
        addresses, serve_end = os.pipe()
        children = [fork(partial(serve, serve_end))]
        port, *server = json.loads(os.read(addresses, 4096))
        read_end, write_end = os.pipe()
        for rank in range(RANKS):
            arguments = (root, step, port, Server(*server), rank, write_end)
            children.append(fork(partial(save_forever, *arguments)))
        for file in (addresses, serve_end, write_end):
            os.close(file)
        with os.fdopen(read_end, "rb") as steps:
            started = [steps.read(8) for _ in range(3)]
            assert all(started), f"kill {number}: the ranks have ended"
            time.sleep(draw.uniform(0, 0.06))
            for child in draw.sample(children[1:], RANKS):
                os.kill(child, signal.SIGKILL)
                time.sleep(draw.choice((0, 0.01)))
            rest = steps.read()
        os.kill(children[0], signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        last = int.from_bytes(rest[-8:] or started[-1], "little")
        in_mid_write += any(checkpoints.glob(".unfinished-*"))

        newest, broken = checkpoint_folders.survey(checkpoints)
        assert newest is not None, f"kill {number}: no verified checkpoint"
        assert broken == [], f"kill {number}: {broken}"
        found = directory.step_of(newest)
        assert last - 1 <= found <= last + 1, f"kill {number} at step {last} left step {found}"
        whole = root / f"whole-{number}"
        export(newest, whole)
        weights = torch.load(whole / "model.pt")
        assert weights["0.weight"].shape == (300, 300)
        assert bool((weights["0.weight"] == found).all()), f"kill {number}: another step's weights"
        step = found
    print(f"{kills} kills, {in_mid_write} in mid-write, step {step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
