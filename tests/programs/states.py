"""Every kind of state that a script saves: save each in a run of its own, or resume each and compare.

    mpiddp launch -n 4 tests/programs/states.py save FOLDER [KIND …]
    mpiddp launch -n 2 tests/programs/states.py resume FOLDER [KIND | KIND=OTHER …]

The first job prints the kinds. FOLDER/KIND.pt has the whole tensors that were saved, gathered at the save.
With KIND=OTHER, objects of the other kind resume it. No number of ranks divides the dimensions of a layer.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import mpiddp
from tests.support.training import unequal

Objects = dict[str, Any]  # each with state_dict and load_state_dict
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def whole(nested: Any) -> Any:
    """The same with whole tensors. A collective."""
    if isinstance(nested, dict):
        return {key: whole(value) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        return [whole(value) for value in nested]
    return nested.full_tensor() if hasattr(nested, "full_tensor") else nested


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(each.square().sum() for each in model(torch.ones(4, 6)).unbind())
        loss.backward()
        return loss

    optimizer.step(closure)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, trains: bool) -> Objects:
    if trains:
        step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def schedules(trains: bool) -> Objects:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    objects = trained(model, optimizer, trains)
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])]
    made = [
        lr_scheduler.SequentialLR(optimizer, parts, milestones=[3]),
        lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
        lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
        lr_scheduler.PolynomialLR(optimizer),
    ]
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    if trains:
        for each in made:
            each.step()
        plateau.step(1.5)
    objects |= {type(each).__name__: each for each in made}
    return {**objects, "plateau": plateau}


def scaler(trains: bool) -> Objects:
    found = torch.amp.GradScaler("cpu", init_scale=64.0 if trains else 2.0)
    found.scale(torch.ones(()))
    return {"scaler": found}


def plain(trains: bool) -> Objects:
    model = net()
    return trained(model, torch.optim.Adam(model.parameters(), lr=0.01), trains)


def fsdp(trains: bool) -> Objects:
    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, torch.optim.Adam(model.parameters(), lr=0.01), trains)


class Average:
    """An average of a model's weights, sharded as they are."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.9, "shadow": dict(self.shadow)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def ema(trains: bool) -> Objects:
    objects = fsdp(trains)
    average = Average(objects["model"])
    if not trains:
        for value in average.shadow.values():
            value.zero_()
    return {**objects, "ema": average}


def averaged_model(trains: bool) -> Objects:
    model = net()
    average = AveragedModel(model)
    if trains:
        average.update_parameters(model)
    return {"average": average}


def tensor_parallel(trains: bool) -> Objects:
    """With several replicas: the same DTensors on other ranks. A tensor that only rank 0 has a part of."""
    ranks = dist.get_world_size()
    tp = 2 if ranks % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": ColwiseParallel()})
    part = Average(model)
    alone = torch.full((3, 2), float(trains)), DeviceMesh("cpu", [0]), [Shard(1)]
    part.shadow = {"alone": distribute_tensor(*alone)}
    return {"model": model, "part": part}


class Nested(torch.optim.SGD):
    """An optimizer whose state lies two levels deep."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for each in (each for group in self.param_groups for each in group["params"]):
            self.state[each]["sums"] = {"first": each.detach().clone(), "rest": [each.detach() * 2]}
        return loss


def nested(trains: bool) -> Objects:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return trained(model, Nested(model.parameters(), lr=0.01), trains)


class ByNames:
    """An optimizer whose state is saved by the names of the parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.model, self.optimizer, options=FLAT))


class Consolidated(ByNames):
    """A ZeroRedundancyOptimizer, whose state_dict() is there after a collective, and on rank 0 only."""

    def state_dict(self) -> Any:
        self.optimizer.consolidate_state_dict(0)
        return self.optimizer.state_dict() if dist.get_rank() == 0 else None


def zero(trains: bool) -> Objects:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return {**trained(model, optimizer, trains), "optimizer": Consolidated(model, optimizer)}


