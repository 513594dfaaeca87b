"""The options of `mpiddp train`: their spellings, errors in one sentence, and which a resume may change.

Tests mpiddp/train/config.py.
python -m pytest tests/integration/train/test_config.py
"""

import json
import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from mpiddp.errors import UserError
from mpiddp.train.architectures import ARCHITECTURES
from mpiddp.train.config import TrainConfig, changed_options
from mpiddp.train.option_parser import options_of
from mpiddp.train.options import TrainOptions, parse
from mpiddp.train.parallel import check_compression
from mpiddp.train.schedule import SCHEDULES, learning_rate, scaled_lr
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.training import configured


def refusal(*options: str, ranks: int = 1) -> str:
    with pytest.raises(UserError) as caught:
        configured(*options, ranks=ranks)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Spellings


def test_the_command_line_of_the_guides() -> None:
    """Guides to distributed training write these options with underscores."""
    config = parse(["--backend=gloo", "--use_syn", "--batch_size=8192", "--arch=resnet152"])
    assert config == parse(
        ["--backend", "gloo", "--use-syn", "--batch-size", "8192", "--arch", "resnet152"]
    )
    assert (config.backend, config.use_syn, config.batch_size) == ("gloo", True, 8192)


def test_underscores_in_values_are_kept() -> None:
    config = parse(["--data_dir=my_data", "--out", "__runs__", "--weights=w_1.pt"])
    assert (config.data_dir, config.out, config.weights) == ("my_data", "__runs__", "w_1.pt")


@pytest.mark.parametrize("option", ["--local-rank=0", "--local_rank=3"])
def test_local_rank_of_torch_distributed_launch_is_ignored(option: str) -> None:
    assert parse([option]) == parse([])


def test_switches() -> None:
    config = parse(["--no-channels-last", "--no_lr_scaling", "--keep_tail", "--compile"])
    assert not config.channels_last
    assert not config.lr_scaling
    assert config.keep_tail
    assert config.compile == "default"
    assert parse([]).channels_last
    assert parse([]).lr_scaling


def test_help_lists_every_arch_without_torch() -> None:
    program = (
        "import sys; from mpiddp.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert all(arch in shown.stdout for arch in ARCHITECTURES)


# Batch sizes


def test_a_batch_size_per_rank() -> None:
    config = configured("--batch-size=8", "--grad-accum-steps=2", ranks=3)
    assert (config.batch_size, config.global_batch_size) == (8, 48)


def test_global_batch_size_is_split_over_the_ranks() -> None:
    config = configured("--global-batch-size=48", "--grad-accum-steps=2", ranks=3)
    assert (config.batch_size, config.global_batch_size) == (8, 48)


def test_global_batch_size_not_divisible_by_the_ranks() -> None:
    parts = "3 ranks × 2 accumulation steps = 6"
    values = ("--global-batch-size 50 ", parts, "48 or 54, or --uneven.")
    said = refusal("--global-batch-size=50", "--grad-accum-steps=2", ranks=3)
    assert re.fullmatch(error("not divisible", *values), said), said
    said = refusal("--global-batch-size=2", ranks=4)
    values = ("--global-batch-size 2 ", "4 ranks", "Use 4.")
    assert re.fullmatch(error("not divisible", *values), said), said
    said = refusal("--global-batch-size=6", "--uneven", ranks=4)
    values = ("--global-batch-size 6 ", "4 ranks", "8 or more")
    assert re.fullmatch(error("gives some", *values), said), said


def test_uneven_splits_a_global_batch_size_with_a_remainder() -> None:
    config = configured("--global-batch-size=50", "--grad-accum-steps=2", "--uneven", ranks=3)
    assert (config.batch_size, config.global_batch_size) == (9, 50)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_global_batch_sizes_that_the_error_proposes_are_accepted(ranks: int) -> None:
    for size in range(1, 40):
        options = ("--grad-accum-steps=2",)
        if size % (2 * ranks) == 0:
            continue
        message = refusal(f"--global-batch-size={size}", *options, ranks=ranks)
        proposed = message.rpartition(". Use ")[2].removesuffix(".")
        if proposed.endswith(", or --uneven"):
            uneven = configured(f"--global-batch-size={size}", *options, "--uneven", ranks=ranks)
            assert uneven.global_batch_size == size
        for proposal in proposed.removesuffix(", or --uneven").split(" or "):
            config = configured(f"--global-batch-size={proposal}", *options, ranks=ranks)
            assert config.global_batch_size == int(proposal)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_powersgd_over_gloo_beside_a_gpu() -> None:
    config = configured("--grad-compression=powersgd")
    mends = ("CUDA_VISIBLE_DEVICES=, ", "--grad-compression bf16")
    sentence = error("powersgd over", "--grad-compression powersgd ", "gloo ", *mends)
    with pytest.raises(UserError, match=f"^{sentence}$"):
        check_compression(config, torch.device("cpu"))


# Defaults that depend on the machine


def test_defaults_on_cpu_and_gpu() -> None:
    cpu, gpu = configured(), configured(on_gpu=True, bf16=True, ranks=8)
    assert (cpu.arch, cpu.amp, cpu.batch_size) == ("wide_resnet14_2", "off", 64)
    assert (gpu.arch, gpu.amp, gpu.batch_size) == ("resnet18", "bf16", 256)
    assert (cpu.epochs, cpu.low_res_epochs, cpu.max_shift, cpu.optimizer) == (7, 4, 2, "muon")
    assert (gpu.epochs, gpu.low_res_epochs, gpu.max_shift, gpu.optimizer) == (30, 0, 4, "sgd")
    assert configured("--epochs=2").low_res_epochs == 1
    assert configured("--epochs=2", "--low-res-epochs=2").low_res_epochs == 2
    for other in ("--arch=resnet20", "--parallel=fsdp", "--amp=fp16"):
        assert configured(other).optimizer == "sgd"
    assert gpu.global_batch_size == 2048
    assert configured(bf16=True).amp == "bf16"
    assert configured("--amp=fp16", bf16=True).amp == "fp16"
    assert configured("--arch=resnet50", "--epochs=7").arch == "resnet50"


def test_sync_bn_needs_images_on_every_rank() -> None:
    assert configured("--sync-bn").sync_bn
    said = refusal("--sync-bn", "--keep-tail")
    assert re.fullmatch(error("--keep-tail and", "--keep-tail ", "--sync-bn "), said), said


# Bad values


# Differences between a checkpoint and the run that resumes it


def saved(config: TrainConfig) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(config.as_json()))
    return loaded


