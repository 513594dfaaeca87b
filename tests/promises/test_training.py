"""Training: `mpiddp train` and the examples, on many ranks as on one."""

import json
import random
import re
import shutil
import signal
import string
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mpiddp
from mpiddp.errors import JobFailed
from mpiddp.train import data as datasets
from mpiddp.train.data import ImageFolder, Opening
from mpiddp.train.muon import fast_dtype
from mpiddp.train.resnet import ARCHS
from tests.support import installs, tiny_data
from tests.support.cluster import lacking
from tests.support.place import Done, Here, Place, program
from tests.support.ranks import ROOT, mpirun_command
from tests.support.training import (
    by_hand,
    contents,
    crashed_after,
    losses,
    records,
    step_folder,
    steps_kept,
    summary,
    unequal,
)

MODEL = ("--backend=gloo", "--arch=resnet20", "--amp=off", "--log-every=1")
SYNTHETIC = (*MODEL, "--use-syn", "--batch-size=4", "--epochs=1")
SERIES, GPT = ROOT / "examples/series", ROOT / "examples/gpt"


def train(place: Place, ranks: int, *options: str, **how: Any) -> Done:
    return place.run("launch", *place.where(ranks), "-m", "mpiddp", "train", *options, **how)


def on_images(place: Place, num_train: int, num_test: int, *more: str) -> tuple[str, ...]:
    """Options of a training on images of three classes, so many of each."""
    data = tiny_data.image_folder(place.folder / "data", num_train, num_test)
    return (*MODEL, "--dataset=image-folder", f"--data-dir={data}", "--image-size=32", *more)


# The command line and the files of a run


def test_guides_command_line(here):
    """The command line of PyTorch's guides trains, with its underscores."""
    guides = ["--backend=gloo", "--use_syn", "--batch_size=4", "--arch=resnet20", "--epochs=2"]
    guides += ["--num_workers=0", "--steps_per_epoch=2", "--out=run"]
    here.train(*guides, ranks=2).assert_ok()
    found = summary(here.folder / "run")
    assert (found["arch"], found["steps"], found["global_batch_size"]) == ("resnet20", 4, 8)


COPIED = ("main", "data", "resnet", "muon")
USES = """
import torch
import data, muon, resnet
torch.manual_seed(0)
images = data.RandomImages(40, 10, 32, 4, 0, torch.device("cpu"))
model = resnet.ARCHS["resnet20"](num_classes=10)
filters = [each for each in model.parameters() if each.ndim == 4]
others = [{"params": [each for each in model.parameters() if each.ndim != 4], "weight_decay": 0.0}]
optimizer = muon.Muon(filters, others, lr=0.05, momentum=0.9)
losses = []
for _ in range(4):
    ((batch, labels),) = images.batches([torch.arange(4)], epoch=0)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(batch), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[3] < losses[0], losses
print(*(module.__file__ for module in (data, muon, resnet)))
"""


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_of_each_file_of_the_trainer_works_alone(here, name):
    """Each file of the trainer works as a copy in a folder of its own."""
    own = here.folder / f"{name}.py"
    shutil.copy(ROOT / f"mpiddp/train/{name}.py", own)
    if name == "main":
        own.rename(here.folder / "mine.py")
        options = (*SYNTHETIC, "--steps-per-epoch=2", "--out=run")
        here.fork("mine.py", *options, ranks=2).assert_ok()
        assert (summary(here.folder / "run")["steps"], steps_kept(here.folder / "run")) == (2, [2])
        return
    rest = {*COPIED[1:]} - {name}
    uses = "".join(f"from mpiddp.train import {other}\n" for other in sorted(rest))
    code = USES.replace("import data, muon, resnet\n", f"import {name}\n{uses}")
    done = here.fork(here.script(code)).assert_ok()
    assert f"{own}" in done.stdout.split()


