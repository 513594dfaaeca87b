"""The options of `mpiddp train`, what follows from the machines, what a resume may change."""

import re
from dataclasses import replace

import pytest
import torch

from mpiddp.errors import UserError
from mpiddp.train.config import parse, resolve
from mpiddp.train.data import DATASETS
from mpiddp.train.main import half_the_memory
from mpiddp.train.muon import fast_dtype
from mpiddp.train.train import recipe_for
from tests.support.training import configured


def test_the_long_help_has_every_option(capsys):
    with pytest.raises(SystemExit):
        parse(["--help-all"])
    flags = {f"--{setting.replace('_', '-')}" for setting in vars(parse([]))}
    assert flags <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


@pytest.mark.parametrize(("amp", "epochs"), [("off", 6), ("bf16", 13)])
def test_the_defaults_follow_from_the_device(amp, epochs, monkeypatch):
    """A CPU without instructions for bf16 trains for fewer epochs."""
    dtype = {"off": torch.float32, "bf16": torch.bfloat16}[amp]
    monkeypatch.setattr("mpiddp.train.train.fast_dtype", lambda device: dtype)
    on_cpu = configured(ranks=2)
    assert (on_cpu.arch, on_cpu.stem, on_cpu.optimizer) == ("whitened_resnet8", "whitened", "muon")
    assert (on_cpu.amp, on_cpu.epochs, on_cpu.global_batch_size) == (amp, epochs, 256)
    assert len(on_cpu.sides) == epochs
    assert list(on_cpu.sides) == sorted(on_cpu.sides)
    assert {*on_cpu.sides} == {16, 24, 32}
    sharded = configured("--parallel=fsdp")
    assert sharded.optimizer == "sgd"
    folder = configured("--dataset=image-folder")
    assert (folder.arch, folder.image_size, folder.stem) == ("resnet18", 224, "imagenet")
    for options in (("--arch=whitened_resnet8", "--dataset=image-folder"), ("--stem=cifar",)):
        with pytest.raises(UserError, match="whitened_resnet8 is for CIFAR"):
            configured(*options)


def test_a_model_that_the_user_names_has_its_own_stem():
    """The guides train torchvision's ResNets on 32×32 images. The default on GPUs is for CIFAR-10."""
    guides = "--use_syn", "--batch_size=8192", "--arch=resnet152"
    assert configured(*guides).stem == "imagenet"
    assert configured(*guides, "--stem=cifar").stem == "cifar"
    assert configured("--arch=resnet20").stem == "cifar"
    on_gpu = resolve(parse(["--amp=off"]), 1, torch.device("cuda"))
    assert (on_gpu.arch, on_gpu.stem) == ("resnet18", "cifar")


def test_large_images_on_a_gpu_are_compiled():
    folder = ("--dataset=image-folder", "--amp=off")
    for device, options, mode in (
        ("cuda", (), "on"),
        ("cpu", (), "off"),
        ("cuda", ("--compile=off",), "off"),
        ("cuda", ("--parallel=fsdp",), "off"),
        ("cuda", ("--image-size=32",), "off"),
    ):
        assert resolve(parse([*folder, *options]), 1, torch.device(device)).compile == mode


def test_a_full_gpu_says_which_options_keep_the_global_batch():
    written = parse(["--batch-size=64", "--grad-accum-steps=2"])
    before = resolve(written, 3, torch.device("cpu"))
    fix = half_the_memory(written, before)
    (options,) = re.findall(r" the same .*: (--.*) in the place of --batch-size$", fix)
    after = configured(*options.split(), ranks=3)
    assert after.global_batch_size == before.global_batch_size
    assert after.batch_size == before.batch_size / 2


def test_the_global_batch_is_split_over_the_ranks_also_unevenly():
    assert configured("--batch-size=8", ranks=3).global_batch_size == 24
    assert configured("--global-batch-size=24", "--grad-accum-steps=2", ranks=3).batch_size == 4
    assert configured("--global-batch-size=25", ranks=3).batch_size == 9
    assert configured("--global-batch-size=3", "--arch=resnet20", ranks=3).batch_size == 1
    with pytest.raises(
        UserError,
        match=r"--global-batch-size 5 .* of 3 ranks .*\n  fix: --global-batch-size 6, or more",
    ):
        configured("--global-batch-size=5", ranks=3)


def test_a_torch_without_onednn_has_no_fast_bf16(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", object(), raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert fast_dtype.__wrapped__(torch.device("cpu")) is torch.float32


def test_a_recipe_has_the_size_of_the_images(monkeypatch):
    """The row of the data set says it, or else the recipe."""
    monkeypatch.setitem(DATASETS, "cifar100", replace(DATASETS["cifar100"], image_size=64))
    assert recipe_for("cifar100", torch.device("cpu")).image_size == 64
    assert recipe_for("image-folder", torch.device("cpu")).image_size == 224


def test_each_data_set_has_a_recipe_on_each_device():
    """A GPU has the recipe of 94 %, and computes in bf16 if it can."""
    for dataset in DATASETS:
        for device in (torch.device("cpu"), torch.device("cuda")):
            for amp in ("bf16", "off"):
                recipe = recipe_for(dataset, device, amp)
                assert (recipe.dataset, recipe.amp) == (dataset, amp)
    on_gpu = recipe_for("cifar10", torch.device("cuda"), "bf16")
    assert (on_gpu.arch, on_gpu.stem, on_gpu.epochs, on_gpu.lr) == ("resnet18", "cifar", 30, 0.4)
    assert configured("--dataset=cifar100").arch == "whitened_resnet8"
