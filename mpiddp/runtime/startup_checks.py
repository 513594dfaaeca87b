"""The startup checks after all ranks have joined: their placement, and the network that they use."""

from __future__ import annotations

import os

from mpiddp.errors import UserError
from mpiddp.protocol.variables import PLACEMENT, REPORT, VERBOSE
from mpiddp.runtime.coordinator import AGREE_TIMEOUT_S, Coordinator
from mpiddp.runtime.log import log
from mpiddp.runtime.placement import RankPlacement, misplaced, table
from mpiddp.runtime.rendezvous import RendezvousResult


def check_placement(
    coordinator: Coordinator, result: RendezvousResult, *, uses_gpus: bool = True
) -> None:
    """Compare the ranks' placement with the hostfile, and print what the launcher's options request.

    Args:
        uses_gpus: whether this process uses the GPUs that it sees, and not its command.
    """
    env = os.environ
    expected = env.get(PLACEMENT)
    if expected or env.get(REPORT):
        info = result.infos[coordinator.world.rank]
        gpu_type, num_gpus = _gpus() if uses_gpus else ("cpu", 0)
        launcher = coordinator.world.launcher.name
        own = RankPlacement.of_this_process(info, num_gpus, launcher, gpu_type)
        devices = coordinator.all_gather_json([own.device, own.gpu], timeout_s=AGREE_TIMEOUT_S)
        placements = [
            RankPlacement(info, device, gpu)
            for info, (device, gpu) in zip(result.infos, devices, strict=True)
        ]
        problem = coordinator.broadcast_json(
            misplaced(placements, expected) if expected and coordinator.world.rank == 0 else ""
        )
        with coordinator.all_or_none():
            if problem:
                raise UserError(problem)
        if env.get(REPORT) and coordinator.world.rank == 0:
            log.info(table(placements))
    if env.get(VERBOSE):
        world = coordinator.world
        if world.rank == 0:
            address = f"{world.master_addr} port {world.master_port}"
            log.info(f"master address {address}: {result.reason}")
        # Not with `log`, which prints on rank 0 only.
        print(f"rank {world.rank} on {world.hostname} uses {result.interface}", flush=True)


def _gpus() -> tuple[str, int]:
    """torch's name for this host's GPUs, and their number."""
    import torch  # a rank that only starts a command does without

    # Whether one is available is not asked: CUDA would start, and children could not be forked.
    gpu = torch.accelerator.current_accelerator()
    return gpu.type if gpu else "cpu", torch.accelerator.device_count()