def test_the_file_to_copy_trains_as_mpiddp_train(here):
    """train.py has the bits of `mpiddp train` on one rank and on two, also if a stop falls into an epoch.

    It runs under each launcher. The copy that stops has one line changed, as a user would change it.
    """
    recipe = ("--dataset=image-folder", "--image-size=32", "--arch=resnet20", "--stem=cifar")
    recipe += ("--optimizer=muon", "--lr=0.1", "--label-smoothing=0.1", "--epochs=2", "--seed=3")
    recipe += ("--batch-size=2", "--grad-accum-steps=2", "--amp=off")
    data = tiny_data.image_folder(here.folder / "data", 14, 4)
    text = (ROOT / "mpiddp/train/train.py").read_text()
    line = "return mpiddp.should_stop()"
    assert text.count(line) == 1
    (here.folder / "mine.py").write_text(text)
    (here.folder / "stops.py").write_text(text.replace(line, "return made.number == 7"))
    torchrun = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    launchers = (torchrun, ("launch", *here.where(2)), mpirun_command(2))
    forked = partial(here.fork, ranks=1)
    starts = {
        1: [partial(here.run, "python"), forked, forked],
        2: [partial(here.run, *each) for each in launchers],
    }
    for ranks, (whole, stops, resumes) in starts.items():
        options = (*recipe, f"--data-dir={data}")
        here.train(*options, f"--out=train{ranks}", "--num-workers=0", ranks=ranks).assert_ok()
        whole("mine.py", *options, f"--out=mine{ranks}").assert_ok()
        stops("stops.py", *options, f"--out=stopped{ranks}").assert_code(75)
        assert steps_kept(here.folder / f"stopped{ranks}")[-1] == 7
        resumes("mine.py", *options, f"--out=stopped{ranks}").assert_ok()
        last = 2 * (42 // (4 * ranks))
        expected = contents(here.folder / f"train{ranks}", last)["model"]
        scores = records(here.folder / f"train{ranks}")[-1]
        for name in ("mine", "stopped"):
            run = here.folder / f"{name}{ranks}"
            assert unequal(contents(run, last)["model"], expected) == [], run
            assert records(run)[-1]["test_loss"] == scores["test_loss"]


def test_files_of_a_run(here):
    """A run writes its configuration, records, summary and checkpoints into one directory."""
    options = on_images(here, 14, 4, "--epochs=2", "--global-batch-size=10")
    done = here.train(*options, "--out=run", ranks=2).assert_ok()
    run = here.folder / "run"
    assert steps_kept(run) == [4, 8]
    found = summary(run)
    assert found["images_per_s"] > 0
    expected = {"dataset": "data", "arch": "resnet20", "world_size": 2, "num_nodes": 1}
    expected |= {"global_batch_size": 10, "steps": 8}
    assert expected.items() <= found.items()
    assert 0 < found["step_time_p50_s"] <= found["step_time_p95_s"] < found["wall_s"]
    assert (found["test_accuracy"] * 12) % 1 == pytest.approx(0, abs=1e-9)  # of 12 images
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert losses(run)[8] == found["train_loss"]
    assert records(run)[-1]["test_accuracy"] == found["test_accuracy"]
    config = json.loads((run / "config.json").read_text())
    assert (config["batch_size"], config["global_batch_size"], config["epochs"]) == (5, 10, 2)
    model = ARCHS["resnet20"](num_classes=3)
    model.load_state_dict(contents(run, 8)["model"])
    assert found["num_parameters"] == sum(each.numel() for each in model.parameters())
    printed = dict(re.findall(r"^(\w+) +(\S+)", done.stdout, re.M))
    assert found.keys() <= printed.keys()
    assert float(printed["test_accuracy"]) == pytest.approx(found["test_accuracy"], rel=1e-3)
    here.train(*options, "--out=run").assert_ok()  # nothing is left to do
    assert summary(run) == found
    (run / "summary.json").write_text(json.dumps({**found, "steps": 4}))  # of a shorter training
    here.train(*options, "--out=run").assert_ok()
    assert (summary(run)["steps"], summary(run)["test_accuracy"]) == (8, found["test_accuracy"])


# Exactness

ACCUMULATED = "3 --grad-accum-steps=2"


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    """What watched_training.py saw of the first step, and the run, for each split of the same batch."""
    here = Here(tmp_path_factory.mktemp("splits"))
    options = on_images(here, 9, 4, "--epochs=1", "--num-workers=0")
    options += ("--stem=cifar", "--lr=1e-9")
    found = {}
    for split in ("1", "2", ACCUMULATED, "2 --parallel=fsdp --grad-accum-steps=3"):
        ranks, *more = split.split()
        folder = here.folder / split
        folder.mkdir()
        job = (program("watched_training.py"), str(folder), *options, *more)
        job += ("--global-batch-size=23", f"--out={folder}/run")
        here.fork(*job, ranks=int(ranks), env={"PLAIN": "1"}).assert_ok()
        found[split] = (torch.load(folder / "first.pt"), folder / "run")
    return found


def test_gradients_of_any_split(first_steps):
    """The gradient of a batch equals that of one process, however the batch is split, evenly or not."""
    expected = first_steps["1"][0]["gradients"]
    for split, (first, run) in first_steps.items():
        for own, right in zip(first["gradients"], expected, strict=True):
            error = (own - right).abs().max() / right.abs().max()
            assert error < 5e-5, split  # the sums of 20 layers are rounded in another order
        assert losses(run)[1] == pytest.approx(losses(first_steps["1"][1])[1], rel=1e-5)


def test_one_reduction_a_step(first_steps):
    """With gradient accumulation, the gradients are reduced once per step."""
    once, twice = (first_steps[split][0]["reductions"] for split in ("2", ACCUMULATED))
    assert once == twice > 0


def test_evaluation_is_exact(first_steps):
    """The test accuracy counts each image once, with any number of ranks."""
    found = {split: summary(run) for split, (_, run) in first_steps.items()}
    assert {each["test_images"] for each in found.values()} == {12}
    assert len({each["test_accuracy"] for each in found.values()}) == 1
    tested = [records(run)[-1]["test_loss"] for _, run in first_steps.values()]
    assert tested == pytest.approx([tested[0]] * len(tested), rel=1e-5)


def halves_the_state(place: Place, fork: Callable[..., Done], ranks: int, parallel: str) -> None:
    """This parallelism has the losses of ddp, and each rank holds half of the state."""
    found = {}
    for name, share in (("ddp", 1), (parallel, 1 / 2)):
        folder = place.folder / name
        folder.mkdir()
        job = (program("watched_training.py"), str(folder), *SYNTHETIC, "--steps-per-epoch=5")
        options = (f"--parallel={name}", "--lr=0.001", f"--out={folder}/run")
        fork(*job, *options).assert_ok()
        found[name] = losses(folder / "run")
        for rank in range(ranks):
            own, one_copy = map(int, (folder / f"bytes_{rank}").read_text().split())
            assert one_copy == 3 * 4 * summary(folder / "run")["num_parameters"]
            assert own == pytest.approx(share * one_copy, rel=0.1)
    assert found[parallel] == pytest.approx(found["ddp"], rel=1e-5)
    assert found["ddp"][1] != pytest.approx(found["ddp"][5], rel=0.01)  # it has trained


def test_fsdp_has_the_losses_of_ddp(here):
    """fsdp has the losses of ddp, and each rank holds only its share of the state."""
    halves_the_state(here, partial(here.fork, ranks=2), 2, "fsdp")


def test_hsdp_shards_within_a_host(hosts):
    """hsdp has the losses of ddp, and shards within each host. Hosts with unequal ranks are refused."""
    halves_the_state(hosts, partial(hosts.fork, "node0:2,node1:2"), 4, "hsdp")
    unequal_hosts = hosts.fork("node0:3,node1:1", "train", *SYNTHETIC, "--parallel=hsdp")
    unequal_hosts.assert_refused(r"ranks of a host differs: 3 \(rank 0\), 1 \(rank 3\)\.")


def test_hosts_with_unequal_ranks(hosts):
    """Hosts with unequal numbers of ranks train, save and resume, with the bits of one host."""
    options = on_images(hosts, 8, 3, "--epochs=2", "--global-batch-size=6")
    # The ranks of node0 share its cores, so each has fewer workers than the rank of node1.
    where, job = "node0:2,node1:1", ("train", *options, "--out=uneven")
    hosts.fork(where, *job, "--stop-at-step=3").assert_code(75)
    assert hosts.run("launch", "-H", where, "-m", "mpiddp", *job).assert_ok().said == []
    hosts.fork("node0:3", "train", *options, "--out=even").assert_ok()
    assert steps_kept(hosts.folder / "uneven") == steps_kept(hosts.folder / "even") == [4, 8]
    uneven, even = (contents(hosts.folder / name, 8) for name in ("uneven", "even"))
    assert unequal(uneven, even) == ["/tree/ranks/2"]  # which tells the local rank


# The average of the weights


def test_average_is_scored_and_saved(here):
    """With --ema-decay the test accuracy is that of the average, which the checkpoint has as well."""
    options = on_images(here, 14, 4, "--epochs=10", "--num-workers=0", "--global-batch-size=10")
    here.train(*options, "--ema-decay=0.999", "--log-every=100", "--out=run", ranks=2).assert_ok()
    run = here.folder / "run"
    saved = mpiddp.load(run)
    opening, device = Opening(image_size=32), torch.device("cpu")
    images = ImageFolder(here.folder / "data/val", device, opening, augments=False)
    ((batch, labels),) = images.batches([torch.arange(images.num_images)], epoch=0)
    model, found = ARCHS["resnet20"](num_classes=3).eval(), {}
    for name in ("model", "ema"):
        model.load_state_dict(saved.state[name])
        found[name] = torch.nn.functional.cross_entropy(model(batch), labels).item()
    assert records(run)[-1]["test_loss"] == pytest.approx(found["ema"], rel=1e-4)
    assert found["model"] != pytest.approx(found["ema"], rel=0.01)


# The same numbers each time


def test_weights(here):
    """--weights begins with the model of another run or file, with a new last layer if the classes differ."""
    options = (*MODEL, "--batch-size=4", "--epochs=1", "--steps-per-epoch=1")
    here.train(*options, "--use-syn", "--out=before").assert_ok()
    saved = mpiddp.load(here.folder / "before").state["model"]
    frozen = (*options, "--weights=before", "--lr=1e-9")
    here.train(*frozen, "--use-syn", "--parallel=fsdp", "--out=same", ranks=2).assert_ok()
    after = mpiddp.load(here.folder / "same").state["model"]
    torch.testing.assert_close(after["fc.weight"].full_tensor(), saved["fc.weight"])
    file = step_folder(here.folder / "before", 1) / "model.safetensors"
    shutil.copy(file, here.folder / "resnet20.safetensors")
    from_file = (*options[len(MODEL) :], "--weights=resnet20.safetensors", "--lr=1e-9")
    three = on_images(here, 4, 2, *from_file, "--num-workers=0", "--out=three")
    done = here.train(*three).assert_ok()
    assert "fc.bias" in f"{done.stdout}{done.stderr}"
    after = contents(here.folder / "three", 1)["model"]
    assert after["fc.weight"].shape == (3, 64)
    torch.testing.assert_close(after["layer3.2.conv2.weight"], saved["layer3.2.conv2.weight"])
    for weights in ("before", "resnet20.safetensors"):
        job = (*options, "--use-syn", f"--weights={weights}", "--arch=resnet32", "--out=other")
        here.train(*job).assert_refused("of another model than --arch resnet32")


# One processor becomes one without instructions for bf16.
ONLY_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
PROCESSORS = pytest.mark.parametrize("processor", [{}, ONLY_AVX2], ids=["this", "only_avx2"])


@PROCESSORS
def test_defaults_resume_and_say_how_long_they_take(here, processor):
    """The defaults resume bit for bit, with and without bf16. Each line says how much time is left."""
    options = ("--use-syn", "--global-batch-size=16", "--steps-per-epoch=2", "--log-every=1")
    options += ("--save-every=5", "--keep=9")
    # A fork has the processor of torch's first kernel.
    start = partial(train, here, 1, env=processor) if processor else partial(here.train, ranks=2)
    whole = start(*options, "--out=whole").assert_ok()
    crashed_after(5, here.folder / "whole", here.folder / "stopped")
    start(*options, "--out=stopped").assert_ok()
    steps = summary(here.folder / "whole")["steps"]
    both = [contents(here.folder / name, steps) for name in ("whole", "stopped")]
    assert unequal(*both) == []
    config = json.loads((here.folder / "whole/config.json").read_text())
    assert (config["arch"], config["optimizer"]) == ("whitened_resnet8", "muon")
    has_bf16 = not processor and fast_dtype(torch.device("cpu")) is torch.bfloat16
    assert (config["epochs"], config["amp"]) == ((13, "bf16") if has_bf16 else (6, "off"))
    said = [line for line in whole.lines if re.fullmatch(r"epoch .*  [\d.]+ (s|min) left", line)]
    assert len(said) == steps
    assert re.search(rf"^{steps - 6} steps to come, in about [\d.]+ (s|min)$", whole.stdout, re.M)


def test_determinism_is_checked(here):
    """--check-determinism trains twice, and compares every tensor bit for bit."""
    options = ("--check-determinism=3", "--parallel=fsdp", "--out=run")
    done = here.train(*SYNTHETIC, *options, ranks=2).assert_ok()
    assert "two runs of 3 steps from the same start are equal bit for bit" in done.stdout
    assert not (here.folder / "run").exists()


@pytest.mark.parametrize(
    ("ranks", "what", "first"),
    [(1, "loss", "the loss"), (2, "gradient", "conv1.weight"), (1, "parameter", "fc.bias")],
)
def test_first_difference_is_named(here, ranks, what, first):
    """If two runs differ, --check-determinism names the first step, rank and tensor that differ."""
    last = ranks - 1
    job = (program("faulty_training.py"), "noise", what, str(last), *SYNTHETIC)
    done = here.fork(*job, "--check-determinism=2", "--out=run", ranks=ranks).assert_code(1)
    assert re.search(rf"step 1, .*rank {last} on .*{first}", done.stderr), done.stderr


# Rank 0 of torch's group is rank 1 of the job, and its second run ends early.
ENDS_EARLY = """
import os, torch, torch.distributed as dist, mpiddp

world = mpiddp.init(backend="gloo")
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.FileStore("store"), rank=1 - world.rank, world_size=2)
runs = iter([3, 2] if world.rank == 1 else [3, 3])

def begin():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters()), (torch.ones(()) for _ in range(next(runs)))

mpiddp.check_determinism(begin)
"""


def test_a_second_run_that_ends_early(here):
    """A run that ends before the other one is a difference as well, also where a script numbers its ranks anew."""
    done = here.fork(here.script(ENDS_EARLY), ranks=2).assert_code(1)
    assert (
        "two runs of 3 steps from the same start differ: first in step 3, on rank 0 on "
        in done.stderr
    )


# Ranks that diverge


DIVERGING = """
import torch, torch.distributed as dist, mpiddp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

world = mpiddp.init(backend="gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(world.rank)  # each rank has other statistics of BatchNorm
for _ in range(2):
    ddp(torch.randn(2, 3, 4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def flip(tensor):
    if world.rank == world.world_size - 1:
        tensor.detach().view(torch.int32)[-1] ^= 1

def prints_the_difference(tensor, *checked, **of_group):
    flip(tensor)
    try:
        mpiddp.check_divergence(*checked, **of_group)
    except mpiddp.JobFailed as error:
        print(f"{error}\\n", end="", flush=True)
    flip(tensor)

mpiddp.check_divergence(ddp, optimizer, step=100)
print("equal before\\n", end="", flush=True)
mesh = init_device_mesh("cpu", (world.world_size, 1), mesh_dim_names=("copy", "shard"))
layer = nn.Linear(4, 12, bias=False)
copies = distribute_tensor(torch.arange(48.0).view(12, 4), mesh, [Replicate(), Shard(0)])
layer.weight = nn.Parameter(copies)
prints_the_difference(layer.weight.to_local(), layer, group=mesh.get_group("copy"))
prints_the_difference(model[3].weight, ddp, optimizer)
flip(optimizer.state[model[0].bias]["exp_avg_sq"])
mpiddp.check_divergence(ddp, optimizer, step=200)
"""


def test_diverged_rank_is_named(here):
    """mpiddp.check_divergence finds a single bit that differs, and names the rank and the tensor."""
    done = here.fork(here.script(DIVERGING), ranks=3).assert_code(1)
    assert done.stdout.count("equal before") == 3
    for tensor, text in (
        *(("3.weight", done.stdout), ("weight", done.stdout)),  # of a parameter, and of a shard
        ("exp_avg_sq of 0.bias", done.stderr),  # the last one, which ends the job
    ):
        named = rf"rank 2 on \S+ differs from the 2 ranks that agree, first in {tensor} \(1 of "
        assert re.search(named, text), text


def test_diverged_training_is_not_saved(here):
    """--check-divergence ends a training with a flipped bit before it is saved. Another start repairs it."""
    options = (*SYNTHETIC, "--steps-per-epoch=6", "--save-every=2", "--keep=9")
    options += ("--check-divergence=4",)
    job = (program("faulty_training.py"), "flip", "momentum", "1", "4", *options, "--out=faulty")
    failed = here.fork(*job, ranks=2).assert_code(1)
    assert "momentum_buffer of fc.weight (1 of 118 tensors)" in failed.stderr
    done = here.fork(*job, ranks=2, env={"TORCHELASTIC_RESTART_COUNT": "1"}).assert_ok()
    assert re.search("resuming from .*step 2$", done.stdout, re.MULTILINE), done.stdout
    here.train(*options[:-1], "--out=sound", ranks=2).assert_ok()
    sound = contents(here.folder / "sound", 6)
    assert unequal(contents(here.folder / "faulty", 6), sound) == []


def test_diverged_copies_of_shards(hosts):
    """Under hsdp, --check-divergence finds a bit that differs between two copies of a shard."""
    options = (*SYNTHETIC, "--parallel=hsdp", "--check-divergence=4", "--save-every=2")
    job = (program("faulty_training.py"), "flip", "parameter", "3", "4", *options)
    done = hosts.fork("node0:2,node1:2", *job, "--steps-per-epoch=6", "--out=run").assert_code(1)
    assert re.search(r"rank 1 on node0 and rank 3 on node1 differ.*fc.weight", done.stderr)
    assert steps_kept(hosts.folder / "run") == [2]


# Data


def test_data_is_verified_by_hash(here):
    """A file of CIFAR-10 with a wrong SHA-256 is refused before training, with both hashes."""
    folder = here.folder / "data/cifar-10-batches-bin"
    folder.mkdir(parents=True)
    names = ("batches.meta.txt", "test_batch.bin", *(f"data_batch_{n}.bin" for n in range(1, 6)))
    for name in names:
        (folder / name).write_bytes(bytes(1000))
    done = here.train("--data-dir=data", "--out=run", ranks=2)
    done.assert_refused(r"data_batch_1.bin .*541b3e9d.*cee91656")
    assert len(done.stderr.splitlines()) == 2  # once for both ranks, and its fix
    assert not (here.folder / "run").exists()


def test_other_data_is_refused(here):
    """Ranks with different data do not start, and a run does not resume with other data."""
    data = [tiny_data.image_folder(here.folder / name, 4, 2) for name in ("one", "other")]
    (data[1] / "train/dog/3.jpg").rename(data[1] / "train/dog/4.jpg")
    options = ("--dataset=image-folder", "--image-size=32", "--arch=resnet20", "--batch-size=2")
    options += ("--backend=gloo", "--epochs=1", "--num-workers=0", "--out=run")
    here.train(*options, f"--data-dir={data[0]}", "--stop-at-step=1").assert_code(75)
    done = here.train(*options, f"--data-dir={data[1]}").assert_code(2)
    assert done.stderr.count("12 + 6 images of 3 classes") == 2, done.stderr
    job = (
        "import os, sys; from mpiddp import cli; data = ['one', 'other'][int(os.environ['RANK'])]\n"
    )
    job += "sys.exit(cli.main(['train', *sys.argv[1:], f'--data-dir={data}']))"
    done = here.fork(here.script(job), *options, "--out=run2", ranks=2).assert_code(2)
    assert len(re.findall("12 [+] 6 images of 3 classes, names [0-9a-f]{16}", done.stderr)) == 2
    assert not (here.folder / "run2").exists()


def test_broken_image_is_named(here):
    """An image that cannot be read ends the job with exit code 2, and one line names the file."""
    options = on_images(here, 8, 2, "--epochs=1", "--batch-size=2", "--num-workers=1")
    broken = here.folder / "data/train/dog/3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    train(here, 2, *options).assert_refused(re.escape(str(broken)))


def test_run_resumes_after_a_bad_image_was_removed(here):
    """A run that skips bad images goes on without one that was removed, and says so. Others refuse."""
    options = on_images(here, 5, 2, "--epochs=2", "--batch-size=2", "--num-workers=0", "--out=run")
    broken = here.folder / "data/train/dog/3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    here.train(*options, "--skip-bad-images", "--stop-at-step=3", ranks=2).assert_code(75)
    broken.unlink()
    here.train(*options, ranks=2).assert_refused(r"15 \+ 6 images of 3 classes")
    resumed = here.train(*options, "--skip-bad-images", ranks=2).assert_ok()
    others = r"with other data: 15 \+ 6 .*, now 14 \+ 6 images of 3 classes"
    assert re.search(others, resumed.stdout)
    assert steps_kept(here.folder / "run")[-1] == 6


# The last score is of six views of each image, and would take longer than the training.
ONE_VIEW = """
import dataclasses, sys
from mpiddp.train import main, train
recipe_for = train.recipe_for
train.recipe_for = lambda *arguments: dataclasses.replace(recipe_for(*arguments), views=1)
sys.exit(main.main())
"""


@pytest.mark.slow
@PROCESSORS
def test_cifar10_is_learned(here, processor):
    """With the defaults, two ranks on CPUs reach 50 % on CIFAR-10 after 75 steps, with and without bf16."""
    data, cifar10 = datasets.default_folder(), datasets.DATASETS["cifar10"]
    try:
        if cifar10.find(data) is None:
            cifar10.fetch(data, print)
    except JobFailed as error:
        lacking(f"this test needs the real data: {error}")
    options = (f"--data-dir={data}", "--epochs=5", "--steps-per-epoch=15", "--out=run")
    here.run("launch", *here.where(2), here.script(ONE_VIEW), *options, env=processor).assert_ok()
    found = summary(here.folder / "run")
    assert found["test_accuracy"] >= 0.5
    assert (found["test_images"], found["steps"], found["global_batch_size"]) == (10_000, 75, 256)


# Options of the engine


def test_reduced_precision(here):
    """Reduced precision changes the losses by a few percent at most. The ranks stay equal bit for bit."""
    common = (*SYNTHETIC, "--batch-size=2", "--steps-per-epoch=4", "--lr=0.01")
    found = {}
    for amp in ("off", "bf16", "fp16"):
        run = (*common, f"--amp={amp}", "--check-divergence=2", f"--out=run{amp}")
        here.train(*run, ranks=2).assert_ok()
        found[amp] = losses(here.folder / f"run{amp}")
    full = found.pop("off")
    for amp, reduced in found.items():
        assert reduced == pytest.approx(full, rel=0.05), amp
        assert reduced != full, amp


# The examples


def series(start: Callable[..., Done], script: str, last: int) -> dict[str, float]:
    """The losses of the epochs up to the last one that are not yet in the snapshot."""
    sizes = ("--samples", "256", "--batch-size", "32")
    done = start(str(SERIES / script), str(last), "1", *sizes).assert_ok()
    found = re.findall(r"^epoch (\d+): loss (\S+)$", done.stdout, re.M)
    return {epoch: float(loss) for epoch, loss in found}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The losses of one device."""
    found = series(Here(tmp_path_factory.mktemp("one")).fork, "one_device.py", 4)
    assert found["4"] < 0.9 * found["1"]  # it learns, so wrong gradients would change the losses
    return found


@pytest.mark.parametrize(("script", "ranks"), [("many_hosts.py", 1), ("sharded.py", 0)])
def test_series(here, one_device, script, ranks):
    """The scripts of examples/series have the losses of one device, and resume on one rank."""
    first = series(
        partial(here.run, "launch", *here.where(2)) if ranks else partial(here.fork, ranks=2),
        script,
        2,
    )
    later = series(partial(here.fork, ranks=ranks), script, 4)
    assert (list(first), list(later)) == (["1", "2"], ["3", "4"])
    assert first | later == pytest.approx(one_device, rel=1e-4)


# From step 27 on, in the middle of an epoch of 20, each step takes a while, so that the stop comes there.
SLOW = """
            if step == 27 and rank == 0 and not saved:
                print("in the middle", flush=True)
            time.sleep(1.0 * (step >= 27 and not saved))
"""


@pytest.mark.parametrize("script", ["epochs.py", "epochs_on_any_ranks.py"])
def test_the_loop_of_the_guide(here, script):
    """The whole loop of docs/your-own-script.md resumes in the middle of an epoch, with the same bits.

    It has epochs, a DataLoader with workers, a progress bar, and a validation.
    """
    env = installs.environment("transformers")  # it brings tqdm
    for name in ("epochs.py", "epochs_on_any_ranks.py"):
        shutil.copy(ROOT / "examples" / name, here.folder)
    forked = partial(here.fork, by_hand(here.folder / script), ranks=2, env=env)
    forked().assert_ok()
    whole = mpiddp.load(here.folder / "runs/epochs")
    shutil.rmtree(here.folder / "runs")
    text = (here.folder / script).read_text()
    assert text.count("            step += 1\n") == 1
    slow = text.replace("            step += 1\n", f"            step += 1{SLOW}")
    (here.folder / script).write_text(slow.replace("import os\n", "import os\nimport time\n", 1))
    job = here.start("launch", "--grace", "600", *here.where(2), script, env=env).until(
        "in the middle"
    )
    job.signal(signal.SIGINT).wait().assert_code(75)
    (step,) = steps_kept(here.folder / "runs/epochs")[-1:]
    assert step > 27
    assert step % 20
    done = forked().assert_ok()
    epochs = [line.partition(":")[0] for line in done.lines if ": accuracy" in line]
    assert epochs == [f"epoch {epoch}" for epoch in range(step // 20, 5)]
    resumed = mpiddp.load(here.folder / "runs/epochs")
    assert (resumed.step, whole.step) == (100, 100)
    assert unequal(resumed.state, whole.state) == []


@pytest.mark.parametrize("script", ["epochs.py", "epochs_on_any_ranks.py"])
def test_the_drill_of_the_loop(here, script):
    """After a kill, the loops of the guide go on with the weights and the learning rate of an undisturbed run."""
    for name in ("epochs.py", "epochs_on_any_ranks.py"):
        text = (ROOT / "examples" / name).read_text()
        (here.folder / name).write_text(text.replace('every="10m"', "every=7"))
    env = installs.environment("transformers")  # it brings tqdm
    where = (*here.where(2), "--only", "kill", "--seed", "5", "--json")
    done = here.run("drill", *where, here.folder / script, env=env).assert_ok()
    [_, killed] = json.loads(done.stdout)["results"]
    assert (killed["passed"], killed["weights_equal"]) == (True, True)
    assert killed["steps_lost"] <= 7


def test_gpt_example(here):
    """examples/gpt learns a text, and resumes with the same bits."""
    draw = random.Random(0)
    lines = (f"{draw.randrange(10)} is {draw.choice(['odd', 'even'])}.\n" for _ in range(400))
    (here.folder / "text").write_text("".join(lines))
    options = ("--layers=2", "--width=32", "--heads=2", "--context=32", "--batch-size=8")
    job = (str(GPT / "train.py"), "--text=text", *options, "--steps=300", "--save-every=100")
    done = here.fork(*job, "--out=run", ranks=2).assert_ok()
    run = here.folder / "run"
    found = [each["validation_loss"] for each in records(run) if "validation_loss" in each]
    assert records(run)[0]["loss"] > 2.5  # guessing one of 18 characters: 2.9
    assert found[-1] < 0.7  # a digit (2.3) and one of two words (0.7) in 11 characters: 0.3
    assert set(done.stdout.partition("\n\n")[2]) <= set((here.folder / "text").read_text())
    resumed = here.folder / "resumed"
    shutil.copytree(run, resumed)
    shutil.rmtree(step_folder(resumed, 300))
    here.fork(*job, "--out=resumed", ranks=2).assert_ok()
    assert unequal(contents(resumed, 300), contents(run, 300)) == []


LAYOUTS = """
import json, shutil, sys
from itertools import pairwise
import pytest, torch.distributed as dist, mpiddp
sys.path.insert(0, sys.argv[1])  # as when python starts the script
import parallel, train

def run(layout):
    train.train(train.parse([*layout, "--steps=4", "--save-every=1"]), world)

with mpiddp.process_group(backend="gloo") as world:
    *layouts, wrong = json.loads(sys.argv[2])
    for layout in layouts:
        run(layout)
    for (out, *_), (_, *options) in pairwise(layouts):  # the next layout makes the last step again
        if world.rank == 0:
            folder = out.partition("=")[2]
            shutil.copytree(folder, f"{folder}/again")
            shutil.rmtree(f"{folder}/again/checkpoints/step_00000004")
        dist.barrier()
        run([f"{out}/again", *options])
    words = r"'token.weight'\\] differs: .* on rank 0 .* on rank 2"
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(parallel, "sum_gradients", lambda *arguments: None)
        with pytest.raises(ValueError, match=words):
            run(wrong)
"""


def test_gpt_is_divided(here):
    """examples/gpt trains alike with tensor, sharded and pipeline parallelism, and resumes in other forms."""
    tiny = ("--layers=3", "--width=16", "--heads=4", "--context=12", "--batch-size=16")
    tiny += ("--text=text",)  # a short one, because each layout is scored on a tenth of it
    (here.folder / "text").write_text("".join(random.Random(0).choices(string.printable, k=4000)))
    layouts = ("--pp=2 --microbatches=2", "--tp=2 --pp=2", "", "--tp=2", "--tp=2 --fsdp", "--fsdp")
    runs = {here.folder / str(number): layout.split() for number, layout in enumerate(layouts)}
    runs[here.folder / "wrong"] = ["--tp=2"]
    arguments = [[f"--out={run}", *tiny, *layout] for run, layout in runs.items()]
    here.fork(here.script(LAYOUTS), GPT, json.dumps(arguments), ranks=4).assert_ok()
    first, *others, _ = runs
    whole = whole_model(first)
    for run in (*others, *(run / "again" for run in (first, *others[:-1]))):
        torch.testing.assert_close(whole_model(run), whole, rtol=1e-4, atol=1e-6, msg=str(run))


def whole_model(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of a run's newest checkpoint, undivided."""
    saved = mpiddp.load(run)
    assert saved.step == 4
    model = saved.state["model"].items()
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model
    }


