"""The startup checks, once all ranks have joined: where they are, how they talk, how long it took."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from mpiddp.errors import UserError
from mpiddp.protocol import LAUNCHED_AT, PLACEMENT, REPORT, VERBOSE
from mpiddp.runtime.coordinator import AGREE_TIMEOUT_S, Coordinator
from mpiddp.runtime.placement import RankPlacement, misplaced, table
from mpiddp.runtime.rendezvous import RendezvousResult
from mpiddp.world import World


def check_placement(coordinator: Coordinator, result: RendezvousResult) -> None:
    """Compare where the ranks are with the hostfile, and print what the launcher's options request."""
    env = os.environ
    wanted = env.get(PLACEMENT)
    if wanted or env.get(REPORT):
        info = result.infos[coordinator.world.rank]
        own = RankPlacement.of_this_process(
            info, torch.cuda.device_count(), coordinator.world.launcher.name
        )
        devices = coordinator.all_gather_json([own.device, own.gpu], timeout_s=AGREE_TIMEOUT_S)
        placements = [
            RankPlacement(info, device, gpu)
            for info, (device, gpu) in zip(result.infos, devices, strict=True)
        ]
        problem = coordinator.broadcast_json(
            misplaced(placements, wanted) if wanted and coordinator.world.rank == 0 else ""
        )
        with coordinator.all_or_none():
            if problem:
                raise UserError(problem)
        if env.get(REPORT) and coordinator.world.rank == 0:
            print(table(placements), flush=True)
    if env.get(VERBOSE):
        world = coordinator.world
        if world.rank == 0:
            address = f"{world.master_addr} port {world.master_port}"
            print(f"master address {address}: {result.reason}", flush=True)
        print(f"rank {world.rank} on {world.hostname} uses {result.interface}", flush=True)


def time_the_start(world: World) -> None:
    """At -v: the first process group, be it a script's own, does one all-reduce before all else, and
    rank 0 prints the seconds from the launcher's start to its end."""
    start = os.environ.get(LAUNCHED_AT)
    if start is None or not os.environ.get(VERBOSE):
        return
    form = dist.init_process_group

    @functools.wraps(form)
    def form_and_time(*args: Any, **kwargs: Any) -> None:
        form(*args, **kwargs)
        if dist.init_process_group is form:  # a name that was imported still leads here
            return
        dist.init_process_group = form
        device = torch.device("cpu")
        if "cpu:" not in dist.get_backend_config():  # "cuda:nccl"
            all_visible = world.local_rank < torch.cuda.device_count()
            index = world.local_rank if all_visible else torch.cuda.current_device()
            device = torch.device("cuda", index)
        one = torch.ones(1, device=device)
        dist.all_reduce(one)
        assert one.item() == dist.get_world_size()
        if dist.get_rank() == 0:
            seconds = time.time() - float(start)
            print(f"first all-reduce {seconds:.2f} s after the command", flush=True)

    dist.init_process_group = form_and_time
