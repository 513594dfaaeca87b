"""A script with fully_shard and mpiddp.Checkpoints: save, or resume and compare with what was saved.

    mpiddp launch -n 4 tests/programs/sharded_script.py save FOLDER PARALLEL …
    mpiddp launch -n 2 tests/programs/sharded_script.py resume FOLDER PARALLEL …

PARALLEL is "sharded" or "whole". Several folders are saved or resumed one after another. The state also has
the whole tensors, gathered when it was saved. Every rank must find the same in its model and its optimizer
after it resumes.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpiddp
from tests.support.training import unequal


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


def run(verb: str, folder: str, parallel: str) -> None:
    checkpoints = mpiddp.Checkpoints(folder, every=None)
    model, optimizer = build(parallel)
    saved = checkpoints.resume()
    if verb == "save":
        for number in (1, 2):
            step(model, optimizer)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoints.save(number, {**state, "whole": whole(state), "number": number})
    else:
        saved.load_into(model=model, optimizer=optimizer)
        found = whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        expected = saved.state["whole"]
        assert unequal(found["model"], expected["model"]) == []
        assert unequal(found["optimizer"]["state"], expected["optimizer"]["state"]) == []
        assert saved.state["number"] == saved.step == 2
        step(model, optimizer)  # and it trains
    checkpoints.close()


if __name__ == "__main__":
    verb, *runs = sys.argv[1:]
    with mpiddp.process_group(backend="gloo"):
        for folder, parallel in zip(runs[::2], runs[1::2], strict=True):
            run(verb, folder, parallel)
