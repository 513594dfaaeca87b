"""Measure a save beside torch's distributed checkpoint, and print the table of docs/evidence/performance.md.

    mpiddp launch -n 2 -m benchmarks.beside_dcp --rounds 13

`mpiddp.Checkpoints` and DCP's `async_save` take turns in one job, first with a whole model and its AdamW, and
then under FSDP2. Each save is timed on rank 0: until the training goes on, and until the files are
written. Its CPU time is that of rank 0 with all of its threads. A ratio is DCP's figure divided by the one of
mpiddp in the same round. The noise is a second save of mpiddp divided by the first.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpiddp
from benchmarks.harness import markdown, turns
from mpiddp.arguments import whole
from mpiddp.runtime.job.session import current

OURS, AGAIN, DCP = "mpiddp", "mpiddp again", "DCP"
FIGURES = ("the training is blocked", "until it is written", "CPU time")


def built(*, is_sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with its AdamW, of 139 MB in all, after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(11)))
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    return model, optimizer


def measured(folder: Path, rounds: int, *, is_sharded: bool) -> dict[str, list[list[float]]]:
    """By variant, for each round: seconds until the training goes on, until the end, and of CPU time."""
    model, optimizer = built(is_sharded=is_sharded)
    figures: dict[str, list[list[float]]] = {OURS: [], AGAIN: [], DCP: []}
    with mpiddp.Checkpoints(folder / "ours", every=None, keep=1) as checkpoints:
        checkpoints.resume()
        for step, (number, variant) in enumerate(turns(tuple(figures), rounds, warmup=1), 1):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            if variant == DCP:
                weights, states = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": states}
                future: Any = dcp.async_save(state, checkpoint_id=folder / f"dcp{step}")
                blocked = time.perf_counter() - start
                future.result()
            else:
                checkpoints.save(step, model=model, optimizer=optimizer)
                blocked = time.perf_counter() - start
                current().progress.wait_for_saves()
            row = [blocked, time.perf_counter() - start, time.process_time() - cpu]
            if number > 0:
                figures[variant].append(row)
            dist.barrier()
            if variant == DCP and dist.get_rank() == 0:
                shutil.rmtree(folder / f"dcp{step}")
    return figures


def row_of(state: str, figures: dict[str, list[list[float]]]) -> list[str]:
    """The medians of DCP's figures divided by ours; in brackets, the noise; and our medians in seconds."""
    cells = [state]
    for index in range(len(FIGURES)):
        ours, again, other = ([row[index] for row in rows] for rows in figures.values())
        ratio = median(b / a for a, b in zip(ours, other, strict=True))
        noise = median(b / a for a, b in zip(ours, again, strict=True))
        cells.append(f"{ratio:.2f} [{noise:.2f}], {median(ours):.3f} s")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(prog="beside_dcp")
    parser.add_argument("--rounds", type=whole(1), default=13)
    parser.add_argument("--folder", help="of the checkpoints (default: a temporary one)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with mpiddp.process_group(backend="gloo") as world:
        folders = [tempfile.mkdtemp(dir=options.folder) if world.rank == 0 else ""]
        dist.broadcast_object_list(folders)
        rows = []
        for state in ("whole", "FSDP2"):
            folder = Path(folders[0], state)
            figures = measured(folder, options.rounds, is_sharded=state == "FSDP2")
            rows.append(row_of(state, figures))
        if world.rank == 0:
            shutil.rmtree(folders[0])
            print(markdown(("state", *FIGURES), rows), flush=True)


if __name__ == "__main__":
    main()