EACH = """
import runpy, sys
folder = sys.argv[1]
for line in ("set_epoch_forgotten", "batch_norm", "save_on_all_ranks snapshot.pt", "file_init store"):
    name, *arguments = line.split()
    sys.argv[1:] = arguments
    runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
"""


def test_pitfalls(here):
    """Each script of examples/pitfalls shows the mistake that its page describes."""
    folder = ROOT / "examples/pitfalls"
    # In one job, because each start imports torch.
    job = (here.script(EACH), str(folder))
    text = here.fork(*job, ranks=2).assert_ok().stdout
    for how, orders in (("without", 1), ("with", 3)):
        shown = re.findall(rf"^{how} set_epoch, epoch \d: (\[.*\])$", text, re.M)
        assert len(set(shown)) == orders, how
    found = dict(re.findall(r"^(\w+) differs from one process by up to (\S+)$", text, re.M))
    assert float(found["BatchNorm"]) > 0.1
    assert float(found["SyncBatchNorm"]) < 1e-5
    assert "saved by rank 0: 6 times the file of rank 0\n" in text
    assert "saved by all ranks: the file is 6 times" not in text
    assert "the ranks of 2 add up to 1\n" in text
    hang = ("--hang-timeout", "40s", str(folder / "collective_on_one_rank.py"))
    done = here.run("launch", *here.where(2), *hang).assert_code(1)
    assert "dist.all_reduce(mean_loss, group=metrics)" in done.stderr