def changes(saved: dict[str, Any], config: TrainConfig) -> list[str]:
    return [str(change) for change in changed_options(saved, config)]


def test_the_same_configuration_has_no_changes() -> None:
    config = configured("--lr=0.1", "--warmup-epochs=0.3", "--steps-per-epoch=7")
    assert changes(saved(config), config) == []


def test_another_split_of_the_same_global_batch_is_no_difference() -> None:
    before = configured("--global-batch-size=64", ranks=1)
    after = configured("--global-batch-size=64", "--grad-accum-steps=2", ranks=4)
    assert before.batch_size != after.batch_size
    assert changes(saved(before), after) == []


def test_a_config_json_has_every_option_in_order() -> None:
    options = parse(["--save-every=20"])
    assert list(configured("--save-every=20").as_json()) == list(vars(options))
    assert saved(configured("--save-every=20"))["save_every"] == {"steps": 20, "seconds": None}


def test_every_difference_is_listed_and_those_of_past_steps_are_refused() -> None:
    before = configured("--lr=0.1", "--seed=3", "--epochs=4")
    after = configured("--lr=0.2", "--keep-tail", "--seed=3", "--epochs=8", "--out=x", "--keep=7")
    assert changes(saved(before), after) == [
        "--keep-tail False, now True (its steps and epochs are counted in other sizes)",
        "--epochs 4, now 8",
        "--low-res-epochs 2, now 4",
        "--lr 0.1, now 0.2",
    ]
    assert changes(saved(configured()), configured("--no-lr-scaling")) == [
        "--no-lr-scaling False, now True"
    ]
    assert changes(saved(configured(ranks=2)), configured()) == [
        "--global-batch-size 128, now 64 (its steps and epochs are counted in other sizes)"
    ]


def test_a_default_that_is_spelled_out_is_no_change() -> None:
    folder = ("--dataset=image-folder", "--data-dir=x", "--arch=resnet18")
    spelled = configured(*folder, "--stem=imagenet", "--image-size=224")
    assert changes(saved(configured(*folder)), spelled) == []
    assert changes(saved(configured(*folder)), configured(*folder, "--stem=cifar")) == [
        "--stem auto, now cifar (its tensors have other shapes)"
    ]


