"""What only a GPU can show, on a machine with one or more. tests/promises has what CPUs show.

python -m pytest -m gpu tests/gpu
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpiddp.bench.measured_jobs import read_results
from mpiddp.hosts.gpu_faults import faults, notes, wrong_here
from mpiddp.hosts.gpu_health import read_health
from mpiddp.hosts.gpus import read_gpus
from mpiddp.train.data import DeviceImages, ImageFolder, Opening, on_a_side_stream
from tests.support.patience import within
from tests.support.place import Done, Here, program
from tests.support.ranks import ROOT, mpirun_command
from tests.support.tiny_data import image_folder
from tests.support.training import HALF, contents, losses, steps_kept, unequal

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs_gpu]
RANKS = str(ROOT / "tests/gpu/ranks.py")
NEVER = "--save-every=100000"
TINY = ("--arch=resnet20", "--use-syn", "--batch-size=8", "--epochs=1", "--log-every=1")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    place = Here(tmp_path)
    yield place
    place.clear()


def emitted(here: Here, *command: str, **env: str) -> dict[str, Any]:
    """The record that the ranks of a command emit."""
    (result,) = read_results(here.run(*command, env=env).assert_ok().lines)
    return result


def train(here: Here, ranks: int, out: str, *options: str) -> Done:
    """Train on forks of one process, which has imported torch. Two ranks share the GPU."""
    return here.fork(RANKS, "train", f"--out={out}", *options, ranks=ranks)


def assert_equal(here: Here, one: str, other: str, step: int) -> None:
    assert unequal(*(contents(here.folder / run, step) for run in (one, other))) == []


def images(here: Here) -> list[str]:
    """Options for real images, which workers decode and the side stream prepares."""
    data = image_folder(here.folder / "images", 170, 8)
    options = ["--dataset=image-folder", f"--data-dir={data}", "--image-size=64"]
    return [*options, "--num-workers=2", "--batch-size=32", "--compile=off"]


# ---- the device and the process group


def test_convolutions_in_fp32_use_tf32_and_matrix_products_do_not():
    def error(of: Any, *inputs: Tensor) -> float:
        exact = of(*inputs)
        rounded = of(*(each.float().cuda() for each in inputs)).double().cpu()
        return float((rounded - exact).norm() / exact.norm())

    draw = torch.Generator().manual_seed(0)
    shapes = ((8, 64, 32, 32), (64, 64, 3, 3), (512, 512))
    random = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    batch, weights, matrix = random
    assert error(torch.matmul, matrix, matrix) < 5e-6
    assert error(lambda a, b: F.conv2d(a, b, padding=1), batch, weights) > 5e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_group_forms_on_the_ranks_gpu_ends_and_forms_again(here, ranks):
    """Two ranks share the GPU."""
    facts = emitted(here, *mpirun_command(ranks, RANKS, "group"))
    expected = {"backend": "nccl", "device": "cuda:0", "bound": "cuda:0", "sum": float(ranks)}
    expected |= {"world_size": ranks, "ranks": [*range(ranks)], "gradient": (ranks - 1) / 2}
    assert facts == {"groups": [expected] * 2, "is_destroyed": True}


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_rank_that_fails_ends_the_job_although_its_group_stands(here, how):
    done = here.run("launch", *here.where(1), "--grace=2s", RANKS, "disturb", how).assert_code(1)
    assert f"planned {how}" in done.stdout
    assert "rank 0" in done.stderr


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_rank_that_fails_ends_one_that_is_in_a_collective(here, how):
    job = here.start(*mpirun_command(2, RANKS, "disturb", how)).until(f"planned {how}")
    with within(60):
        assert job.wait().code != 0


@pytest.mark.parametrize("how", ["sleeps", "differs", "times out"])
def test_who_does_not_come_to_a_collective_is_named(here, how):
    """A rank that waits in NCCL uses its core. NCCL's own timeout ends the process within C++."""
    options = [] if how == "times out" else ["--hang-timeout=20s"]
    done = here.run("launch", *here.where(2), *options, RANKS, "disturb", how).assert_code(1)
    call = r"all_reduce no\. \d+ \(float32, 1,048,576\)"
    named = rf"rank 1 on \S+ has not entered {call}, for which rank 0 has waited \d+ s; it is in disturb \("
    if how == "differs":
        other = r"broadcast no\. \d+ \(float32, 1,048,576\) of rank 1 on "
        named = rf"the ranks have called different collectives: {call} of rank 0 on \S+, {other}"
    output = done.stdout + done.stderr
    assert re.search(named, output), output
    assert not re.search(r"^frame #|^#\d+ .* from ", output, re.MULTILINE), output


def test_a_straggler_is_named(here):
    job = here.start("launch", *here.where(2), RANKS, "disturb", "is late")
    job.until(" is a straggler")
    assert re.search(r"rank 1 on .* is a straggler", job.stderr), job.stderr


def test_the_calls_of_nccl_are_read_while_a_graph_is_captured(here):
    facts = emitted(here, "launch", *here.where(1), RANKS, "capture")
    assert (facts["sum"], facts["groups"]) == (2000.0, 1)
    assert facts["reads"] > 1