def pipeline(trains: bool) -> Objects:
    """Two stages, each sharded over its own ranks; or both in one rank."""
    ranks = dist.get_world_size()
    stages: list[int] = [0, 1]
    layers = {"first": nn.Linear(6, 6), "second": nn.Linear(6, 6)}
    if ranks > 1:
        mesh = mpiddp.mesh(pp=2, dp=ranks // 2)
        stages = [mesh["pp"].get_local_rank()]
        for layer in layers.values():
            fully_shard(layer, mesh=mesh["dp"])
    own = [name for i, name in enumerate(layers) if i in stages]
    model = nn.ModuleDict({name: layers[name] for name in own})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if trains:
        for layer in model.values():
            layer(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": ByNames(model, optimizer)}


def values(trains: bool) -> dict[str, Any]:
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    bits, pairs = torch.arange(8, dtype=torch.uint8), torch.complex(weight, weight)
    return {
        "bf16": weight.bfloat16(),
        "fp8": [weight.to(torch.float8_e4m3fn), weight.to(torch.float8_e5m2)],
        "fp4": bits.view(torch.float4_e2m1fn_x2),
        "complex": [pairs, pairs.conj(), pairs.imag, pairs.conj().imag],
        "quantized": [
            torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
            torch.quantize_per_channel(weight, torch.ones(3) / 9, torch.zeros(3), 0, torch.qint8),
        ],
        "zeros": torch.tensor([0.0, -0.0]),
        "others": [bits > 3, bits.to(torch.uint16), torch.tensor(3), torch.empty(0, 3)],
        "views": [weight.T, weight[:, 1:], weight[0].expand(5, 4), weight[0, 0].expand(5, 4)],
        "plain": {"none": None, "big": 1 << 100, "pair": (1, [2.5])},
        "flags": {True: "a", 1.5: "b"},
        "named": {"__metadata__": weight},
    }


WHOLE = (schedules, scaler, plain, zero, averaged_model)
SHARDED = (fsdp, ema, tensor_parallel, nested, pipeline)
KINDS: dict[str, Callable[[bool], Any]] = {each.__name__: each for each in (*WHOLE, *SHARDED)}


def gathered(state: Any) -> Any:
    """The whole state of all stages. A collective."""
    own = whole(state)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    union: Any = {}
    for each in found:
        for key, entry in each.items():
            known = union.setdefault(key, entry)
            if isinstance(entry, dict) and isinstance(known, dict):
                union[key] = {**entry, **known}
    return union


def save(kind: str, folder: Path) -> None:
    torch.manual_seed(1)
    with mpiddp.Checkpoints(folder / kind, every=None) as checkpoints:
        if kind == "values":
            state = values(True)
        else:
            state = {name: each.state_dict() for name, each in KINDS[kind](True).items()}
            found = gathered(state)
            folder.mkdir(parents=True, exist_ok=True)
            if dist.get_rank() == 0:
                torch.save(found, folder / f"{kind}.pt")
        for step in (1, 2):
            checkpoints.save(step, state, per_rank={"position": dist.get_rank()})


def resume(kinds: str, folder: Path) -> None:
    kind, _, other = kinds.partition("=")
    torch.manual_seed(2)
    with mpiddp.Checkpoints(folder / kind, every=None) as checkpoints:
        if kind == "values":
            saved = checkpoints.resume()
            assert unequal(saved.state, values(True)) == []
            return
        expected = torch.load(folder / f"{kind}.pt", weights_only=False)
        objects = KINDS[other or kind](False)
        saved = checkpoints.resume()
        assert saved.per_rank in ({}, {"position": dist.get_rank()})
        targets = {
            name: each.optimizer if isinstance(each, ByNames) else each
            for name, each in objects.items()
        }
        saved.load_into(**targets)
        found = gathered({name: each.state_dict() for name, each in objects.items()})
        assert unequal(found, expected) == [], kind


if __name__ == "__main__":
    verb, folder = sys.argv[1], Path(sys.argv[2])
    with mpiddp.process_group(backend="gloo") as world:
        for kind in sys.argv[3:] or ("values", *KINDS):
            {"save": save, "resume": resume}[verb](kind, folder)
            if world.rank == 0:
                print(f"{verb} {kind}", flush=True)
