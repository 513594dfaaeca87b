"""The parts of a training step, the schedules, the optimizers and the score, without ranks."""

import copy
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mpiddp.train.data import DeviceImages
from mpiddp.train.resnet import ARCHS
from mpiddp.train.train import (
    Config,
    State,
    backward,
    build_optimizer,
    evaluate,
    learning_rate,
    steps,
)
from tests.support.training import CPU, configured, images, state_of


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


pytestmark = pytest.mark.usefixtures("one_rank")
SMALL = ("--arch=resnet20", "--amp=off", "--batch-size=2")


def with_model(config: Config, model: nn.Module) -> State:
    """A training of another model, on eight images."""
    state = state_of(config, images(8))
    optimizer = build_optimizer(model, config)
    return replace(state, model=model, ddp=model, scored=model, optimizer=optimizer)


# --- what depends on the step alone


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # 40 steps, of which 10 warm up: at 1/10, 1, 1/3, 1/2, 2/3, 3/4, 5/6, 7/8 and the end of the rest
        ("one-cycle", {10: 1.0, 20: 2 / 3, 25: 1 / 2, 30: 1 / 3, 39: 1 / 30}),
        ("cosine", {10: 1.0, 20: 3 / 4, 25: 1 / 2, 30: 1 / 4, 39: 0.00274}),
        ("step", {10: 1.0, 24: 1.0, 25: 0.1, 32: 0.1, 33: 0.01, 36: 0.01, 37: 0.001, 39: 0.001}),
        ("constant", {10: 1.0, 25: 1.0, 39: 1.0}),
    ],
)
def test_the_schedules(schedule, expected):
    """Each rises in a quarter of the steps; then it is the one that its name says."""
    config = configured("--epochs=4", "--optimizer=sgd", "--lr=2", f"--schedule={schedule}")
    config = replace(config, global_batch_size=512)  # twice the batch that --lr is for
    rates = [learning_rate(step, 10, config) for step in range(40)]
    assert rates[:10] == pytest.approx([4 * (step + 1) / 10 for step in range(10)])
    assert {step: rates[step] / 4 for step in expected} == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("optimizer", "scale"), [("sgd", 4), ("adamw", 1), ("muon", 1)])
def test_only_the_rate_of_sgd_scales_with_the_batch(optimizer, scale):
    config = configured(f"--optimizer={optimizer}", "--lr=1", "--schedule=constant")
    config = replace(config, global_batch_size=1024)
    assert learning_rate(100, 10, config) == scale


def test_the_warmup_of_a_long_training_has_five_epochs():
    config = configured("--epochs=90", "--optimizer=adamw", "--lr=1")
    rates = [learning_rate(step, 10, config) for step in range(900)]
    assert rates.index(max(rates)) == 49