def test_the_number_of_ranks_follows_the_visible_gpus(here):
    def group(*where: str, **env: str) -> dict[str, Any]:
        first: dict[str, Any] = emitted(here, "launch", *where, RANKS, "group", **env)["groups"][0]
        return first

    hidden = group(*here.where(2), CUDA_VISIBLE_DEVICES="")
    assert (hidden["world_size"], hidden["backend"]) == (2, "gloo")
    assert group()["world_size"] == torch.cuda.device_count()
    listed = here.run("nvidia-smi", "-L").assert_ok().stdout
    (uuid, *_) = re.findall(r"UUID: (GPU-[0-9a-f-]+)", listed)
    one = group(*here.where(2), CUDA_VISIBLE_DEVICES=uuid)
    assert (one["world_size"], one["device"]) == (1, "cuda:0")


# ---- what is seen of a GPU

HOLDS = """
import sys, torch
held = torch.ones(1 << 28, device="cuda")
print("holds", flush=True)
sys.stdin.read()
"""
WORKS = """
import time, torch
matrix = torch.ones(4096, 4096, device="cuda")
until = time.monotonic() + 35
while time.monotonic() < until:
    for _ in range(100):
        matrix = (matrix @ matrix).clamp(-1, 1)
    torch.cuda.synchronize()
"""
FILLS = """
import torch
held = [torch.empty(1 << 32, device="cuda") for _ in range(1000)]
"""


def test_one_query_tells_all_of_each_gpu():
    gpus = read_gpus()
    assert len(gpus) == torch.cuda.device_count()
    for index, gpu in enumerate(gpus):
        has = torch.cuda.get_device_properties(index)
        assert gpu.name == has.name
        assert gpu.uuid.removeprefix("GPU-") == str(has.uuid)
        assert gpu.memory_total == pytest.approx(has.total_memory, rel=0.05)
        assert 0 < (gpu.temperature or 0) < 110
        assert 0 <= (gpu.use if gpu.use is not None else -1) <= 100
        assert (gpu.is_lost, gpu.errors or 0) == (False, 0)
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", gpu.address)
        assert gpu.driver
        assert int(gpu.clock) > 500


def test_a_healthy_gpu_has_no_fault_and_memory_that_is_held_is_named():
    """In a container, nvidia-smi may not list the processes: then it is the memory alone."""
    assert wrong_here(os.environ) == []
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"holds\n"
        gpus = read_health(None)
        process.communicate()
    assert [*faults("here", gpus, [0])] == []
    (held, *_) = notes("here", gpus, [0])
    assert held.startswith("here: GPU 0 is in use: ")
    if any(each.user for each in gpus[0].holders):
        assert f"pid {process.pid} of " in held


def test_the_report_has_what_the_gpu_did(here):
    job = ("launch", *here.where(1), "--report=report.json", here.script(WORKS))
    here.run(*job).assert_ok()
    (attempt,) = json.loads((here.folder / "report.json").read_text())["attempts"]
    (gpu,) = attempt["gpus"]
    assert gpu["use"] > 50
    assert 1 << 28 < gpu["memory"] < gpu["memory_total"]
    assert 0 < gpu["temperature"] < 110


def test_a_gpu_whose_memory_is_full_is_told_in_a_short_line(here):
    done = here.run("launch", *here.where(1), here.script(FILLS)).assert_code(1)
    (line,) = (each for each in done.said if "failed first" in each)
    assert re.search(r"Tried to allocate [\d.]+ GiB: GPU 0 has .* free; this process holds ", line)
    assert len(line) < 400
    assert done.stderr.count("has a known cause") == 1


# ---- training


def test_ctrl_c_saves_and_the_resumed_run_equals_one_without_a_stop(here):
    options = [*TINY, NEVER, "--steps-per-epoch=100000", "--deterministic"]
    job = ("launch", *here.where(1), "-m", "mpiddp", "train", "--out=stopped", *options)
    started = here.start(*job).until("step 5/")
    started.signal(signal.SIGINT).wait().assert_code(75)
    (saved,) = steps_kept(here.folder / "stopped")
    for out in ("stopped", "straight"):
        train(here, 1, out, *options, f"--stop-at-step={saved + 5}").assert_code(75)
    assert_equal(here, "stopped", "straight", saved + 5)


def test_the_side_stream_delivers_the_batches_of_the_main_stream(tmp_path):
    device = torch.device("cuda")
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (4096, 32, 32, 3), dtype=np.uint8)
    labels, folder = draw.integers(0, 10, len(pixels)), image_folder(tmp_path, 80, 1) / "train"
    sources = (
        DeviceImages(pixels, labels, device, mean=HALF, std=HALF, seed=0, max_shift=4),
        ImageFolder(folder, device, Opening(image_size=64, num_workers=2), augments=True),
    )
    work = torch.ones(2048, 2048, device=device)
    for source in sources:
        for epoch in range(3):
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(source.num_images, generator=generator).split(64)
            expected = [batch.cpu() for batch, _ in source.batches(order, epoch=epoch)]
            delivered = []
            for batch, _ in on_a_side_stream(source.batches(order, epoch=epoch), device):
                for _ in range(10):  # other work on the main stream, before the batch is used
                    work = work @ work / len(work)
                delivered.append(batch.clone())
                del batch  # its memory is free for the next one, unless a stream still needs it
            assert unequal([each.cpu() for each in delivered], expected) == []


