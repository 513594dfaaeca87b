"""The parts of a training step: phases, bf16, weight decay, momentum, gradients in place.

Tests mpiddp/train/.
python -m pytest tests/integration/train/test_step.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpiddp.checkpoints.contents import Resumed
from mpiddp.train.parallel import clear_gradients
from mpiddp.train.resnet import ARCHS
from mpiddp.train.step import (
    State,
    build_optimizer,
    build_scaler,
    learning_rate,
    mark_last_gradient,
    train_step,
)
from mpiddp.train.train import load
from tests.support.training import configured


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


PASS = ["data", "forward", "backward"]


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        (["--grad-accum-steps=2"], [*PASS, *PASS, "waiting"]),
        (["--clip-grad-norm=1"], [*PASS, "waiting"]),  # clipping is a part of the optimizer
        (["--sync-bn"], PASS),  # each BatchNorm waits for other ranks
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_the_phases_of_a_step(options: list[str], phases: list[str]) -> None:
    config = configured("--use-syn", "--batch-size=2", *options)
    batch = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8), torch.nn.Flatten())
    scaler = build_scaler(config, torch.device("cpu"))
    state = State(model, DistributedDataParallel(model), build_optimizer(model, config), scaler)
    ends: list[str] = []
    mark_last_gradient(state.ddp, ends.append)
    of_passes = iter([batch] * config.grad_accum_steps)
    train_step(state, of_passes, 0.1, config, phase_ends=ends.append)
    assert [phase for phase, _ in groupby(ends)] == phases


def test_weight_decay_excludes_batch_norm_and_biases() -> None:
    model = ARCHS["resnet20"]()
    decayed, excluded = build_optimizer(model, configured("--optimizer=sgd")).param_groups
    assert (decayed["weight_decay"], excluded["weight_decay"]) == (5e-4, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(decayed["params"]) + len(excluded["params"]) == len(names)
    for parameter in decayed["params"]:
        assert re.search(r"conv\d\.weight$|^fc\.weight$", names[id(parameter)])
    for parameter in excluded["params"]:
        assert re.search(r"bn\d\.(weight|bias)$|^fc\.bias$", names[id(parameter)])


def test_momentum_is_restored_in_the_layout_of_the_parameters() -> None:
    """The fused kernels pair elements by their position in memory, whatever their layout."""
    torch.manual_seed(0)
    image = torch.randn(2, 3, 8, 8)
    stepped = []
    for later in (torch.channels_last, torch.contiguous_format):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = build_optimizer(model, configured("--lr=0.1"))
        model(image).square().sum().backward()
        optimizer.step()
        model = model.to(memory_format=later)
        resumed = build_optimizer(model, configured("--lr=0.1"))
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": {}}
        load(Resumed(1, saved), State(model, model, resumed, torch.amp.GradScaler("cpu")))
        model(image).square().sum().backward()
        resumed.step()
        stepped.append(model.weight.detach().clone())
    # The weights are some hundreds. Each is a sum whose order depends on the layout, so a small one may
    # lose all its digits. A misplaced momentum changes the weights by their own size.
    torch.testing.assert_close(*stepped, rtol=0, atol=1e-5 * stepped[0].abs().max().item())


def test_gradients_keep_their_memory_for_cuda_graphs() -> None:
    model = torch.nn.Linear(2, 2)
    for options, stay in (
        (["--compile=reduce-overhead", "--grad-accum-steps=2"], True),
        (["--compile=reduce-overhead"], False),
        (["--grad-accum-steps=2"], False),
    ):
        model(torch.ones(1, 2)).sum().backward()
        clear_gradients(model, configured(*options))
        assert [p.grad is not None for p in model.parameters()] == [stay, stay]


def test_a_first_step_that_overflows_leaves_no_momentum() -> None:
    """torch's fused SGD would leave an uninitialized one, and use it in later steps."""
    model = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(model, configured("--amp=fp16"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((1, 2), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    momenta = [state.get("momentum_buffer") for state in optimizer.state.values()]
    assert all(momentum is None or not momentum.any() for momentum in momenta)


def test_the_learning_rate_of_each_schedule() -> None:
    """The peak scales with the batch, a quarter of the epochs warms up, and two of them reach 0."""
    for schedule, last in (("one-cycle", 0.0), ("cosine", 0.0), ("step", 1e-3), ("constant", 1.0)):
        config = configured("--lr=0.5", "--batch-size=512", "--epochs=8", f"--schedule={schedule}")
        rates = [learning_rate(step, 10, config) for step in range(80)]
        assert rates[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
        assert max(rates) == pytest.approx(1.0)
        assert rates[79] == pytest.approx(last, abs=0.02)
