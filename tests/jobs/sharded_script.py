"""A script with fully_shard and mpiddp.Checkpoints: save, or resume and compare with what was saved.

    mpirun -np 4 python -m tests.jobs.sharded_script save FOLDER PARALLEL
    mpirun -np 2 python -m tests.jobs.sharded_script resume FOLDER PARALLEL
    mpirun -np 2 python -m tests.jobs.sharded_script lose FOLDER PARALLEL

PARALLEL is "sharded" or "whole". The state also has the whole tensors, gathered when it was saved. Every rank
must find the same in its model and its optimizer after it resumes. "lose": the folder is away during the
first two saves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpiddp
from mpiddp.runtime.join import join
from mpiddp.runtime.torch.process_group import default_group

CPU = torch.device("cpu")


def whole(nested: Any) -> Any:
    """The same with whole tensors. A collective."""
    if isinstance(nested, dict):
        return {key: whole(value) for key, value in nested.items()}
    if isinstance(nested, list):
        return [whole(value) for value in nested]
    return nested.full_tensor() if hasattr(nested, "full_tensor") else nested


def build(parallel: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with dimensions that no number of ranks divides, and one of a single row."""
    torch.manual_seed(len(parallel))
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 1))
    if parallel == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def main(verb: str, folder: str, parallel: str) -> None:
    with join() as coordinator, default_group(coordinator, "gloo", CPU, timeout_s=60):
        if verb == "lose":
            Path(folder).with_name("no folder").touch()
            Path(folder).with_name("folder").mkdir(exist_ok=True)
            link(Path(folder), Path(folder).with_name("folder"))
        checkpoints = mpiddp.Checkpoints(Path(folder), every=None)
        model, optimizer = build(parallel)
        saved = checkpoints.resume()
        if verb == "save":
            for number in (1, 2):
                step(model, optimizer)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                expected = whole(state)
                checkpoints.save(number, {**state, "whole": expected, "number": number})
        elif verb == "lose":
            save_without_folder(checkpoints, model, Path(folder))
        else:
            assert saved is not None
            saved.load_into(model=model, optimizer=optimizer)
            found = whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            assert_equal(found["model"], saved.state["whole"]["model"])
            assert_equal(found["optimizer"]["state"], saved.state["whole"]["optimizer"]["state"])
            assert saved.state["number"] == saved.step
            first = saved.state["model"]["0.weight"]
            if hasattr(first, "full_tensor"):
                assert_equal(first.full_tensor(), saved.state["whole"]["model"]["0.weight"])
            step(model, optimizer)  # and it trains
        checkpoints.close()


def save_without_folder(checkpoints: mpiddp.Checkpoints, model: nn.Module, folder: Path) -> None:
    """Save three times. The folder is back before the third save, which waits for the second."""
    state = {"model": model.state_dict()}
    link(folder, folder.with_name("no folder"))
    for number in (1, 2):
        checkpoints.save(number, state)
    link(folder, folder.with_name("folder"))
    checkpoints.save(3, state)


def link(folder: Path, target: Path) -> None:
    """Make the folder a link, at once for all ranks and threads. A collective."""
    if dist.get_rank() == 0:
        new = folder.with_name("new link")
        new.symlink_to(target)
        new.replace(folder)
    dist.barrier()


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


if __name__ == "__main__":
    main(*sys.argv[1:])