def test_a_resumed_run_and_each_save_within_a_run_are_exact(here):
    """The first run saves at every step while it trains on: no later step changes what is being copied."""
    steps = ["--epochs=1", "--steps-per-epoch=8", "--log-every=1", "--keep=100"]
    options = [*images(here), "--arch=resnet50", "--deterministic", *steps]
    train(here, 1, "straight", *options, "--save-every=1").assert_ok()
    train(here, 1, "stopped", *options, "--stop-at-step=4").assert_code(75)
    assert_equal(here, "straight", "stopped", 4)
    train(here, 1, "stopped", *options).assert_ok()
    assert_equal(here, "straight", "stopped", 8)


def test_a_resume_is_exact_for_the_kernels_of_a_gpu(here):
    """Among them are those of CUDA graphs (capturable), which torch refuses on a CPU."""
    job = program("sweep.py")
    trained = here.fork(job, "save", "run", "all", "cuda", ranks=1).assert_ok().lines[-1]
    assert re.search(r"^\d{3} trainings, 0 differ: .*'capturable': \d\d", trained), trained
    done = here.fork(job, "resume", "run", "all", "cuda", ranks=1).assert_ok()
    assert trained in done.lines, done.stdout


@pytest.mark.parametrize("amp", ["auto", "fp16"])
def test_two_ranks_save_and_resume_exactly(here, amp):
    """With fp16 a run resumes with its gradient scale."""
    options = ["--use-syn", "--arch=resnet20", "--batch-size=16", "--deterministic", f"--amp={amp}"]
    options += ["--epochs=1", "--steps-per-epoch=6", "--log-every=1", NEVER]
    train(here, 2, "straight", *options).assert_ok()
    train(here, 2, "stopped", *options, "--stop-at-step=3").assert_code(75)
    train(here, 2, "stopped", *options).assert_ok()
    assert_equal(here, "straight", "stopped", 6)


def test_gradients_of_two_ranks_lie_as_their_buckets(here):
    """Else DDP copies each gradient of a 1×1 convolution, and warns."""
    options = ["--use-syn", "--arch=resnet50", "--batch-size=4", "--epochs=1", NEVER]
    done = train(here, 2, "run", *options, "--steps-per-epoch=2").assert_ok()
    assert "Grad strides" not in done.stderr


def test_sync_bn_gives_two_ranks_the_first_loss_of_one_with_their_batch(here, monkeypatch):
    source = [word for word in images(here) if not word.startswith("--batch-size")]
    options = [*source, "--global-batch-size=16", "--arch=resnet18", "--amp=off", "--epochs=1"]
    options += ["--steps-per-epoch=2", "--lr=0.05", "--log-every=1", NEVER]
    monkeypatch.setenv(
        "NVIDIA_TF32_OVERRIDE", "0"
    )  # TF32 would hide the statistics of half a batch
    train(here, 1, "one", *options).assert_ok()
    train(here, 2, "synced", *options, "--sync-bn").assert_ok()
    train(here, 2, "apart", *options).assert_ok()
    one, synced, apart = (losses(here.folder / name)[1] for name in ("one", "synced", "apart"))
    assert abs(synced - one) < abs(apart - one) / 10


def test_a_training_that_does_not_fit_says_which_options_do(here):
    """CIFAR's stem makes it 16 times as large as the guides' own model."""
    options = ["--use-syn", "--arch=resnet152", "--stem=cifar", "--batch-size=131072", "--epochs=1"]
    done = here.run("launch", "-n", "1", "-m", "mpiddp", "train", *options).assert_code(1)
    (line,) = (each for each in done.said if "failed first" in each)
    fits = "--global-batch-size 131072 --grad-accum-steps 2 in the place of --batch-size."
    assert line.endswith(fits)


def test_large_images_are_compiled_by_default_and_the_losses_stay(here):
    options = ["--use-syn", "--dataset=image-folder", "--image-size=64", "--arch=resnet18"]
    options += [
        "--batch-size=16",
        "--epochs=1",
        "--steps-per-epoch=6",
        "--lr=0.02",
        "--log-every=1",
    ]
    compiled = train(here, 1, "compiled", *options).assert_ok()
    assert "compiling the model" in compiled.stdout
    assert "Profiler record function" not in compiled.stderr
    plain = train(here, 1, "plain", *options, "--compile=off").assert_ok()
    assert "compiling" not in plain.stdout
    expected = losses(here.folder / "plain")
    assert losses(here.folder / "compiled") == pytest.approx(expected, rel=0.03)
