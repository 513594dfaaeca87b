"""What only a GPU can show, on a machine with one or more. tests/promises has what CPUs show.

python -m pytest -m gpu tests/gpu
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpiddp.bench.figures import read_results
from mpiddp.hosts.gpu_faults import faults, notes, wrong_here
from mpiddp.hosts.gpu_health import read_health
from mpiddp.hosts.gpus import read_gpus
from mpiddp.train.data import DeviceImages, ImageFolder
from tests.support.patience import PATIENCE_S
from tests.support.place import Here
from tests.support.ranks import LAUNCH, ROOT, clean_env, mpirun_command, script
from tests.support.tiny_data import image_folder
from tests.support.training import contents, losses, records, unequal

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs_gpu]
RANKS = str(ROOT / "tests/gpu/ranks.py")
NEVER = "--save-every=100000"
TINY = ("--arch=resnet20", "--use-syn", "--batch-size=8", "--epochs=1", "--log-every=1")


@contextmanager
def running(command: Sequence[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    """The command, whose stdout and stderr are one."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=clean_env(env), cwd=ROOT, **streams) as process:
        try:
            yield process
        finally:
            process.terminate()


def run(command: Sequence[str], code: int = 0, **env: str) -> str:
    """What a command printed that ended with this code."""
    with running(command, **env) as process:
        output, _ = process.communicate(timeout=3 * PATIENCE_S)
    assert process.returncode == code, output
    return output


def result(output: str) -> dict[str, Any]:
    (found,) = read_results(output.splitlines())
    return found


def train(ranks: int, out: Path, *options: str, code: int = 0) -> str:
    """Train on forks of one process, which has imported torch. Two ranks share the GPU."""
    done = Here(out.parent).fork(RANKS, "train", f"--out={out}", *options, ranks=ranks)
    assert done.code == code, f"{done.stdout}{done.stderr}"
    return f"{done.stdout}{done.stderr}"


def assert_equal(one: Path, other: Path, step: int) -> None:
    assert unequal(contents(one, step), contents(other, step)) == []


def images(folder: Path) -> list[str]:
    """Options for real images, which workers decode and the side stream prepares."""
    data = image_folder(folder / "images", 170, 8)
    options = ["--dataset=image-folder", f"--data-dir={data}", "--image-size=64"]
    return [*options, "--num-workers=2", "--batch-size=32", "--compile=off"]


# ---- the device and the process group


def test_convolutions_in_fp32_use_tf32_and_matrix_products_do_not():
    def error(of: Any, *inputs: Tensor) -> float:
        exact = of(*inputs)
        found = of(*(each.float().cuda() for each in inputs)).double().cpu()
        return float((found - exact).norm() / exact.norm())

    draw = torch.Generator().manual_seed(0)
    shapes = ((8, 64, 32, 32), (64, 64, 3, 3), (512, 512))
    random = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    batch, weights, matrix = random
    assert error(torch.matmul, matrix, matrix) < 5e-6
    assert error(lambda a, b: F.conv2d(a, b, padding=1), batch, weights) > 5e-5


def test_the_group_forms_on_the_ranks_gpu_ends_and_forms_again():
    found = result(run([*LAUNCH, "-H", "localhost:1", RANKS, "group"]))
    expected = {"backend": "nccl", "device": "cuda:0", "bound": "cuda:0", "sum": 1.0}
    for group in found["groups"]:
        assert group == {**expected, "world_size": 1, "ranks": [0]}
    assert found["is_destroyed"]


def test_two_ranks_of_one_gpu_sum_and_average_gradients():
    assert result(run(mpirun_command(2, RANKS, "sum"))) == {"sum": 3.0, "gradient": 0.5}


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_rank_that_fails_ends_the_job_although_its_group_stands(how):
    output = run([*LAUNCH, "-H", "localhost:1", "--grace=2s", RANKS, "disturb", how], 1)
    assert f"planned {how}" in output
    assert "rank 0" in output


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_rank_that_fails_ends_one_that_is_in_a_collective(how):
    with running(mpirun_command(2, RANKS, "disturb", how)) as process:
        for line in process.stdout:
            if f"planned {how}" in line:
                break
        since = time.monotonic()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert time.monotonic() - since < 60


