"""The parts of a training step, Muon, and the augmentation of images on the device, without ranks.

Tests mpiddp/train/train.py, state.py, muon.py and data.py.
"""

import copy
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpiddp.train.measure import Forecast, StepTimer
from mpiddp.train.order import Order
from mpiddp.train.state import State, build_model, build_optimizer, build_state, stride_as_gradients
from torch import Tensor, nn

from mpiddp.checkpoints.resumed import Resumed
from mpiddp.train.data import Data, DeviceImages
from mpiddp.train.muon import fast_dtype, orthogonal
from mpiddp.train.resnet import ARCHS, zero_init
from mpiddp.train.train import evaluate, fit, load, time_passes, train_step
from tests.support.training import configured


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


PASS = ["data", "forward", "backward"]
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        (["--grad-accum-steps=2"], [*PASS, *PASS, "waiting"]),
        (["--clip-grad-norm=1"], [*PASS, "waiting"]),  # clipping is a part of the optimizer
        (["--sync-bn"], PASS),  # each BatchNorm waits for other ranks
    ],
)
def test_the_phases_of_a_step(options, phases, monkeypatch):
    config = configured("--use-syn", "--batch-size=2", *options)
    batch = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8), torch.nn.Flatten())
    state, ends = build_state(model, config), list[str]()
    monkeypatch.setattr(state.timer, "phase_ends", ends.append)
    train_step(state, iter([batch] * config.grad_accum_steps), 0.1, config)
    assert [phase for phase, _ in groupby(ends)] == phases


def test_weight_decay_excludes_batch_norm_and_biases():
    options = ("--optimizer=sgd", "--weight-decay=0.01", "--momentum=0")
    model = ARCHS["resnet20"]()
    decayed, excluded = build_optimizer(model, configured(*options)).param_groups
    found = [(each["weight_decay"], each["momentum"]) for each in (decayed, excluded)]
    assert found == [(0.01, 0.0), (0.0, 0.0)]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(decayed["params"]) + len(excluded["params"]) == len(names)
    for parameter in decayed["params"]:
        assert re.search(r"conv\d\.weight$|^fc\.weight$", names[id(parameter)])
    for parameter in excluded["params"]:
        assert re.search(r"bn\d\.(weight|bias)$|^fc\.bias$", names[id(parameter)])


def test_one_rank_trains_the_bare_model_and_smooths_its_labels():
    for smoothing in (0.0, 0.5):
        config = configured("--use-syn", "--amp=off", f"--label-smoothing={smoothing}")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8), torch.nn.Flatten())
        batch = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
        kwargs = {"reduction": "sum", "label_smoothing": smoothing}
        expected = F.cross_entropy(model(batch[0]), batch[1], **kwargs)
        state = build_state(model, config)
        assert state.ddp is model
        loss = train_step(state, iter([batch]), 0.1, config).item()
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_the_options_of_the_recipe():
    assert configured().weight_decay == 5e-4
    assert configured("--dataset=image-folder").weight_decay == 1e-4
    for arch, last in (("resnet18", "bn2"), ("resnet50", "bn3")):
        model = ARCHS[arch](num_classes=2)
        zero_init(model)
        zeros = [name for name, each in model.named_parameters() if not each.any()]
        assert {f"layer1.0.{last}.weight", f"layer4.1.{last}.weight"} <= {*zeros}
        assert "bn1.weight" not in zeros


