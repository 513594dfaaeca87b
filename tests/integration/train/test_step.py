"""The parts of a training step, the schedules, the optimizers and the score, without ranks."""

import copy
import random
import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks.accuracy import Alternating, Trial, trial
from mpiddp.train.data import Data, DeviceImages
from mpiddp.train.resnet import ARCHS
from mpiddp.train.trainer import Trainer
from tests.support.training import CPU, HALF, configured, images, training_of


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


pytestmark = pytest.mark.usefixtures("one_rank")
SMALL = ("--arch=resnet20", "--amp=off", "--batch-size=2")


def with_model(model: nn.Module, *options: str, num_images: int = 8) -> Trainer:
    """A training of another model, on random images."""

    class Other(Trainer):
        def build_model(self) -> nn.Module:
            return model

    return training_of(configured(*options), images(num_images), kind=Other)


def of_pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 10, 32), nn.Flatten())


def rates(*options: str, epochs: int, batch: int = 2) -> list[float]:
    """The learning rates of each step of a training with ten steps in an epoch."""
    sizes = (f"--epochs={epochs}", f"--global-batch-size={batch}")
    training = with_model(of_pixels(), *options, *sizes, num_images=10 * batch)
    return [training.learning_rate(step) for step in range(10 * epochs)]


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
    options = ("--optimizer=sgd", "--lr=2", f"--schedule={schedule}")
    found = rates(*options, epochs=4, batch=512)  # twice the batch that --lr is for
    assert found[:10] == pytest.approx([4 * (step + 1) / 10 for step in range(10)])
    assert {step: found[step] / 4 for step in expected} == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("optimizer", "scale"), [("sgd", 4), ("adamw", 1), ("muon", 1)])
def test_only_the_rate_of_sgd_scales_with_the_batch(optimizer, scale):
    options = (f"--optimizer={optimizer}", "--lr=1", "--schedule=constant")
    assert rates(*options, epochs=2, batch=1024)[-1] == scale


def test_the_warmup_of_a_long_training_has_five_epochs():
    found = rates("--optimizer=adamw", "--lr=1", epochs=90)
    assert found.index(max(found)) == 49


# --- a step


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_one_rank_trains_the_bare_model_and_smooths_its_labels(smoothing):
    training = with_model(of_pixels(), *SMALL, f"--label-smoothing={smoothing}", num_images=2)
    before = copy.deepcopy(training.model)
    made = next(training.steps(0))
    ((batch, labels),) = training.data.train.batches([torch.arange(2)], epoch=0)
    kwargs = {"reduction": "sum", "label_smoothing": smoothing}
    expected = F.cross_entropy(before(batch), labels, **kwargs)
    assert made.loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    assert training.ddp is training.model


def test_mixup_mixes_images_and_losses_by_one_draw_for_all_ranks():
    state = with_model(of_pixels(), *SMALL, "--mixup=0.8", "--seed=3")
    batch, labels = next(state.data.train.batches([torch.arange(2)], epoch=0))
    part = random.Random("3/5").betavariate(0.8, 0.8)
    logits = state.model(part * batch + (1 - part) * batch.flip(0))
    losses = [
        F.cross_entropy(logits, targets, reduction="sum") for targets in (labels, labels.flip(0))
    ]
    expected = part * losses[0] + (1 - part) * losses[1]
    assert state.loss(batch, labels, 5).item() == pytest.approx(expected.item())
    assert state.loss(batch, labels, 6).item() != pytest.approx(expected.item())


def test_clipping_limits_the_norm_of_the_gradients():
    training = training_of(configured(*SMALL, "--clip-grad-norm=0.01"), images(8))
    next(training.steps(0))
    norms = [parameter.grad.norm() for parameter in training.model.parameters()]
    assert torch.stack(norms).norm().item() == pytest.approx(0.01, rel=1e-3)


# --- the optimizers


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weight_decay_excludes_batch_norm_and_biases(optimizer):
    options = (f"--optimizer={optimizer}", "--weight-decay=0.01", "--momentum=0")
    model = ARCHS["resnet20"]()
    decayed, excluded = with_model(model, *SMALL, *options).optimizer.param_groups
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
    weights = stepped(with_model(model, *SMALL, *options).optimizer, model, 3)
    torch.testing.assert_close(weights, stepped(plain(groups, lr=0.1), copied, 3))


def test_filters_keep_their_norm_and_other_parameters_are_those_of_sgd():
    model = ARCHS["whitened_resnet8"]().to(memory_format=torch.channels_last)
    copied = copy.deepcopy(model)
    options = ("--lr=0.1", "--batch-size=2", "--amp=off")
    by_muon = stepped(with_model(model, *options).optimizer, model, 3)
    by_sgd = stepped(with_model(copied, *options, "--optimizer=sgd").optimizer, copied, 3)
    for muon, plain in zip(by_muon, by_sgd, strict=True):
        if muon.ndim == 4:
            assert muon.norm() == pytest.approx(len(muon) ** 0.5, rel=0.1)
        else:
            torch.testing.assert_close(muon, plain)


def test_a_first_step_that_overflows_leaves_no_momentum():
    """torch's fused SGD would leave an uninitialized one, and use it in later steps."""
    model = torch.nn.Linear(2, 2)
    training = with_model(model, "--amp=fp16", "--batch-size=2")
    training.backward(model(torch.full((1, 2), torch.inf)).sum())
    training.update(0)
    momenta = [state.get("momentum_buffer") for state in training.optimizer.state.values()]
    assert all(momentum is None or not momentum.any() for momentum in momenta)


# --- records