@pytest.mark.parametrize("how", ["sleeps", "differs", "times out"])
def test_who_does_not_come_to_a_collective_is_named(how):
    """A rank that waits in NCCL uses its core. NCCL's own timeout ends the process within C++."""
    options = [] if how == "times out" else ["--hang-timeout=20s"]
    output = run([*LAUNCH, "-H", "localhost:2", *options, RANKS, "disturb", how], 1)
    call = r"all_reduce no\. \d+ \(float32, 1,048,576\)"
    named = rf"rank 1 on \S+ has not entered {call}, for which rank 0 has waited \d+ s; it is in disturb \("
    if how == "differs":
        other = r"broadcast no\. \d+ \(float32, 1,048,576\) of rank 1 on "
        named = rf"the ranks have called different collectives: {call} of rank 0 on \S+, {other}"
    assert re.search(named, output), output
    assert not re.search(r"^frame #|^#\d+ .* from ", output, re.MULTILINE), output


def test_a_straggler_is_named():
    with running([*LAUNCH, "-H", "localhost:2", RANKS, "disturb", "is late"]) as process:
        assert any("rank 1 on" in line and "is a straggler" in line for line in process.stdout)


def test_the_calls_of_nccl_are_read_while_a_graph_is_captured():
    found = result(run([*LAUNCH, "-H", "localhost:1", RANKS, "capture"]))
    assert (found["sum"], found["groups"]) == (2000.0, 1)
    assert found["reads"] > 1


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    file = out / "metrics.jsonl"
    while not file.exists() or not any(each["step"] >= step for each in records(out)):
        assert process.poll() is None
        time.sleep(0.05)


def test_the_number_of_ranks_follows_the_visible_gpus():
    def group(*where: str, **env: str) -> dict[str, Any]:
        found: dict[str, Any] = result(run([*LAUNCH, *where, RANKS, "group"], **env))["groups"][0]
        return found

    hidden = group("-H", "localhost:2", CUDA_VISIBLE_DEVICES="")
    assert (hidden["world_size"], hidden["backend"]) == (2, "gloo")
    assert group()["world_size"] == torch.cuda.device_count()
    listed = run(["nvidia-smi", "-L"])
    (uuid, *_) = re.findall(r"UUID: (GPU-[0-9a-f-]+)", listed)
    found = group("-H", "localhost:2", CUDA_VISIBLE_DEVICES=uuid)
    assert (found["world_size"], found["device"]) == (1, "cuda:0")


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
    found = read_gpus()
    assert len(found) == torch.cuda.device_count()
    for index, gpu in enumerate(found):
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


def test_the_report_has_what_the_gpu_did(tmp_path):
    report = tmp_path / "report.json"
    run([*LAUNCH, "-H", "localhost:1", f"--report={report}", script(tmp_path, WORKS)])
    (attempt,) = json.loads(report.read_text())["attempts"]
    (gpu,) = attempt["gpus"]
    assert gpu["use"] > 50
    assert 1 << 28 < gpu["memory"] < gpu["memory_total"]
    assert 0 < gpu["temperature"] < 110


def test_a_gpu_whose_memory_is_full_is_told_in_a_short_line(tmp_path):
    output = run([*LAUNCH, "-H", "localhost:1", script(tmp_path, FILLS)], 1)
    (line,) = (each for each in output.splitlines() if "failed first" in each)
    assert re.search(r"Tried to allocate [\d.]+ GiB: GPU 0 has .* free; this process holds ", line)
    assert len(line) < 400
    assert output.count("has a known cause") == 1


# ---- training


def test_ctrl_c_saves_and_the_resumed_run_equals_one_without_a_stop(tmp_path):
    options = [*TINY, NEVER, "--steps-per-epoch=100000", "--deterministic"]
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    job = ("-m", "mpiddp", "train", f"--out={stopped}", *options)
    with running([*LAUNCH, "-H", "localhost:1", *job]) as process:
        wait_for_step(process, stopped, 5)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, output
    [saved] = [int(path.name[-8:]) for path in (stopped / "checkpoints").glob("step_*")]
    for out in (stopped, straight):
        train(1, out, *options, f"--stop-at-step={saved + 5}", code=75)
    assert_equal(stopped, straight, saved + 5)