def test_an_evaluation_is_compiled_once_for_its_one_size(monkeypatch):
    """Ten images in batches of at most four: the last batch has as many as the others, and counts fewer."""
    config = configured("--use-syn", "--amp=off", "--batch-size=4", "--compile=on")
    config = replace(config, image_size=500)
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="eager")
    )  # without a C++ compiler
    images = source(10)
    model = nn.Sequential(nn.Conv2d(3, 10, 32), nn.BatchNorm2d(10), nn.Flatten())
    state = build_state(model, config)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    score = evaluate(state, images, config)
    assert graphs["unique_graphs"] == before + 1
    ((batch, labels),) = images.batches([torch.arange(10)], epoch=0)
    logits = model.eval()(batch)
    assert score.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    assert score.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_images_are_channels_last_whatever_the_weights_are():
    """fully_shard takes contiguous weights; a GPU convolves such images at twice the speed all the same."""
    config = configured("--parallel=fsdp", "--arch=resnet20")
    images = source(4)
    model = build_model(config, Data("", 10, images, None), torch.device("cpu"))
    assert all(each.is_contiguous() for each in model.parameters())
    ((batch, _),) = images.batches([torch.arange(4)], epoch=0)
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_is_saved_before_it_is_scored(monkeypatch):
    """As for any model: one without BatchNorm has no statistics to average over two ranks."""
    calls, images = Mock(), source(4)
    config = configured("--optimizer=sgd", "--batch-size=2", "--epochs=1", "--low-res-epochs=0")
    state = build_state(nn.Sequential(nn.Conv2d(3, 10, 32), nn.Flatten()), config)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("mpiddp.should_stop", lambda: False)
    monkeypatch.setattr("mpiddp.train.train.save", calls.save)
    monkeypatch.setattr("mpiddp.train.train.evaluate", calls.evaluate)
    fit(config, Data("", 10, images, images), Order(4, 2, 1, 0, 1, 0), state, calls, step=0)
    called = [name for name, *_ in calls.mock_calls]
    assert called == ["due", "save", "due", "save", "evaluate", "close"]


def test_weights_of_1x1_convolutions_have_the_strides_of_their_gradients():
    """As in torch's own warning: grad.sizes() = [64, 64, 1, 1], strides() = [64, 1, 64, 64]."""
    model = ARCHS["resnet50"]()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    stride_as_gradients(model)
    weight = model.get_parameter("layer1.0.conv1.weight")
    assert weight.stride() == (64, 1, 64, 64)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_momentum_is_restored_in_the_layout_of_the_parameters():
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
        scaler, timer = torch.amp.GradScaler("cpu"), StepTimer(torch.device("cpu"))
        load(Resumed(1, saved), State(model, model, model, resumed, scaler, timer))
        model(image).square().sum().backward()
        resumed.step()
        stepped.append(model.weight.detach().clone())
    # The weights are some hundreds. Each is a sum whose order depends on the layout, so a small one may
    # lose all its digits. A misplaced momentum changes the weights by their own size.
    torch.testing.assert_close(*stepped, rtol=0, atol=1e-5 * stepped[0].abs().max().item())


def test_a_first_step_that_overflows_leaves_no_momentum():
    """torch's fused SGD would leave an uninitialized one, and use it in later steps."""
    model = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(model, configured("--amp=fp16"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((1, 2), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    momenta = [state.get("momentum_buffer") for state in optimizer.state.values()]
    assert all(momentum is None or not momentum.any() for momentum in momenta)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128, 3, 3), (64, 4, 3, 3), (16, 64, 1, 1)])
