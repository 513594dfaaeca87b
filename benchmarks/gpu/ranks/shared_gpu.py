"""A verb of `mpiddp` as one of several ranks that share GPU 0. NCCL takes each rank for a host of its own.

    mpiddp launch --share-gpus -H localhost:2 benchmarks/gpu/ranks/shared_gpu.py train …

`mpiddp` itself refuses ranks that share a GPU, so its choice of the device is replaced. Without a GPU the
ranks use gloo as ever.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from benchmarks.gpu.jobs import PIDS
from mpiddp import cli
from mpiddp.runtime.torch import process_group
from mpiddp.world import World


def share_gpu() -> None:
    """Let this rank use GPU 0, and write its pid for the stage that sends it signals.

    NCCL refuses two ranks on one GPU of one host ("Duplicate GPU detected"). NCCL_HOSTID names the host.
    """
    rank = World.from_env().rank
    os.environ["NCCL_HOSTID"] = f"host-of-rank-{rank}"
    process_group.device_of = _first_gpu
    if folder := os.environ.get(PIDS):
        file = Path(folder) / str(rank)
        part = file.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.rename(file)


def _first_gpu(world: World, backend: str | None = None) -> torch.device:
    uses_gpu = (backend or process_group.choose_backend(None)) == "nccl"
    return torch.device("cuda", 0) if uses_gpu else torch.device("cpu")


if __name__ == "__main__":
    share_gpu()
    sys.exit(cli.main(sys.argv[1:]))