def test_what_a_resume_may_change() -> None:
    options = options_of(TrainOptions)
    assert {name for name, about in options.items() if about.fixed} == {
        "arch", "stem", "dataset", "use_syn", "image_size", "global_batch_size", "keep_tail",
        "steps_per_epoch", "seed", "optimizer",
    }  # fmt: skip
    assert {name for name, about in options.items() if about.noted} == {
        "epochs", "max_shift", "low_res_epochs", "lr", "lr_scaling", "schedule", "warmup_epochs", "momentum",
        "weight_decay", "label_smoothing", "sync_bn", "amp", "grad_compression", "clip_grad_norm",
    }  # fmt: skip


def test_a_config_from_before_an_option_is_that_of_its_first_value() -> None:
    then = ("--arch=resnet20", "--low-res-epochs=0", "--max-shift=4")
    older = saved(configured(*then))
    for name in ("clip_grad_norm", "parallel", "max_shift", "low_res_epochs", "optimizer"):
        del older[name]
    assert changes(older, configured(*then)) == []
    assert changes(older, configured("--arch=resnet20", "--optimizer=muon")) == [
        "--max-shift 4, now 2",
        "--low-res-epochs 0, now 4",
        "--optimizer sgd, now muon (its optimizer has another state)",
    ]


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp"])
def test_what_shards_do_not_have_is_refused(parallel: str) -> None:
    sharded = f"--parallel={parallel}"
    for option, id in {
        "--compile": "--compile and",
        "--grad-compression=bf16": "replaces",
        "--sync-bn": "--sync-bn and",
        "--optimizer=muon": "--optimizer muon",
    }.items():
        said = refusal(option, sharded)
        values = (f"{option.replace('=', ' ')} ", f"--parallel {parallel} ")
        assert re.fullmatch(error(id, *values), said), said
    if parallel == "fsdp":
        said = refusal("--check-divergence=9", sharded)
        values = ("--check-divergence ", "--parallel fsdp: ", "--parallel hsdp,")
        assert re.fullmatch(error("--check-divergence has", *values), said), said
    else:
        assert configured("--check-divergence=9", sharded).check_divergence == 9
    said = refusal("--clip-grad-norm=0")
    values = ("argument --clip-grad-norm: ", "greater than 0, ", "'0'")
    assert re.fullmatch(error("--help", *values), said), said
    assert not configured(sharded).channels_last


def test_an_option_that_an_older_config_lacks_is_a_difference() -> None:
    config = configured()
    older = saved(config)
    del older["label_smoothing"]
    assert changes(older, config) == ["--label-smoothing None, now 0.0"]


# The learning rate


def lrs(schedule: str, warmup_steps: int, total_steps: int = 8, peak: float = 0.8) -> list[float]:
    return [
        learning_rate(s, total_steps, peak=peak, schedule=schedule, warmup_steps=warmup_steps)
        for s in range(total_steps)
    ]


def test_one_cycle_schedule() -> None:
    assert lrs("one-cycle", 4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.6, 0.4, 0.2])


def test_cosine_schedule() -> None:
    half = 0.4 * (1 + math.sqrt(0.5))
    assert lrs("cosine", 4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, half, 0.4, 0.8 - half])


def test_step_schedule() -> None:
    expected = [0.8] * 4 + [0.08] * 2 + [0.008, 0.0008]
    assert lrs("step", 0) == pytest.approx(expected)


def test_constant_schedule() -> None:
    assert lrs("constant", 2) == pytest.approx([0.4] + [0.8] * 7)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_learning_rate_is_positive_and_rises_in_warmup(schedule: str) -> None:
    for warmup_steps in (0, 1, 7, 8, 20):
        values = lrs(schedule, warmup_steps)
        assert all(0 < value <= 0.8 for value in values)
        assert values[: min(warmup_steps, 8)] == sorted(values[: min(warmup_steps, 8)])


def test_the_learning_rate_scales_with_the_global_batch() -> None:
    assert scaled_lr(0.1, 256) == 0.1
    assert scaled_lr(0.1, 8192) == pytest.approx(3.2)


def test_help_shows_only_meaningful_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    printed = capsys.readouterr().out
    assert "(default: warn)" in printed
    assert "(default: None)" not in printed
    assert "(default: True)" not in printed
