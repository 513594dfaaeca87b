"""Call mpiddp.spawn: spawns.py HOSTS HOW, where HOW is "sums", "fails", "restarts", "stops" or "sleeps"."""

import os
import signal
import socket
import sys
import time

import spawned

import mpiddp

# torch is imported where the ranks need it, because the caller does not.


def sums(factor):
    import torch
    import torch.distributed as dist

    with mpiddp.process_group(backend="gloo") as world:
        total = torch.tensor([world.rank + 1])
        dist.all_reduce(total)
        print(f"out {world.rank}")
    return spawned.Found(socket.gethostname(), factor * world.rank), total


def fails():
    import torch.distributed as dist

    world = mpiddp.init(backend="gloo")
    if world.rank == 1:
        raise spawned.Trouble(7)
    dist.barrier()


def saves():
    import torch

    mpiddp.init(backend="gloo")
    checkpoints = mpiddp.Checkpoints("run")
    saved = checkpoints.resume()
    if saved is None:
        checkpoints.save(1, {"weights": torch.zeros(2)})
        checkpoints.close()
        raise RuntimeError("in the first attempt")
    return saved.step


def stops():
    step = 0
    while not mpiddp.should_stop():
        step += 1
        if step == 5 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
    return step


def sleeps():
    print("ready")
    time.sleep(1000)


# No guard: the ranks do not run this file.
where = {"hosts": sys.argv[1]}
how = sys.argv[2]
if how == "sums":
    for found, total in mpiddp.spawn(sums, 10, **where, log_ranks="all"):
        assert isinstance(found, spawned.Found)
        print(found.host, found.tenfold, total.item())
if how == "fails":
    try:
        mpiddp.spawn(fails, **where)
    except mpiddp.RankFailed as error:
        print(error.rank, error.hostname, repr(error.__cause__))
        print(error.traceback)
if how == "restarts":
    print(mpiddp.spawn(saves, **where, max_restarts=1))
if how == "stops":
    print(mpiddp.spawn(stops, **where))
if how == "sleeps":
    mpiddp.spawn(sleeps, **where, log_ranks="all")