# --- a step


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_one_rank_trains_the_bare_model_and_smooths_its_labels(smoothing):
    state = with_model(
        configured(*SMALL, f"--label-smoothing={smoothing}"),
        nn.Sequential(nn.Conv2d(3, 10, 32), nn.Flatten()),
    )
    batch, labels = next(state.data.train.batches([torch.arange(2)], epoch=0))
    kwargs = {"reduction": "sum", "label_smoothing": smoothing}
    expected = F.cross_entropy(state.model(batch), labels, **kwargs)
    loss = backward(state, iter([(batch, labels)]), 0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert state_of(configured(*SMALL), images(8)).ddp is not None


def test_mixup_mixes_images_and_losses_by_one_draw_for_all_ranks():
    config = configured(*SMALL, "--mixup=0.8", "--seed=3")
    state = with_model(config, nn.Sequential(nn.Conv2d(3, 10, 32), nn.Flatten()))
    batch, labels = next(state.data.train.batches([torch.arange(2)], epoch=0))
    part = random.Random("3/5").betavariate(0.8, 0.8)
    logits = state.model(part * batch + (1 - part) * batch.flip(0))
    losses = [
        F.cross_entropy(logits, targets, reduction="sum") for targets in (labels, labels.flip(0))
    ]
    expected = part * losses[0] + (1 - part) * losses[1]
    assert backward(state, iter([(batch, labels)]), 5).item() == pytest.approx(expected.item())
    assert backward(state, iter([(batch, labels)]), 6).item() != pytest.approx(expected.item())


def test_clipping_limits_the_norm_of_the_gradients():
    state = state_of(configured(*SMALL, "--clip-grad-norm=0.01"), images(8))
    next(steps(state, 0))
    norms = [parameter.grad.norm() for parameter in state.model.parameters()]
    assert torch.stack(norms).norm().item() == pytest.approx(0.01, rel=1e-3)


# --- the optimizers


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weight_decay_excludes_batch_norm_and_biases(optimizer):
    options = (f"--optimizer={optimizer}", "--weight-decay=0.01", "--momentum=0")
    model = ARCHS["resnet20"]()
    decayed, excluded = build_optimizer(model, configured(*options)).param_groups
    assert (decayed["weight_decay"], excluded["weight_decay"]) == (0.01, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(decayed["params"]) + len(excluded["params"]) == len(names)
    for parameter in decayed["params"]:
        assert re.search(r"conv\d\.weight$|^fc\.weight$", names[id(parameter)])
    for parameter in excluded["params"]:
        assert re.search(r"bn\d\.(weight|bias)$|^fc\.bias$", names[id(parameter)])


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, count: int) -> list[Tensor]:
    for step in range(count):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return [weights.detach().clone() for weights in model.parameters() if weights.requires_grad]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("sgd", partial(torch.optim.SGD, momentum=0.9, nesterov=True)),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_the_optimizers_of_torch(name, plain):
    """A step with --optimizer is one with torch's own, at its published settings."""
    options = ("--lr=0.1", f"--optimizer={name}", "--weight-decay=0.3")
    model = nn.Linear(4, 3)
    copied = copy.deepcopy(model)
    groups = [
        {"params": copied.weight, "weight_decay": 0.3},
        {"params": copied.bias, "weight_decay": 0},
    ]
    weights = stepped(build_optimizer(model, configured(*options)), model, 3)
    torch.testing.assert_close(weights, stepped(plain(groups, lr=0.1), copied, 3))


def test_filters_keep_their_norm_and_other_parameters_are_those_of_sgd():
    model = ARCHS["whitened_resnet8"]().to(memory_format=torch.channels_last)
    copied = copy.deepcopy(model)
    by_muon = stepped(build_optimizer(model, configured("--lr=0.1")), model, 3)
    sgd = build_optimizer(copied, configured("--lr=0.1", "--optimizer=sgd"))
    by_sgd = stepped(sgd, copied, 3)
    for muon, plain in zip(by_muon, by_sgd, strict=True):
        if muon.ndim == 4:
            assert muon.norm() == pytest.approx(len(muon) ** 0.5, rel=0.1)
        else:
            torch.testing.assert_close(muon, plain)


def test_a_first_step_that_overflows_leaves_no_momentum():
    """torch's fused SGD would leave an uninitialized one, and use it in later steps."""
    model = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(model, configured("--amp=fp16"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((1, 2), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    momenta = [state.get("momentum_buffer") for state in optimizer.state.values()]
    assert all(momentum is None or not momentum.any() for momentum in momenta)


# --- the model and its score


def test_an_evaluation_is_compiled_once_for_its_one_size(monkeypatch):
    """Ten images in batches of at most four: the last batch has as many as the others, and counts fewer."""
    # without a C++ compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("mpiddp.train.train.BATCH_PIXELS", 4 * 32 * 32)
    source = images(10)
    state = state_of(configured(*SMALL, "--compile=on"), source)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    score = evaluate(state, source)
    assert graphs["unique_graphs"] == before + 1
    ((batch, labels),) = source.batches([torch.arange(10)], epoch=0)
    logits = state.model.eval()(batch)
    assert score.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    assert score.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_the_recipe_of_the_default_learns():
    """All of it in two seconds: whitening, small images, Muon, the schedule, smoothed and shifted images.

    Ten classes of 32 noisy images each, which are shifted at random. docs/evidence/accuracy.md has CIFAR-10.
    """
    draw = torch.Generator().manual_seed(0)
    coarse = torch.rand(10, 3, 8, 8, generator=draw)
    whole = F.interpolate(coarse, size=32, mode="bilinear").permute(0, 2, 3, 1).repeat(40, 1, 1, 1)
    noisy = (whole + 0.6 * torch.randn(whole.shape, generator=draw)).clamp(0, 1)
    pixels, labels = (noisy * 255).byte().numpy(), torch.arange(10).repeat(40).numpy()
    train = DeviceImages(pixels[:320], labels[:320], CPU, seed=0, max_shift=2)
    test = DeviceImages(pixels[320:], labels[320:], CPU)
    state = state_of(configured("--amp=off", "--batch-size=32"), train, test)
    before = evaluate(state, test)
    *_, last = steps(state, 0)
    score = evaluate(state, test)
    assert (last.number, last.is_last) == (50, True)
    assert before.accuracy < 0.3
    assert score.accuracy > 0.8
