"""The options of `mpiddp train`, the defaults that follow from the machines, and what a resume may change.

Tests mpiddp/train/config.py, run.py.
"""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from mpiddp import Announced
from mpiddp.errors import UserError
from mpiddp.train.config import FIXED, OF_RUN, parse, resolve, split_batch
from mpiddp.train.run import out_of_memory, resume_args
from tests.support.ranks import ROOT
from tests.support.training import configured


def test_the_lists_of_options_name_options():
    assert {*FIXED, *OF_RUN} <= vars(parse([])).keys()


def test_the_defaults_follow_from_the_device():
    on_cpu = configured(ranks=2)
    assert (on_cpu.arch, on_cpu.stem, on_cpu.optimizer) == ("wide_resnet14_2", "half", "muon")
    assert (on_cpu.global_batch_size, on_cpu.epochs, on_cpu.low_res_epochs) == (128, 7, 4)
    sharded = configured("--parallel=fsdp")
    assert sharded.optimizer == "sgd"
    folder = configured("--dataset=image-folder", "--arch=resnet50")
    assert (folder.image_size, folder.stem) == (224, "imagenet")


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
    torch_says = (ROOT / "tests/data/failures/cuda-out-of-memory.txt").read_text()
    error = torch.OutOfMemoryError(torch_says.partition("Error: ")[2])
    written = parse(["--batch-size=64", "--grad-accum-steps=2"])
    before = resolve(written, 3, torch.device("cpu"))
    sentence = out_of_memory(error, written, before)
    assert sentence.startswith("CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has ")
    (options,) = re.findall(r" The same .*: (--.*) in the place of --batch-size\.$", sentence)
    after = configured(*options.split(), ranks=3)
    assert after.global_batch_size == before.global_batch_size
    assert after.batch_size == before.batch_size / 2


def test_the_global_batch_is_split_over_the_ranks_also_unevenly():
    assert configured("--batch-size=8", ranks=3).global_batch_size == 24
    assert configured("--global-batch-size=24", "--grad-accum-steps=2", ranks=3).batch_size == 4
    assert configured("--global-batch-size=25", ranks=3).batch_size == 9
    assert configured("--global-batch-size=3", ranks=3).batch_size == 1  # the user's wish
    with pytest.raises(UserError, match=r"--global-batch-size 5 .* of 3 ranks .* Use 6 or more"):
        configured("--global-batch-size=5", ranks=3)


@pytest.mark.parametrize(
    ("options", "ranks_before"),
    [
        (["--batch-size", "4", "--seed", "1"], 3),
        (["--batch_size=4", "--seed", "1"], 3),
        (["--global-batch-size", "12", "--seed", "1"], 3),
        (["--seed", "1", "--grad-accum-steps", "3", "--batch-size", "1"], 4),
        (["--seed", "1", "--grad-accum-steps", "3", "--global-batch-size=12"], 1),
    ],
)
@pytest.mark.parametrize(("ranks", "passes"), [(1, 3), (2, 2), (3, 1), (4, 1)])
def test_a_restart_keeps_the_global_batch(options, ranks_before, ranks, passes):
    """A pass has at most 4 images, as before. In the case with 1 image, it gets 2 where possible."""
    written = parse(options)
    before = Announced(global_batch_size=12, world_size=ranks_before)
    if ranks == ranks_before:
        passes = written.grad_accum_steps
    elif written.batch_size == 1:
        passes = max(1, 6 // ranks)  # two images per pass, which BatchNorm needs
    assert split_batch(written, before, ranks, 64) == {
        "global_batch_size": 12,
        "grad_accum_steps": passes,
        "batch_size": math.ceil(12 / (passes * ranks)),
    }


def test_the_arguments_that_resume_a_run(tmp_path):
    out = tmp_path / "run"

    def args(**options: Any) -> list[str]:
        return resume_args(replace(configured(), **options), out)

    assert args() == ["--out", str(out)]
    assert args(out=str(out)) == []
    assert args(out=str(out), resume=str(tmp_path / "other")) == []
    back = str(out / "checkpoints" / "step_00000001")
    assert args(out=str(out), resume=back) == ["--resume", "auto"]