def test_an_update_moves_the_weights_about_as_far_in_every_direction(shape, dtype, monkeypatch):
    monkeypatch.setattr("mpiddp.train.muon.fast_dtype", lambda device: dtype)
    torch.manual_seed(0)
    gradient = torch.randn(shape) * torch.logspace(-1, 1, shape[0]).view(-1, 1, 1, 1)
    update, other = orthogonal(torch.stack([gradient, 9 * gradient.flip(1)]))
    assert update.shape == shape
    assert torch.equal(update, update.bfloat16()) == (dtype is torch.bfloat16)
    torch.testing.assert_close(other, orthogonal(gradient.flip(1)[None])[0], rtol=0, atol=0.02)
    before, after = (
        torch.linalg.svdvals(each.reshape(shape[0], -1)) for each in (gradient, update)
    )
    assert before.max() > 30
    assert after.max() < 1.3
    assert after.max() / after.min() < before.max() / before.min() / 3


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> list[Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return [weights.detach().clone() for weights in model.parameters() if weights.requires_grad]


def test_filters_keep_their_norm_and_other_parameters_are_those_of_sgd():
    model = ARCHS["whitened_resnet8"]().to(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    by_muon = stepped(build_optimizer(model, configured("--lr=0.1")), model, 3)
    sgd = build_optimizer(other, configured("--lr=0.1", "--optimizer=sgd"))
    by_sgd = stepped(sgd, other, 3)
    for muon, plain in zip(by_muon, by_sgd, strict=True):
        if muon.ndim == 4:
            assert muon.norm() == pytest.approx(len(muon) ** 0.5, rel=0.1)
        else:
            torch.testing.assert_close(muon, plain)


def source(num_images: int) -> DeviceImages:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (num_images, 32, 32, 3), dtype=np.uint8)
    labels = draw.integers(0, 10, num_images)
    return DeviceImages(images, labels, configured(), torch.device("cpu"), augment=False)


def test_the_first_convolution_gives_uncorrelated_values_and_is_not_trained():
    images = source(200)
    config = configured()
    model = build_model(config, Data("", 10, images, None), torch.device("cpu"))
    ((batch, _),) = images.batches([torch.arange(200)], epoch=0)
    values = model.get_submodule("conv1")(batch).transpose(0, 1).flatten(1)[:12]
    products = (values @ values.T / values.shape[1]).detach()
    assert products.diagonal().min() > 0.5
    assert (products - products.diagonal().diag()).abs().max() < 0.01
    before = model.get_parameter("conv1.weight").clone()
    stepped(build_optimizer(model, config), model, 1)
    assert torch.equal(model.get_parameter("conv1.weight"), before)


def test_the_forecast_counts_smaller_images_and_evaluations():
    """Before the first step it knows the passes alone. Here, a step also takes 2 s for other work."""
    config = replace(configured(), epochs=4, low_res_epochs=3)
    forecast = Forecast(config, 10, {16: 1.0, 24: 2.0, 32: 4.0}, evaluation_s=7.0)
    assert forecast.left_s(0, 0) == 20 * 1 + 10 * 2 + 10 * 4 + 7
    assert forecast.left_s(5, 0, step_s=3.0) == 15 * 3 + 10 * 4 + 10 * 6 + 7
    assert forecast.left_s(30, 0, step_s=4.0) == 10 * 6 + 7
    assert forecast.left_s(40, 0, step_s=6.0) == 7
    assert forecast.left_s(40, 40, step_s=6.0) == 0


def test_timing_the_passes_changes_nothing():
    config = configured("--batch-size=2", "--amp=off")
    images = source(4)
    state = build_state(
        build_model(config, Data("", 10, images, None), torch.device("cpu")), config
    )
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    assert list(time_passes(state, config)) == [16, 24, 32]
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    assert all(weights.grad is None for weights in state.model.parameters())
    state.timer.resume()
    assert state.timer.read() == []
    assert sum(state.timer.spent.values()) == 0.0


@pytest.mark.parametrize(
    ("flags", "limits", "dtype"),
    [
        ("avx2 avx512f avx512_bf16", ("AVX512", True), torch.bfloat16),
        ("avx2 avx512f", ("AVX512", True), torch.float32),  # oneDNN emulates bf16
        ("avx2 avx512f avx512_bf16", ("AVX2", True), torch.float32),
        ("avx2 avx512f avx512_bf16", ("AVX512", False), torch.float32),
        ("avx2", ("AVX2", False), torch.float32),
        ("asimd bf16", ("DEFAULT", True), torch.bfloat16),  # Arm
    ],
)
def test_the_type_in_which_a_processor_computes_fast(flags, limits, dtype, monkeypatch):
    text = f"processor\t: 0\nflags\t\t: {flags}\n"
    supported = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: limits[1])
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.open", lambda *_args, **_kwargs: io.StringIO(text))
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: limits[0])
        patch.setattr(torch.ops, "mkldnn", supported)
        found = fast_dtype.__wrapped__(torch.device("cpu"))
    assert found is dtype