def test_the_side_stream_delivers_the_batches_of_the_main_stream(tmp_path):
    device = torch.device("cuda")
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (4096, 32, 32, 3), dtype=np.uint8)
    labels, folder = draw.integers(0, 10, len(pixels)), image_folder(tmp_path, 80, 1) / "train"
    sources = (
        DeviceImages(pixels, labels, device, seed=0, max_shift=4),
        ImageFolder(folder, device, 64, 0, 2, None),
    )
    work = torch.ones(2048, 2048, device=device)
    for source in sources:
        for epoch in range(3):
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(source.num_images, generator=generator).split(64)
            expected = [batch.cpu() for batch, _ in source._batches(order, epoch)]
            found = []
            for batch, _ in source.batches(order, epoch=epoch):
                for _ in range(10):  # other work on the main stream, before the batch is used
                    work = work @ work / len(work)
                found.append(batch.clone())
                del batch  # its memory is free for the next one, unless a stream still needs it
            assert unequal([each.cpu() for each in found], expected) == []


def test_a_resumed_run_and_each_save_within_a_run_are_exact(tmp_path):
    """The first run saves at every step while it trains on: no later step changes what is being copied."""
    arch = "--arch=resnet50"
    steps = ["--epochs=1", "--steps-per-epoch=8", "--log-every=1", "--keep=100"]
    options = [*images(tmp_path), arch, "--deterministic", *steps]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(1, straight, *options, "--save-every=1")
    train(1, stopped, *options, "--stop-at-step=4", code=75)
    assert_equal(straight, stopped, 4)
    train(1, stopped, *options)
    assert_equal(straight, stopped, 8)


@pytest.mark.parametrize("amp", ["auto", "fp16"])
def test_two_ranks_save_and_resume_exactly(tmp_path, amp):
    """With fp16 a run resumes with its gradient scale."""
    options = ["--use-syn", "--arch=resnet20", "--batch-size=16", "--deterministic", f"--amp={amp}"]
    options += ["--epochs=1", "--steps-per-epoch=6", "--log-every=1", NEVER]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(2, straight, *options)
    train(2, stopped, *options, "--stop-at-step=3", code=75)
    train(2, stopped, *options)
    assert_equal(straight, stopped, 6)


def test_gradients_of_two_ranks_lie_as_their_buckets(tmp_path):
    """Else DDP copies each gradient of a 1×1 convolution, and warns."""
    options = ["--use-syn", "--arch=resnet50", "--batch-size=4", "--epochs=1", NEVER]
    assert "Grad strides" not in train(2, tmp_path / "run", *options, "--steps-per-epoch=2")


def test_sync_bn_gives_two_ranks_the_first_loss_of_one_with_their_batch(tmp_path):
    source = [word for word in images(tmp_path) if not word.startswith("--batch-size")]
    options = [*source, "--global-batch-size=16", "--arch=resnet18", "--amp=off", "--epochs=1"]
    options += ["--steps-per-epoch=2", "--lr=0.05", "--log-every=1", NEVER]
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # TF32 would hide the statistics of half a batch
    variants = {"one": (1, ""), "synced": (2, "--sync-bn"), "apart": (2, "--log-every=1")}
    for name, (ranks, extra) in variants.items():
        train(ranks, tmp_path / name, *options, *filter(None, [extra]))
    one, synced, apart = (losses(tmp_path / name)[1] for name in variants)
    assert abs(synced - one) < abs(apart - one) / 10


def test_a_training_that_does_not_fit_says_which_options_do(tmp_path):
    """CIFAR's stem makes it 16 times as large as the guides' own model."""
    options = ["--use-syn", "--arch=resnet152", "--stem=cifar", "--batch-size=131072", "--epochs=1"]
    done = run([*LAUNCH, "-n", "1", "-m", "mpiddp", "train", f"--out={tmp_path}", *options], code=1)
    (line,) = (line for line in done.splitlines() if "failed first" in line)
    fits = "--global-batch-size 131072 --grad-accum-steps 2 in the place of --batch-size."
    assert line.endswith(fits)


def test_large_images_are_compiled_by_default_and_the_losses_stay(tmp_path):
    options = ["--use-syn", "--dataset=image-folder", "--image-size=64", "--arch=resnet18"]
    options += [
        "--batch-size=16",
        "--epochs=1",
        "--steps-per-epoch=6",
        "--lr=0.02",
        "--log-every=1",
    ]
    output = train(1, tmp_path / "compiled", *options)
    assert "compiling the model" in output
    assert "Profiler record function" not in output
    assert "compiling" not in train(1, tmp_path / "plain", *options, "--compile=off")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=0.03)