def test_the_forecast_is_right_from_the_first_epoch_on():
    """It knows only the steps that were made, and does not jump when the images become larger."""
    options = ("--epochs=12", "--amp=bf16", "--global-batch-size=2")
    training = with_model(of_pixels(), *options, num_images=390)
    training.data = Data("", 10, 32, training.data.train, images(78))
    step_s = {16: 0.046, 24: 0.092, 32: 0.138}  # measured on two cores
    epochs = [step // 195 for step in range(training.num_steps)]
    times = [(training.side(epoch), step_s[training.side(epoch)]) for epoch in epochs]
    forecasts = []
    for step in range(50, len(times), 5):
        scores = sum(training.is_scored(epoch) for epoch in range(step // 195, 12)) + 5
        right = sum(seconds for _, seconds in times[step:]) + scores * 13 * step_s[32]
        training._by_side = {}
        for side, seconds in times[:step]:
            training._by_side.setdefault(side, []).append(seconds)
        forecasts.append(training.seconds_left(step))
        assert forecasts[-1] == pytest.approx(right, rel=0.2), step
    changes = [before - after for before, after in pairwise(forecasts)]
    assert max(map(abs, changes)) < 0.08 * forecasts[0]


# --- the ideas of benchmarks/accuracy.py


def of_ideas(num_images: int, **settings: Any) -> Trainer:
    """A training of the small net with these ideas, in batches of four."""
    ideas = trial(configured("--amp=off", "--batch-size=4", "--epochs=2"), **settings)
    source = images(num_images, seed=0, max_shift=2)
    return training_of(ideas, source, source, kind=Trial)


def test_alternating_images_are_mirrored_in_every_second_epoch():
    pixels, labels = torch.arange(20 * 3072).reshape(20, 32, 32, 3) % 256, torch.arange(20)
    how = {"device": CPU, "mean": HALF, "std": HALF, "seed": 3, "max_shift": 0}
    source = Alternating(pixels.byte().numpy(), labels.numpy(), **how)
    first, second, third = (
        next(source.batches([torch.arange(20)], epoch=epoch))[0] for epoch in range(3)
    )
    assert torch.equal(second, first.flip(3))
    assert torch.equal(third, first)
    assert 0 < sum(image[0, 0, 0] > image[0, 0, 31] for image in first) < 20


def test_dirac_filters_pass_their_input_on():
    conv = of_ideas(8, dirac=True).model.blocks[0].conv1
    ((batch, _),) = images(4).batches([torch.arange(4)], epoch=0)
    batch = batch.repeat(1, 8, 1, 1)
    torch.testing.assert_close(conv(batch)[:, : conv.in_channels], batch)


def test_the_head_and_the_biases_have_rates_of_their_own():
    training = of_ideas(16, head_lr=2.0, bias_lr=0.5, final_lr=0.25)
    lr = [made.lr for made in training.steps(0)]
    assert lr[-1] == pytest.approx(max(lr) * (1 - 0.75 * 5 / 6))
    rates = [group["lr"] for group in training.optimizer.param_groups]
    assert rates == pytest.approx([lr[-1], 2 * lr[-1], lr[-1] / 2])


def test_the_average_of_the_last_epochs_weighs_all_models_alike():
    training = of_ideas(64, average_epochs=1.0)
    models = []
    for made in training.steps(0):
        if made.number in (24, 32):
            models.append(copy.deepcopy(training.model.state_dict()))
        assert bool(training.average) == (made.number >= 24)
    for name, value in training.average.items():
        if value.is_floating_point():
            expected = (models[0][name] + models[1][name]) / 2
            torch.testing.assert_close(value, expected)
    before = copy.deepcopy(training.model.state_dict())
    score = training.evaluate(training.data.test)
    assert all(map(torch.equal, before.values(), training.model.state_dict().values()))
    training.average.clear()
    assert training.evaluate(training.data.test).loss != score.loss


@pytest.mark.parametrize("views", [2, 6])
def test_a_score_of_views_is_of_their_mean_logits(views):
    training = of_ideas(40)
    test = images(40)
    score = training.evaluate(test, views=views)
    ((batch, labels),) = test.batches([torch.arange(40)], epoch=0)
    large = F.pad(batch, (1, 1, 1, 1), mode="reflect")
    weights = {(1, 1): 1.0} if views == 2 else {(1, 1): 0.5, (0, 0): 0.25, (2, 2): 0.25}
    model, logits = training.model.eval(), torch.zeros(40, 10)
    for (y, x), weight in weights.items():
        view = large[:, :, y : y + 32, x : x + 32]
        logits += weight * (model(view) + model(view.flip(3))) / 2
    assert score.accuracy_of_views == pytest.approx(
        float((logits.argmax(1) == labels).float().mean())
    )
    assert training.evaluate(test).accuracy_of_views == score.accuracy


# --- the model and its score


def test_an_evaluation_is_compiled_once_for_its_one_size(monkeypatch):
    """Ten images in batches of at most four: the last batch has as many as the others, and counts fewer."""
    # without a C++ compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("mpiddp.train.train.BATCH_PIXELS", 4 * 32 * 32)
    source = images(10)
    training = training_of(configured(*SMALL, "--compile=on"), source)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    score = training.evaluate(source)
    assert graphs["unique_graphs"] == before + 1
    ((batch, labels),) = source.batches([torch.arange(10)], epoch=0)
    logits = training.model.eval()(batch)
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
    of_pixels = partial(DeviceImages, device=CPU, mean=HALF, std=HALF)
    train = of_pixels(pixels[:320], labels[:320], seed=0, max_shift=2)
    test = of_pixels(pixels[320:], labels[320:])
    training = training_of(configured("--amp=off", "--batch-size=32"), train, test)
    before = training.evaluate(test)
    *_, last = training.steps(0)
    score = training.evaluate(test)
    assert (last.number, last.is_last) == (60, True)
    assert before.accuracy < 0.3
    assert score.accuracy > 0.8
