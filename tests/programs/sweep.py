"""Trainings of many optimizers, kernels and kinds of parameters, saved or resumed in one checkpoint.

    mpiddp launch -n 2 tests/programs/sweep.py save FOLDER      # trains, saves, and trains on
    mpiddp launch -n 1 tests/programs/sweep.py resume FOLDER    # resumes, trains on, and compares the bits

With "all" after FOLDER, with all kinds of parameters, with "rest", with those that are left out otherwise; with
"cuda", on a GPU, without which torch refuses the kernels of CUDA graphs (capturable). A training that torch
refuses is left out. Rank 0 prints how many trainings there are of each optimizer and kernel, and which differ
from those that did not stop.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpiddp
from tests.support.training import unequal

STEPS = 2  # before the save, and after it
DEVICE, BACKEND = ("cuda", "nccl") if "cuda" in sys.argv else ("cpu", "gloo")


class OneByOne(torch.optim.Optimizer):
    """It updates each parameter on its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.update(parameter, self.state[parameter])

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Master(OneByOne):
    """It keeps fp32 weights, fp32 momentum and codes of 8 bits, whatever its parameters are."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["master"] = parameter.float().clone()
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["momentum"].mul_(0.9).add_(parameter.grad.float())
        state["master"].sub_(0.05 * state["momentum"])
        state["codes"] = (state["master"] * 16).round().clamp(-127, 127).to(torch.int8)
        parameter.copy_(state["master"] + state["codes"].float() / 1000)


class Factored(OneByOne):
    """Its second moment has one number for each row, as that of CAME has."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        if parameter.ndim == 2:
            row = parameter.grad.square().mean(1)
            state["row"] = row if "row" not in state else 0.9 * state["row"] + 0.1 * row
            parameter.sub_(0.05 * parameter.grad / (state["row"].sqrt()[:, None] + 1e-3))


def adam(kind: Any, **options: Any) -> Callable[..., Any]:
    return lambda params, **more: kind(params, lr=0.05, **options, **more)


NAMES = "ASGD Adadelta Adafactor Adagrad Adamax LBFGS NAdam RAdam Rprop Muon"
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    **{name: adam(getattr(torch.optim, name)) for name in NAMES.split()},
    "Adam amsgrad": adam(torch.optim.Adam, amsgrad=True),
    "AdamW": adam(torch.optim.AdamW),
    "SGD momentum": adam(torch.optim.SGD, momentum=0.9),
    "RMSprop centered": adam(torch.optim.RMSprop, centered=True, momentum=0.5),
    "fp32 master, int8 codes": Master,
    "factored": Factored,
}
KERNELS: dict[str, dict[str, bool]] = {
    "default": {},
    **{name: {name: True} for name in ("fused", "foreach", "capturable")},
}


def parameter(kind: str) -> torch.Tensor:
    weight = torch.randn(4, 6, 2, 2, generator=torch.Generator().manual_seed(1))
    return {
        "row by row": weight[..., 0, 0].contiguous(),
        "transposed": weight[..., 0, 0].contiguous().t(),
        "transposed 3-D": weight[..., 0].contiguous().transpose(1, 2),
        "channels_last": weight.to(memory_format=torch.channels_last),
        "expanded gradient": weight[..., 0, 1].contiguous(),
        "0-d": weight[0, 0, 0, 0].clone(),
        "bf16": weight[..., 1, 0].bfloat16(),
        "shorter than the ranks": weight[:1, :, 0, 0].contiguous(),
    }[kind]


KINDS = ["transposed", "transposed 3-D", "channels_last", "bf16"]
REST = ["row by row", "expanded gradient", "0-d", "shorter than the ranks"]
KINDS = KINDS + REST if "all" in sys.argv else REST if "rest" in sys.argv else KINDS


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(parameter(kind).to(DEVICE))

    def forward(self) -> torch.Tensor:
        if self.kind == "expanded gradient":
            return self.weight.sum() * 0.3
        pattern = torch.linspace(0.5, 1.5, parameter(self.kind).numel(), device=DEVICE)
        whole = self.weight.full_tensor() if hasattr(self.weight, "full_tensor") else self.weight
        return (whole.float().reshape(-1) * pattern).square().sum()


class Training:
    """One of the trainings. Raises what torch raises, if it refuses it."""

    def __init__(self, name: str) -> None:
        optimizer, kernel, kind, parallel = name.split(" / ")
        self.model: nn.Module = Model(kind)
        if parallel == "fsdp2":
            fully_shard(self.model, mesh=init_device_mesh(DEVICE, (dist.get_world_size(),)))
        else:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), **KERNELS[kernel])

    def train(self) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model()
            loss.backward()
            return loss

        for _ in range(STEPS):
            with torch.enable_grad():
                self.optimizer.step(torch.enable_grad()(closure))

    def tensors(self) -> list[Any]:
        """All weights and states, whole. Those that are not sharded have their strides."""
        tensors: list[torch.Tensor] = list(self.model.parameters())
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        rows: list[Any] = []
        for tensor in tensors:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            layout = whole.stride() if whole is tensor else ()
            rows.append((layout, whole.detach().cpu().clone()))
        return rows


def names() -> Iterator[str]:
    for parts in itertools.product(OPTIMIZERS, KERNELS, KINDS, ("ddp", "fsdp2")):
        if parts[1] == "default" or parts[0] not in ("fp32 master, int8 codes", "factored"):
            yield " / ".join(parts)


def trained(name: str) -> Training | None:
    """A training that has made its first steps; None if torch refuses it on so many ranks."""
    try:
        training = Training(name)
        training.train()
    except Exception:
        return None
    return training


def objects(trainings: dict[str, Training]) -> dict[str, dict[str, Any]]:
    return {
        name: {"model": each.model, "optimizer": each.optimizer} for name, each in trainings.items()
    }


def save(folder: Path) -> None:
    trainings = {name: training for name in names() if (training := trained(name)) is not None}
    with mpiddp.Checkpoints(folder, every=None) as checkpoints:
        checkpoints.save(1, {"names": list(trainings), "trainings": objects(trainings)})
    finals = {}
    for name, training in trainings.items():
        saved = training.tensors()
        training.train()
        finals[name] = saved, training.tensors()
    if dist.get_rank() == 0:
        torch.save(finals, folder / "finals.pt")
        report(trainings, [])


def resume(folder: Path) -> None:
    finals = torch.load(folder / "finals.pt")
    with mpiddp.Checkpoints(folder, every=None) as checkpoints:
        saved = checkpoints.resume()
        trainings = {name: Training(name) for name in saved.state["names"]}
        saved.load_into(trainings=objects(trainings))
    differ = []
    for name, training in trainings.items():
        before, after = finals[name]
        is_same = not unequal(training.tensors(), before)
        if trained(name) is not None:
            training.train()
            # The kernels of torch round a shard by its size: on other ranks, no bits are expected.
            if saved.world_size == dist.get_world_size():
                is_same &= not unequal(training.tensors(), after)
        if not is_same:
            differ.append(name)
    report(trainings, differ)


def report(trainings: dict[str, Training], differ: list[str]) -> None:
    if dist.get_rank() == 0:
        counts = Counter(part for name in trainings for part in name.split(" / ")[:2])
        print(f"{len(trainings)} trainings, {len(differ)} differ: {dict(counts)}")
        for name in differ:
            print(name, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with mpiddp.process_group(backend=BACKEND):
        {"save": save, "resume": resume}[sys.argv[1]](Path(sys.argv[2]))
