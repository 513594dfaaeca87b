"""Checkpoints: what a run saves and resumes, whatever ends it."""

import errno
import json
import os
import random
import re
import shutil
import signal
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

import mpiddp
from mpiddp.checkpoints.bucket import local_path
from mpiddp.checkpoints.records import runs
from mpiddp.cli import main
from tests.support import installs, tiny_data
from tests.support.cluster import faults
from tests.support.own_script import DIES, STEPS, example
from tests.support.place import Done, Here, Hosts, Place, eventually, program
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
    verified,
)

MODEL = ("--backend=gloo", "--arch=resnet20", "--log-every=1")
OPTIONS = (*MODEL, "--use-syn", "--batch-size=2", "--epochs=1")
SAVE_ALL = ("--save-every=1", "--keep=99")
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
PRIVATE = Path("/run/run-of-a-test")  # each host has its own


def two_epochs(place: Place) -> tuple[str, ...]:
    """Options of a training over 27 images: two epochs of three steps of 8, or of one step of 24."""
    data = place.folder / "data"
    if not data.exists():
        tiny_data.image_folder(data, 9, 3)
    images = ("--dataset=image-folder", f"--data-dir={data}", "--image-size=32", "--num-workers=0")
    return (*MODEL, *images, "--epochs=2")


def resumed_step(done: Done) -> int:
    """The step from which a job says that it resumes; 0 if it begins anew."""
    said = re.search(r"resuming from .*step_\d+( on \S+)?: step (\d+)$", done.stdout, re.M)
    return int(said[2]) if said else 0


def flip_a_bit(file: Path, at: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 1
    file.write_bytes(content)


# The same bits


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        # DDP regroups gradients after the first step, and the order of three summands changes the sum.
        (3, "--amp=bf16 --global-batch-size=9 --grad-accum-steps=3 --optimizer=muon"),
        (2, "--amp=off --global-batch-size=8 --grad-accum-steps=2 --parallel=fsdp --clip-grad-norm=1"),
    ],
)  # fmt: skip
def test_training_resumes_bit_for_bit(here, ranks, options):
    """`mpiddp train` that resumes from any checkpoint ends with the same bits as an uninterrupted run."""
    train = (*two_epochs(here), *options.split(), *SAVE_ALL)
    whole = here.folder / "whole"
    here.train(*train, f"--out={whole}", ranks=ranks).assert_ok()
    step = random.Random(options).randrange(1, 6)
    resumed = crashed_after(step, whole, here.folder / "resumed")
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step + 1}, "train_loss": 99}}\n{{"step": {step + 1}, "tr')
    done = here.train(*train, f"--out={resumed}", ranks=ranks).assert_ok()
    assert resumed_step(done) == step
    assert steps_kept(resumed) == [1, 2, 3, 4, 5, 6]
    assert unequal(contents(resumed, 6), contents(whole, 6)) == []
    assert losses(resumed) == losses(whole)
    assert [each["step"] for each in records(resumed)] == [each["step"] for each in records(whole)]
    assert summary(resumed)["test_accuracy"] == summary(whole)["test_accuracy"]
    assert unequal(contents(whole, 6), contents(whole, step)) != []  # the test can fail


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run of examples/ddp_with_checkpoints.py on two ranks."""
    place = Here(tmp_path_factory.mktemp("undisturbed"))
    place.fork(by_hand(example(place.folder)), ranks=2).assert_ok()
    return place.folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(folder / "model.pt")
    return loaded


def test_stopped_script_resumes_under_any_launcher(here, undisturbed):
    """A stop saves a script's last step, and any launcher resumes it with the same bits. The nine lines of
    the README save the end of a run as well, and a second run has nothing left to do.
    """
    slow = '\n        __import__("time").sleep(0 if saved else 0.5); print("made a step")\n'
    job = example(here.folder, every=1000, each_step=slow)
    process = here.start("launch", *here.where(2), job).until("made a step", 3)
    process.signal(signal.SIGTERM).wait().assert_code(75)
    (step,) = steps_kept(here.folder / "runs/ddp")
    assert 0 < step < STEPS
    for launcher in (
        [*mpirun_command(2), "-m", "mpiddp", "run"],
        ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    ):
        folder = here.folder / Path(launcher[0]).name
        shutil.copytree(here.folder / "runs", folder / "runs")
        done = here.run(*launcher, job, cwd=folder).assert_ok()
        assert resumed_step(done) == step
        assert unequal(weights(folder), weights(undisturbed)) == [], launcher
        assert steps_kept(folder / "runs/ddp") == [step, STEPS]
    again = Here(folder).fork(by_hand(job), ranks=2).assert_ok()
    assert (resumed_step(again), "made a step" in again.stdout) == (STEPS, False)


# Another number of ranks, another form


OWN_STATES = """
import random
import numpy as np, torch, mpiddp

def seed(number):
    for seed_one in (random.seed, np.random.seed, torch.manual_seed):
        seed_one(number)

def draw():
    return [random.random(), np.random.rand(), torch.rand(()).item()]

rank = mpiddp.init(backend="gloo").rank
seed(100 + rank)
checkpoints = mpiddp.Checkpoints("run")
saved = checkpoints.resume()
if saved is None:
    seed(rank)
    checkpoints.save(1, {"shared": 5}, per_rank={"position": 10 * rank})
else:
    existed, drawn = rank < 2, draw()
    seed(rank if existed else 100 + rank)
    assert drawn == draw()
    assert saved.per_rank == ({"position": 10 * rank} if existed else {})
    assert (saved.world_size, saved.state) == (2, {"shared": 5})
"""


def test_each_rank_gets_its_own_state(here):
    """All ranks get the shared state back, and each rank its own state and random numbers."""
    job = here.script(OWN_STATES)
    for ranks, step in ((2, 0), (3, 1), (1, 1)):
        assert resumed_step(here.fork(job, ranks=ranks).assert_ok()) == step


def test_ddp_fsdp_and_exports_continue_each_other(here):
    """A training resumes under ddp, fsdp or from an export, and one for torch.load is a plain state_dict."""
    train = (*two_epochs(here), "--amp=off", "--lr=0.01", *SAVE_ALL, "--global-batch-size=8")
    fsdp, whole = here.folder / "fsdp", here.folder / "whole"
    here.train(*train, "--parallel=fsdp", f"--out={fsdp}", ranks=2).assert_ok()
    export = ("checkpoints", "export", step_folder(fsdp, 3))
    here.fork(*export, whole, "--to=safetensors").assert_ok()
    verified(whole)
    here.fork(*export, here.folder / "plain").assert_ok()
    names = torch.load(here.folder / "plain/model.pt").keys()
    found = {}
    for name, parallel, checkpoint in (
        ("ddp", "ddp", step_folder(fsdp, 3)),
        ("exported", "ddp", whole),
        ("from ddp", "fsdp", step_folder(here.folder / "ddp", 4)),
    ):
        options = (f"--parallel={parallel}", f"--resume={checkpoint}")
        here.train(*train, *options, f"--out={here.folder / name}", ranks=2).assert_ok()
        found[name] = losses(here.folder / name)
        expected = {step: loss for step, loss in losses(fsdp).items() if step in found[name]}
        assert found[name] == pytest.approx(expected, rel=1e-4), name
    assert list(found["ddp"]) == [4, 5, 6]
    assert list(found["from ddp"]) == [5, 6]
    assert unequal(contents(here.folder / "ddp", 6), contents(here.folder / "exported", 6)) == []
    assert mpiddp.load(step_folder(here.folder / "ddp", 6)).state["model"].keys() == names


def test_each_image_once_an_epoch(here):
    """Each epoch uses each image once, even with restarts at other numbers of ranks, which keep the global
    batch.
    """
    data = tiny_data.numbered_images(here.folder / "data", 101)
    train = (program("watched_training.py"), str(here.folder), "--arch=resnet20", "--epochs=2")
    train += ("--dataset=image-folder", f"--data-dir={data}", "--image-size=32", "--num-workers=0")
    train += ("--batch-size=6", "--amp=off", "--save-every=2", "--out=run")
    used: dict[int, list[int]] = {}  # by step, of which an epoch has eight
    repeated = 0
    # What the launcher tells a restart.
    announced = {"MPIDDP_ANNOUNCED": json.dumps({"global_batch_size": 12, "world_size": 2})}
    kill, kill_later = ({"KILL_AFTER_STEPS": number} for number in "57")
    for ranks, env in ((2, kill), (3, {**announced, **kill_later}), (1, announced)):
        done = here.fork(*train, ranks=ranks, env=env)
        assert (done.code == 0) == (env == announced), done.stderr
        first = resumed_step(done) + 1
        repeated += sum(step >= first for step in used)
        used = {step: images for step, images in used.items() if step < first}
        for rank in range(ranks):
            file = here.folder / f"images_{rank}.jsonl"
            for number, images in enumerate(map(json.loads, file.read_text().splitlines())):
                used.setdefault(first + number, []).extend(images)
            file.unlink()
    assert list(used) == list(range(1, 17))
    assert repeated > 0, "no kill lost a step, so the test could not have failed"
    for epoch in (range(1, 9), range(9, 17)):
        images = [image for step in epoch for image in used[step]]
        assert len(images) == len(set(images)) == 96


# Going back, keeping, saving


def test_going_back(here):
    """A training goes back by `mpiddp checkpoints rewind`, as often as a person asks. `--resume` starts from
    another run, until this one has a checkpoint of its own.
    """
    train = (*OPTIONS, "--steps-per-epoch=4")
    older, run = here.folder / "older", here.folder / "run"
    here.train(*train, "--out=older", "--stop-at-step=3", *SAVE_ALL).assert_code(75)
    back = (*train, "--out=older", "--keep=9")
    refused = here.train(*back, f"--resume={step_folder(older, 1)}")
    refused.assert_refused(r"is of this run\.\n.* mpiddp checkpoints rewind .*older STEP")
    for stop in (2, 2, 3):
        if stop == 2:
            here.run("checkpoints", "rewind", "older", "1").assert_ok()
        done = here.train(*back, f"--stop-at-step={stop}")
        assert (done.code, resumed_step(done)) == (75, stop - 1)
    kept = sorted(path.name for path in (older / "checkpoints").iterdir())
    assert kept == [f"step_0000000{name}" for name in ("1", "2", "2.old", "2.old2", "3", "3.old")]
    for step, options in ((3, ["--stop-at-step=4"]), (4, [])):
        other = here.train(*train, "--epochs=2", "--out=run", f"--resume={older}", *options)
        assert f"  step {step + 1}/" in other.stdout.replace("step 1/4", "step 5/8"), other.stdout
    assert steps_kept(run)[-1] == 8


def test_keep_counts_verified_checkpoints(here):
    """--keep counts verified checkpoints only, and never removes the last good one."""
    train = (*OPTIONS, "--steps-per-epoch=5", "--save-every=1", "--keep=2", "--out=run")
    here.train(*train, "--stop-at-step=2").assert_code(75)
    run = here.folder / "run"
    assert steps_kept(run) == [1, 2]
    step_folder(run, 2).rename(step_folder(run, 3))
    model = step_folder(run, 3) / "model.safetensors"
    model.write_bytes(bytes(model.stat().st_size))  # comparing sizes would count it
    done = here.train(*train, "--stop-at-step=2")
    assert (done.code, resumed_step(done)) == (75, 1)
    assert "step_00000003: model.safetensors does not match its SHA-256" in done.stdout
    verified(step_folder(run, 1))
    verified(step_folder(run, 2))


def test_timed_saves(here):
    """With saves every so many seconds, all ranks save at the same steps."""
    train = (*OPTIONS, "--steps-per-epoch=20", "--save-every=0.05s")
    # Under fsdp, each writes its shards.
    here.train(*train, "--parallel=fsdp", "--out=run", ranks=2).assert_ok()
    before, last = steps_kept(here.folder / "run")
    assert before < last == 20


LAST_SAVE = """
import os, resource, signal, sys
import torch, torch.distributed as dist, mpiddp

how = sys.argv[1]
dist.init_process_group("gloo")
checkpoints = mpiddp.Checkpoints("run")
checkpoints.resume()
if how.startswith("full"):  # the disk has no more space for the last save, as far as the processes can tell
    checkpoints.save(1, {"weight": torch.zeros(10)})
    checkpoints.close()
    checkpoints = mpiddp.Checkpoints("run", on_save_error="stop" if how == "full stop" else "warn")
    checkpoints.resume()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
checkpoints.save(2, {"weight": torch.zeros(10_000_000)})
if how == "full twice":  # as scripts do after their last step
    checkpoints.save(2, {"weight": torch.zeros(10_000_000)})
if how == "full stop":
    checkpoints.save(3, {})
    print("went on", flush=True)
if how == "destroys":
    dist.destroy_process_group()
if how == "forks" and os.fork() == 0:
    sys.exit()
if how == "raises":
    raise ValueError("a bug")
sys.exit(0)
"""


@pytest.mark.parametrize("how", ["exits", "forks", "raises", "destroys"])
def test_last_save_is_waited_for(here, how):
    """The last save of a script is completed, however the script ends."""
    ranks = 2 if how == "destroys" else 1
    done = here.run("launch", *here.where(ranks), here.script(LAST_SAVE), how)
    done.assert_code(1 if how == "raises" else 0)
    assert steps_kept(here.folder / "run") == [2]


@pytest.mark.parametrize(
    ("launcher", "how"), [("launch", "full twice"), ("launch", "full stop"), ("torchrun", "full")]
)
def test_lost_last_save_is_a_failure(here, launcher, how):
    """A job whose last save fails does not exit with 0, and its older checkpoint is kept. With
    on_save_error="stop", all ranks end with exit code 1 at the save after the one that has failed.
    """
    start = {
        "launch": ["launch", *here.where(2)],
        "torchrun": ["python", "-m", "torch.distributed.run", "--nproc-per-node", "1"],
    }[launcher]
    done = here.run(*start, here.script(LAST_SAVE), how).assert_code(1)
    assert re.search(r"run/checkpoints: .*step 2\b.*step_00000001", done.stderr), done.stderr
    assert "went on" not in done.stdout
    assert steps_kept(here.folder / "run") == [1]


FULL_FOR_A_WHILE = """
import resource, sys, torch, mpiddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
with mpiddp.process_group(backend="gloo"):
    checkpoints = mpiddp.Checkpoints("run", every=None)
    value = distribute_tensor(torch.zeros(100_000), init_device_mesh("cpu", (2,)), [Shard(0)])
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, int(sys.argv[1]) + 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if step % 2 else 100_000, hard))
        checkpoints.save(step, {"value": value})
        checkpoints._wait_for_own_save()
"""


@pytest.mark.parametrize(("steps", "failed", "code"), [(3, 1, 0), (4, 2, 1)])
def test_failed_saves_are_counted(here, steps, failed, code):
    """The report of a job counts the saves that have failed. If one before the last failed, the exit code is 0."""
    job = (here.script(FULL_FOR_A_WHILE), steps)
    done = here.run("launch", *here.where(2), "--report=report.json", *map(str, job))
    done.assert_code(code)
    report = json.loads((here.folder / "report.json").read_text())
    assert report["failed_saves"] == report["attempts"][0]["failed_saves"] == failed, done.stderr
    assert steps_kept(here.folder / "run") == [1, 3]


def test_records_of_a_script(tmp_path):
    """mpiddp.log_metrics keeps one record for each step, even after a resume, and writes NaN as null."""
    for start, steps in enumerate((range(1, 5), range(3, 7))):
        with mpiddp.Checkpoints(tmp_path, every=None) as checkpoints:
            checkpoints.resume()
            for step in steps:
                values = {"loss": torch.tensor(0.5), "best": float("nan"), "name": "a"}
                mpiddp.log_metrics(step, start=start, **values)
                if step == 2:
                    checkpoints.save(step, {})
    found = records(tmp_path)
    assert [each["step"] for each in found] == [1, 2, 3, 4, 5, 6]
    assert [each["start"] for each in found] == [0, 0, 1, 1, 1, 1]
    assert found[0] == {"step": 1, "start": 0, "loss": 0.5, "best": None, "name": "a"}
    for start in range(2):
        with mpiddp.Checkpoints(tmp_path / "new", every=None) as checkpoints:
            checkpoints.resume()
            mpiddp.log_metrics(0, start=start)
    assert [each["start"] for each in records(tmp_path / "new")] == [1], "nothing was saved"


# Refusals


def test_what_cannot_be_saved(here):
    """If a state cannot be saved, a TypeError names the key at fault before anything is written."""
    loop: list[object] = []
    loop.append(loop)
    with_attribute: OrderedDict[str, int] = OrderedDict()
    with_attribute.more = random.Random()
    nested = torch.nested.nested_tensor([], layout=torch.strided)
    for state, where, kind in (
        ({"step": 1 << 2039}, "state['step']", "an int of 2040 bits"),
        ({"a": torch.eye(2).to_sparse()}, "state['a']", "a sparse or nested tensor"),
        ({"a": nested}, "state['a']", "a sparse or nested tensor"),
        ({"loop": loop}, "state", "what holds itself, or too many levels"),
        ({"a": {"b": [np.ones(2)]}}, "state['a']['b'][0]", "numpy.ndarray"),
        ({"a": {(1, 2): 3}}, "state['a']", "a key of type tuple"),
        ({"rng": random.Random()}, "state['rng']", "random.Random"),
        ({"a": with_attribute}, "state['a']", "the attribute more of a dict"),
    ):
        refused = pytest.raises(TypeError, match=rf"^{re.escape(where)}: .*\b{kind}\.( |$)")
        with mpiddp.Checkpoints(here.folder / "run") as checkpoints, refused:
            checkpoints.save(1, state)
        runs().clear()  # or the tests after this one would write their records into it
    assert not (here.folder / "run").exists()


WRONG_RESUME = """
import os, signal, sys
from pathlib import Path
import torch, mpiddp

folder, wrong = sys.argv[1:]
with mpiddp.process_group(backend="gloo") as world:
    rank, restart = world.rank, os.environ["TORCHELASTIC_RESTART_COUNT"]
    folder += {"folder": f"-{rank}", "restart": f"-{restart}"}.get(wrong, "")
    if wrong in ("links", "places"):  # a home folder is a link on some hosts
        Path(str(rank)).mkdir(exist_ok=True)
        os.chdir(str(rank))
        if wrong == "links" and rank == 1 and restart == "0":
            Path("../0/new").mkdir(parents=True, exist_ok=True)
            Path("new").symlink_to("../0/new")
            os.kill(os.getpid(), signal.SIGKILL)  # before the ranks have named a folder
    width = {"config": 2, "width": rank}.get(wrong, 1)
    checkpoints = mpiddp.Checkpoints(folder, config={"width": width})
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 3)
    if wrong != "no resume":
        saved = checkpoints.resume()
        if wrong == "links" and rank == 1 and restart == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if saved is None:
            checkpoints.save(1, {"model": model.state_dict()})
    if wrong in ("no resume", "step"):
        checkpoints.save(2 + (wrong == "step") * rank, {})
    if wrong == "model":
        saved.load_into(model=torch.nn.Linear(3, 3))
    if wrong == "restart" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_wrong_resume_is_refused_by_all_ranks(here):
    """A checkpoint of another config or model, or a forgotten resume(), is refused by all ranks with code 2."""
    job = (here.script(WRONG_RESUME), "run")
    here.fork(*job, "nothing").assert_ok()
    for wrong, words in (
        ("config", "width 1, now 2"),
        ("model", r"weight was saved with shape \[3, 2\]"),
        ("no resume", "step_00000001"),
    ):
        here.fork(*job, wrong, ranks=2 if wrong == "model" else 1).assert_refused(words)
        assert steps_kept(here.folder / "run") == [1]


DIFFERENT = {
    "folder": r"folder differs: new-0 on rank 0 on \S+, new-1 on rank 1 on ",
    "width": r"config\['width'\] differs: 0 on rank 0 on \S+, 1 on rank 1 on ",
    "step": r"different steps: save\(2, …\) on rank 0 on \S+, save\(3, …\) on rank 1 on ",
    "restart": r"begin anew in new-1, which has no checkpoint: the run before it wrote to new-0\.",
}


def test_two_runs_are_never_made_in_silence(hosts):
    """Ranks that name different folders, settings or steps are refused, each value with its rank; so is a
    restart in another folder than the run before it. The sentence comes once.
    """
    for wrong, words in DIFFERENT.items():
        job = (hosts.script(WRONG_RESUME), "new", wrong)
        if wrong == "restart":
            done = hosts.run("launch", *hosts.where(2), "--max-restarts", "3", *job)
            assert done.stderr.count("restarting") == 1
        else:
            done = hosts.fork("node0:1,node1:1", *job)
        done.assert_refused(words)
        folders = sorted(path.name for path in hosts.folder.glob("new*"))
        assert folders == {"step": ["new"], "restart": ["new", "new-0"]}.get(wrong, [])


def test_one_folder_may_have_two_real_paths(here):
    """Ranks that reach the same folder by links save and restart there. A host has no two folders."""
    job = (here.script(WRONG_RESUME), "new")
    here.fork(*job, "places", ranks=2).assert_refused("not the folder of the other ranks")
    here.run("launch", *here.where(2), "--max-restarts", "2", *job, "links").assert_ok()
    assert steps_kept(here.folder / "0/new") == [1]


def test_run_in_use_is_refused(hosts):
    """A second job in the folder of a running job is refused. After a kill, the next job resumes at once."""
    train = ("train", *OPTIONS, "--save-every=1", "--out=run")
    first = hosts.start(*train).until("step 20/")
    for host in ("node1", "node0"):  # another host does not see the processes of the first
        second = hosts.fork(f"{host}:1", *train).assert_refused("^mpiddp: run: ")
        assert len(second.stderr.splitlines()) == 1, second.stderr
    assert first.process.poll() is None
    first.signal(signal.SIGKILL).wait()
    last = steps_kept(hosts.folder / "run")[-1]
    third = hosts.fork("node0:1", *train, f"--stop-at-step={last + 1}").assert_code(75)
    assert resumed_step(third) == last


FALLS_SILENT = """
import os, signal, torch, mpiddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
world = mpiddp.init(backend="gloo")
checkpoints = mpiddp.Checkpoints("run", timeout_s=10)
saved = checkpoints.resume()
checkpoints.save(saved.step + 2 if saved else 1, {"small": torch.zeros(2)})
if saved is None:
    large = distribute_tensor(torch.zeros(40_000_000), init_device_mesh("cpu", (2,)), [Shard(0)])
    checkpoints.save(2, {"large": large})
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
checkpoints.close()
"""


def test_silent_rank_in_a_save(here):
    """A rank that falls silent during a save is named within the time limit, and the job restarts."""
    job = ("launch", *here.where(2), "--max-restarts", "1", here.script(FALLS_SILENT))
    done = here.run(*job).assert_ok()
    assert re.search(r"step 2.*rank 1 on .* 10 s", done.stderr), done.stderr
    assert steps_kept(here.folder / "run") == [1, 3]


KILLED_IN_A_SAVE = """
import os, signal, sys, torch, mpiddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from mpiddp.checkpoints.save import Save
with mpiddp.process_group(backend="gloo") as world:
    checkpoints = mpiddp.Checkpoints("run", every=None)
    value = distribute_tensor(torch.zeros(8), init_device_mesh("cpu", (2,)), [Shard(0)])
    checkpoints.save(1, {"value": value})
    checkpoints._wait_for_own_save()
    if world.rank == 1:
        setattr(Save, sys.argv[1], lambda self: os.kill(os.getpid(), signal.SIGKILL))
    checkpoints.save(2, {"value": value})
"""


@pytest.mark.parametrize(("part", "kept"), [("_write", [1]), ("_publish", [1, 2])])
def test_a_rank_that_is_killed_in_a_save(here, part, kept):
    """A rank that is killed while the others' save waits for it costs at most this save: the job ends at once."""
    job = here.start("launch", *here.where(2), here.script(KILLED_IN_A_SAVE), part)
    job.until("step 2 was not saved: another rank has failed")
    done = job.wait().assert_code(1)
    assert "rank 1 on" in done.said[-1], done.stderr
    assert "was killed by SIGKILL" in done.said[-1], done.stderr
    assert steps_kept(here.folder / "run") == kept


# Damage


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kills"), [(1, 20), (2, 6)])
def test_kill_at_any_moment(here, ranks, kills):
    """A kill at any moment leaves a verified checkpoint, and costs at most the save in progress."""
    last = torn = 0
    while kills > 0 or torn < 4:  # of which at least four fall into a write
        kills -= 1
        done = here.fork(program("killed_saves.py"), "run", ranks=ranks)
        assert done.code in (-signal.SIGALRM, -signal.SIGKILL), done.stderr
        first, *_, newest = [int(line) for line in done.lines if line.isdigit()]
        assert last - 1 <= first <= last + 1
        last = newest
        names = [path.name for path in (here.folder / "run/checkpoints").iterdir()]
        torn += any(not name.startswith("step_") for name in names)


def test_any_flipped_bit_or_cut_is_found(tmp_path, sharded, capsys):
    """`mpiddp checkpoints verify` finds any flipped bit and any truncated file."""
    folder = step_folder(shutil.copytree(sharded, tmp_path / "run"), 2)
    files, draw = sorted(folder.iterdir()), random.Random(0)
    assert main(["checkpoints", "verify", str(folder)]) == 0
    for number in range(100):
        file = files[number % len(files)]
        content = file.read_bytes()
        if number % 3:
            flip_a_bit(file, draw.random())
        else:
            file.write_bytes(content[: draw.randrange(len(content))])
        assert main(["checkpoints", "verify", str(folder)]) == 1, (file, number)
        file.write_bytes(content)
    assert main(["checkpoints", "verify", str(folder)]) == 0
    capsys.readouterr()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("parallel", "name", "damage"),
    [("ddp", "model.safetensors", cut), ("fsdp", "shard_00001.safetensors", Path.unlink)],
)
def test_damaged_checkpoint_gives_way(here, parallel, name, damage):
    """If the newest checkpoint is damaged, the run names the file and resumes the checkpoint before it."""
    options = (*OPTIONS, "--steps-per-epoch=3", *SAVE_ALL, f"--parallel={parallel}", "--out=run")
    train = partial(here.train, *options, ranks=2 if parallel == "fsdp" else 0)
    train("--stop-at-step=2").assert_code(75)
    run = here.folder / "run"
    damage(step_folder(run, 2) / name)
    done = train().assert_ok()
    assert resumed_step(done) == 1
    assert re.search(rf"step_00000002: .*{name}.*step_00000001 \(1 steps? lost\)", done.stdout)
    assert steps_kept(run)[-2:] == [2, 3]
    assert (run / "checkpoints/step_00000002.old").exists()


def test_failing_disk_starts_nothing_anew(here):
    """If the disk fails to read a checkpoint, the run fails, and does not start over."""
    train = (*OPTIONS, "--steps-per-epoch=2")
    here.train(*train, "--out=run").assert_ok()
    complete = step_folder(here.folder / "run", 2) / "COMPLETE"
    complete.unlink()
    complete.symlink_to("/proc/self/mem")  # a file that fails to be read, as a bad sector does
    done = here.train(*train, "--out=run").assert_code(1)
    assert re.search("step_00000002: COMPLETE.*Input/output error", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    assert complete.is_symlink()


def test_checkpoint_commands(here, sharded):
    """`mpiddp checkpoints` lists, verifies and prunes checkpoints."""
    run = shutil.copytree(sharded, here.folder / "run")
    shutil.copytree(step_folder(run, 2), step_folder(run, 3))
    flip_a_bit(step_folder(run, 3) / "shard_00000.safetensors")
    cut(step_folder(run, 1) / "tree.pt")
    verify = here.run("checkpoints", "verify", "run").assert_code(1)
    assert "step_00000002: verified" in verify.stdout
    assert "step_00000001" in verify.stderr
    assert "step_00000003: shard_00000.safetensors does not match its SHA-256" in verify.stderr
    listed = here.run("checkpoints", "list", "run").assert_ok().lines
    assert [line.split()[0] for line in listed] == [f"step_0000000{step}" for step in (1, 2, 3)]
    assert [line.split()[-1] for line in listed] == ["broken", "intact", "intact"]
    here.run("checkpoints", "prune", "run", "--keep", "1").assert_ok()
    assert step_folder(run, 2).exists()


# Hosts without a shared disk


@pytest.fixture
def apart(hosts: Hosts) -> Hosts:
    """The hosts, none of which has a run in its private folder."""
    for host in hosts.cluster.hosts:
        shutil.rmtree(host.path(PRIVATE), ignore_errors=True)
    return hosts


def test_lost_host_of_rank_0(apart):
    """Hosts without a shared disk keep each whole checkpoint. The loss or damage of one loses nothing."""
    train = ("train", *MODEL, "--use-syn", "--batch-size=8", "--epochs=1", "--steps-per-epoch=8")
    train += ("--amp=off", "--save-every=2", f"--out={PRIVATE}")
    apart.fork("node0:1,node1:1", *train, "--stop-at-step=3").assert_code(75)
    node0, node1, node2 = (host.path(PRIVATE) for host in apart.cluster.hosts)
    assert steps_kept(node0) == steps_kept(node1) == [2, 3]

    flip_a_bit(step_folder(node0, 3) / "model.safetensors")
    done = apart.fork("node0:1,node1:1", *train, "--stop-at-step=5")
    assert (done.code, resumed_step(done)) == (75, 3), done.stderr
    damaged = "step_00000003: model.safetensors does not match its SHA-256; another host"
    assert damaged in done.stdout
    assert steps_kept(node0) == steps_kept(node1) == [4, 5]
    kept = contents(node0, 5)

    # node0 is lost; the new first host has no checkpoint yet.
    done = apart.fork("node2:1,node1:1", *train, "--stop-at-step=6")
    assert (done.code, resumed_step(done)) == (75, 5), done.stderr
    assert steps_kept(node2) == [5, 6]
    assert unequal(contents(node2, 5), kept) == []

    # node0 comes back with older checkpoints, the newest of them damaged.
    cut(step_folder(node0, 5) / "model.safetensors")
    done = apart.fork("node0:1,node1:1", *train).assert_ok()
    assert resumed_step(done) == 6
    assert steps_kept(node0) == steps_kept(node1) == [6, 8]
    assert list(losses(node1)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_lost_host_of_shards(apart):
    """Without a shared disk, each shard is on two hosts. The loss of one host loses no step."""
    train = ("train", *MODEL, "--use-syn", "--global-batch-size=24", "--epochs=1")
    train += ("--steps-per-epoch=8", "--save-every=2", "--parallel=fsdp", f"--out={PRIVATE}")
    nodes = [host.path(PRIVATE) for host in apart.cluster.hosts]

    def shards(node: Path, step: int) -> list[str]:
        return sorted(path.name for path in verified(step_folder(node, step)).glob("shard_*"))

    apart.fork("node0:1,node1:1,node2:1", *train, "--stop-at-step=4").assert_code(75)
    for node, kept in zip(nodes, ("02", "01", "12"), strict=True):
        assert shards(node, 4) == [f"shard_0000{rank}.safetensors" for rank in kept]
    apart.run("checkpoints", "pin", PRIVATE, "4").assert_ok()  # on node0 alone

    shutil.rmtree(nodes[2])
    done = apart.fork("node1:1,node0:1", *train, "--stop-at-step=6")
    assert (done.code, resumed_step(done)) == (75, 4), done.stderr
    for node in nodes[:2]:
        assert shards(node, 6) == ["shard_00000.safetensors", "shard_00001.safetensors"]
        assert not list((node / "checkpoints").glob(".*")), "what a resume has received stays"

    done = apart.fork("node0:1,node1:1,node2:1", *train).assert_ok()
    assert resumed_step(done) == 6
    assert list(losses(nodes[0])) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps_kept(nodes[0]) == steps_kept(nodes[1]) == [4, 6, 8], "a pin counts on every host"

    shutil.rmtree(nodes[1])
    shutil.rmtree(nodes[2])  # of step 8, node0 has the shards of two of three ranks; of step 6, all
    done = apart.fork("node0:1", *train).assert_ok()
    assert resumed_step(done) == 6
    assert "step_00000008: shard_00001.safetensors" in done.stdout


def test_lost_host_of_a_stage(apart):
    """Without a shared disk, a pipeline's stage survives the loss of its host, whose shards another keeps."""
    job = (program("states.py"), "save", PRIVATE, "pipeline", "values")
    apart.fork("node0:1,node1:1", *job).assert_ok()
    shutil.rmtree(apart["node1"].path(PRIVATE))
    apart.fork("node0:1", program("states.py"), "resume", PRIVATE, "pipeline", "values").assert_ok()


RECEIVES = """
import sys, torch, mpiddp
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
with mpiddp.process_group(backend="gloo") as world:
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with mpiddp.Checkpoints(sys.argv[1], every=None, keep=1) as checkpoints:
        first, mapped = 0, None
        if saved := checkpoints.resume():
            saved.load_into(model=model)
            first, mapped = saved.step, saved.state.pop("w")
        for step in (first + 1, first + 2):
            checkpoints.save(step, model=model, w=torch.ones(9))
            checkpoints._wait_for_own_save()
            received = list(Path(sys.argv[1]).glob("checkpoints/.*received*"))
            assert bool(received) == (world.rank == 1 and mapped is not None), received
            mapped = None
"""


def test_received_shards_go_with_their_tensors(apart):
    """What a resume has received from other hosts is removed by the first save after its tensors have gone."""
    job = apart.script(RECEIVES)
    apart.fork("node0:1,node1:1", job, PRIVATE).assert_ok()
    done = apart.fork("node0:1,node2:1", job, PRIVATE).assert_ok()
    assert (resumed_step(done), "sending" in done.stdout) == (2, True)


def test_killed_script_restarts(apart, undisturbed):
    """A restart repeats a script's steps since its last save, and ends with the same bits.

    So does a start after the loss of a host with its disk. These hosts share no disk for checkpoints.
    """
    job = example(apart.folder / "job", each_step=DIES)
    job.write_text(job.read_text().replace("runs/ddp", str(PRIVATE)))
    where = ("-H", "node0:1,node1:1", "--max-restarts", "1")
    done = apart.run("launch", *where, job, env=ENV).assert_ok()
    assert "was killed by SIGKILL" in done.stderr
    assert resumed_step(done) == 15
    nodes = [host.path(PRIVATE) for host in apart.cluster.hosts]
    assert steps_kept(nodes[0]) == steps_kept(nodes[1]) == [35, 40]
    assert unequal(weights(apart.folder), weights(undisturbed)) == []

    shutil.rmtree(nodes[0])
    shutil.rmtree(step_folder(nodes[1], 40))
    (apart.folder / "model.pt").unlink()
    done = apart.fork("node2:1,node1:1", by_hand(job)).assert_ok()
    assert resumed_step(done) == 35
    assert steps_kept(nodes[2]) == steps_kept(nodes[1]) == [35, 40]
    assert unequal(weights(apart.folder), weights(undisturbed)) == []


STATISTICS = """
import sys, torch, mpiddp
with mpiddp.process_group(backend="gloo") as world:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))
    with mpiddp.Checkpoints(sys.argv[1], every=None) as checkpoints:
        saved = checkpoints.resume()
        model(torch.full((4, 2), float(world.rank + 1))).sum().backward()
        checkpoints.save(saved.step + 1 if saved else 1, model=model)
"""


def test_hosts_apart_save_the_same_statistics(apart):
    """Hosts without a shared disk save the BatchNorm statistics of one rank, so a resume sends nothing."""
    job = ("node0:1,node1:1", apart.script(STATISTICS), PRIVATE)
    apart.fork(*job).assert_ok()
    first, second = (step_folder(apart[name].path(PRIVATE), 1) for name in ("node0", "node1"))
    assert (first / "manifest.json").read_text() == (second / "manifest.json").read_text()
    mean = contents(apart["node0"].path(PRIVATE), 1)["model"]["module.running_mean"]
    assert mean.tolist() == pytest.approx([0.1, 0.1])  # that of rank 0
    done = apart.fork(*job).assert_ok()
    assert (resumed_step(done), "sending" in done.stdout) == (1, False)


def test_hsdp_resumes_bit_for_bit(hosts):
    """On a shared disk, hsdp saves each shard once, resumes bit for bit, and can continue as ddp."""
    train = ("node0:2,node1:2", "train", *MODEL, "--use-syn", "--global-batch-size=24")
    train += ("--epochs=1", "--steps-per-epoch=4", "--amp=off", "--lr=0.01", *SAVE_ALL)
    whole = hosts.folder / "whole"
    hosts.fork(*train, "--parallel=hsdp", f"--out={whole}").assert_ok()
    resumed = crashed_after(3, whole, hosts.folder / "resumed")
    done = hosts.fork(*train, "--parallel=hsdp", f"--out={resumed}").assert_ok()
    assert resumed_step(done) == 3
    expected = contents(whole, 4)
    assert unequal(contents(resumed, 4), expected) == []
    parts = [
        expected[f"shard_{rank:05d}"] for rank in range(2)
    ]  # ranks 2 and 3 have the same shards
    saved = sum(each.numel() for part in parts for each in part.values())
    assert saved == 2 * summary(whole)["num_parameters"]  # and the momentum

    options = ("--parallel=ddp", f"--resume={step_folder(whole, 3)}", "--out=ddp")
    hosts.fork(*train, *options).assert_ok()
    assert losses(hosts.folder / "ddp") == pytest.approx({4: losses(whole)[4]}, rel=1e-4)


# Object storage


IN_A_BUCKET = """
import sys, torch, mpiddp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
with mpiddp.process_group(backend="gloo") as world:
    whole = torch.nn.ParameterDict({"a": torch.zeros(3)})
    with mpiddp.Checkpoints(sys.argv[1], every=None, keep=2) as checkpoints:
        if saved := checkpoints.resume():
            saved.load_into(whole=whole)
            assert whole["a"].tolist() == [saved.step] * 3
            assert saved.state["sharded"]["b"].full_tensor().tolist() == [saved.step] * 4
        first = saved.step if saved else 0
        mesh = init_device_mesh("cpu", (world.world_size,))
        for step in range(first + 1, first + 4):
            whole["a"].data.fill_(step)
            part = distribute_tensor(torch.full((4,), float(step)), mesh, [Shard(0)])
            mpiddp.log_metrics(step, loss=1 / step)
            checkpoints.save(step, whole=whole, sharded={"b": part})
    if world.rank == 0:
        print(f"from {first} to {first + 3}", flush=True)
"""


def test_a_run_in_object_storage(here):
    """A checkpoint in a bucket is whole or absent, verified, pruned, and resumed where no disk has it."""
    address, job = "s3://models/runs/a", here.script(IN_A_BUCKET)
    env = {
        **installs.environment("moto"),
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "a"),
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(here.folder / "cache"),
    }
    server = here.start("python", "-m", "moto.server", "-p", "0", env=env).until("Running on http")
    env["AWS_ENDPOINT_URL"] = re.search(r"http://\S+", server.stderr)[0]

    def s3(code: str) -> None:
        files = "import s3fs; files = s3fs.S3FileSystem(use_listings_cache=False)"
        here.run("python", "-c", f"{files}; {code}", env=env).assert_ok()

    def train() -> str:
        return here.fork(job, address, ranks=2, env=env).assert_ok().stdout

    def listed() -> list[str]:
        lines = here.run("checkpoints", "list", address, env=env).assert_ok().lines
        return [line.split()[0] for line in lines]

    s3("files.mkdir('models')")
    assert "from 0 to 3" in train()
    assert listed() == ["step_00000002", "step_00000003"]
    shutil.rmtree(here.folder / "cache")
    assert "from 3 to 6" in train()
    shutil.rmtree(here.folder / "cache")
    s3("files.pipe_file('models/runs/a/checkpoints/step_00000006/shard_00001.safetensors', b'x')")
    said = train()
    assert "step_00000006: shard_00001.safetensors has 1 bytes" in said
    assert "from 5 to 8" in said
    s3("files.rm_file('models/runs/a/checkpoints/step_00000008/COMPLETE')")
    shutil.rmtree(here.folder / "cache")
    here.run("checkpoints", "pin", address, "7", env=env).assert_ok()
    said = train()
    assert "from 7 to 10" in said
    assert said.count("downloading") == 1, "a start brings one checkpoint"
    assert listed() == [f"step_{step:08d}" for step in (7, 9, 10)]
    here.run("checkpoints", "rewind", address, "9", env=env).assert_ok()
    assert "from 9 to 12" in train()
    assert "from 12 to 15" in train()
    assert listed()[0] == "step_00000007", "a pin of the bucket counts on every host"
    verify = here.run("checkpoints", "verify", address, env=env).assert_ok()
    assert verify.stdout.count(": verified") == 3
    server.signal(signal.SIGKILL).wait()
    lost = here.run("checkpoints", "list", address, env=env).assert_code(1)
    assert lost.stderr.count("\n") == 1, lost.stderr


def test_a_bucket_is_one_more_copy(tmp_path, monkeypatch, capsys):
    """A bucket that is away loses nothing: the run says at once what only its disk has, resumes from there,
    and uploads it when the bucket is back. If the bucket is lost, or the disk, the other one is enough.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(fsspec.config.conf, "local", {"auto_mkdir": True})  # as an object store
    store, gone = tmp_path / "bucket", tmp_path / "gone"
    address, local = f"local://{store}/a", local_path(f"local://{store}/a")

    def train(steps: int) -> None:
        """Save the steps up to this one, and end as a kill ends a run: no upload is tried again."""
        checkpoints = mpiddp.Checkpoints(address, every=None, keep=2)
        saved = checkpoints.resume()
        first = saved.step + 1 if saved else 1
        del saved  # its tensor would keep the checkpoint
        for step in range(first, steps + 1):
            checkpoints.save(step, {"step": torch.tensor(step)})
            checkpoints._wait_for_own_save()
        checkpoints._end(KeyboardInterrupt())
        runs().clear()

    def in_bucket() -> list[int]:
        return steps_kept(store / "a")

    train(1)
    store.rename(gone)
    store.touch()  # whatever asks for a file there gets an error
    checkpoints = mpiddp.Checkpoints(address, every=None)
    with pytest.raises(mpiddp.JobFailed, match="Not a directory"):
        checkpoints.resume()  # the newest one may be there
    store.unlink()
    gone.rename(store)
    runs().clear()

    checkpoints = mpiddp.Checkpoints(address, every=None, keep=2)
    assert checkpoints.resume().step == 1
    store.rename(gone)
    store.touch()
    for step in (2, 3):
        checkpoints.save(step, {"step": torch.tensor(step)})
        checkpoints._wait_for_own_save()
        words = f"step_{step:08d} is on this disk, and not in {address}: "
        assert words in capsys.readouterr().err
    with pytest.raises(mpiddp.JobFailed, match="is on this disk, and not in"):
        checkpoints.close()
    store.unlink()
    gone.rename(store)
    assert (steps_kept(local), in_bucket()) == ([2, 3], [1])
    runs().clear()

    assert mpiddp.load(address).step == 1
    train(4)  # back: it goes on from the disk, and uploads what is newer
    assert (steps_kept(local), in_bucket()) == ([3, 4], [3, 4])
    shutil.rmtree(store)  # lost
    train(5)
    assert in_bucket() == [4, 5]
    shutil.rmtree(tmp_path / "cache")
    assert main(["checkpoints", "pin", address, "4"]) == 0
    train(7)
    assert in_bucket() == [4, 6, 7]
    assert steps_kept(local) == [6, 7]
    shutil.rmtree(store)
    with mpiddp.Checkpoints(address, every=None, keep=2) as checkpoints:
        assert (
            checkpoints.resume().step == 7
        )  # it makes no step, and its end brings the bucket up to date
    assert in_bucket() == [6, 7]
    assert main(["checkpoints", "list", address]) == 0
    assert capsys.readouterr().out.count("whole") == 2


# Disks


@contextmanager
def disk(hosts: Hosts, folder: Path, megabytes: float) -> Iterator[Path]:
    """A disk of this size at a folder of node0; returns the folder's path on this machine."""
    node0 = hosts["node0"]
    node0.path(folder).mkdir(parents=True, exist_ok=True)
    with faults.mounted(node0, folder, "-o", f"size={int(megabytes * 1000)}k"):
        try:
            yield node0.path(folder)
        finally:
            hosts.clear()


def test_full_disk(apart):
    """A full disk damages no checkpoint. The training goes on. If its last save fails, the exit code is 1."""
    train = ("train", *OPTIONS, "--amp=off", "--batch-size=4")
    train += ("--steps-per-epoch=5", "--save-every=1", f"--out={PRIVATE}")
    with disk(apart, PRIVATE / "checkpoints", 5.75) as saves:  # a checkpoint has 2.3 MB
        run = saves.parent
        warned = apart.fork("node0:1", *train).assert_code(1)
        assert "epoch 1/1  step 5/5" in warned.stdout
        assert warned.stderr.count("cannot be saved") >= 3
        assert steps_kept(run) == [1, 2]
        assert len(list(saves.iterdir())) == 2, "an incomplete checkpoint is left"

        larger = ["mount", "-o", "remount,size=9M", str(PRIVATE / "checkpoints")]
        apart["node0"].run(larger, check=True)
        done = apart.fork("node0:1", *train).assert_ok()
        assert resumed_step(done) == 2
        assert steps_kept(run) == [4, 5]


@pytest.mark.parametrize("trouble", ["read-only", "full"])
def test_disk_that_works_again(apart, trouble):
    """If a disk is full or read-only for a while, the training goes on, and saves again afterwards."""
    train = ("train", *OPTIONS, "--amp=off", "--batch-size=4", "--save-every=1", f"--out={PRIVATE}")
    node0, run = apart["node0"], apart["node0"].path(PRIVATE)
    folder = PRIVATE if trouble == "full" else PRIVATE / "checkpoints"
    remount = ["mount", "-o", "remount,ro", str(folder)]  # fails with "busy" during a write
    fill = f"for _ in $(seq 10); do cat /dev/zero >>{PRIVATE}/filler; sleep 0.1; done"
    with disk(apart, folder, 20):
        job = apart.start(*train)
        eventually(lambda: newest(run) > 2)
        if trouble == "full":  # again and again: a failed save frees space
            node0.run(["sh", "-c", fill])
        else:
            eventually(lambda: node0.run(remount).returncode == 0, poll_s=0)
        job.until("warning: ")
        before = newest(run)
        if trouble == "full":
            node0.run(["rm", f"{PRIVATE}/filler"], check=True)
        else:
            node0.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        eventually(lambda: newest(run) > before + 3)
        assert job.process.poll() is None
        job.signal(signal.SIGTERM).wait().assert_code(75)
        assert len(steps_kept(run)) == 2
        steps = list(losses(run))
        assert steps == sorted(set(steps))


def newest(run: Path) -> int:
    """The newest step in a run's folder, while it is written."""
    names = (path.name for path in (run / "checkpoints").glob("step_????????"))
    return max((int(name.removeprefix("step_")) for name in names), default=0)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The address of an object storage, which is a folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(fsspec.config.conf, "local", {"auto_mkdir": True})
    yield f"local://{tmp_path}/store"
    runs().clear()


def went_on(folder: object, *scores: float, **options: Any) -> int:
    """Save a step for each score, after the step from which the run resumes. Returns this step."""
    runs().clear()
    with mpiddp.Checkpoints(str(folder), every=None, **options) as checkpoints:
        saved = checkpoints.resume()
        before = saved.step if saved else 0
        del saved  # its tensor would keep the checkpoint
        for step, score in enumerate(scores, before + 1):
            checkpoints.save(step, {"step": torch.tensor(step)})
            mpiddp.log_metrics(step, val=score)
    return before


def test_addresses_with_a_folder_called_checkpoints(store):
    """Runs below it are two runs, and each has a copy of its own on this disk."""
    for name in ("a", "b"):
        address = f"{store}/checkpoints/{name}"
        assert went_on(address, 0.1) == 0
        assert (
            mpiddp.load(address).step
            == mpiddp.load(f"{address}/checkpoints/step_00000001").step
            == 1
        )


def test_the_best_checkpoint_of_another_host(store, tmp_path):
    """It is kept in the bucket by a host that has only the newest, and on a disk without the records of its score."""
    options: dict[str, Any] = {"keep": 1, "best": ("val", "min")}
    assert went_on(store, 0.1, 0.5, 0.6, **options) == 0
    shutil.rmtree(tmp_path / "cache")
    assert went_on(store, 0.8, 0.9, **options) == 3
    assert mpiddp.load(store, best=True).step == 1
    went_on(tmp_path / "run", 0.1, 0.5, 0.6, **options)
    (tmp_path / "run/metrics.jsonl").write_text(
        ""
    )  # the script logs on rank 0 alone, which was on another host
    went_on(tmp_path / "run", 0.8, 0.9, **options)
    assert steps_kept(tmp_path / "run") == [1, 5]


def test_a_damaged_copy_of_what_a_bucket_has(store):
    """The disk may have changed a bit. The run resumes from the bucket's copy, and loses no step."""
    went_on(store, 0.1, 0.2)
    (newest,) = (local_path(store) / "checkpoints/step_00000002").glob("*.safetensors")
    content = newest.read_bytes()
    newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert went_on(store, 0.3) == 2


def test_an_evaluator_beside_a_run_in_a_bucket(store, tmp_path, monkeypatch):
    """Its disk has only what the bucket still has, or what is newer."""
    for _ in range(5):
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "evaluator"))
            if (tmp_path / "store").exists():
                mpiddp.load(store)
                kept = steps_kept(local_path(store))
        went_on(store, 0.1)
    assert len(kept) == 1


LOADS_SLOWLY = """
import fsspec, os, pathlib, sys, time, mpiddp
import mpiddp.checkpoints.bucket
rename = pathlib.Path.rename
def slowly(self, target):
    time.sleep(0.3)
    renamed = rename(self, target)
    time.sleep(0.3)
    return renamed
pathlib.Path.rename = slowly
for _ in range(3):
    if not os.fork():
        break
os.write(1, b"%d\\n" % mpiddp.load(sys.argv[1]).step)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


def test_ranks_that_load_from_a_bucket_at_once(here, store):
    """All ranks of a host load the same step, and only one of them downloads it."""
    went_on(store, 0.1, 0.2)
    shutil.rmtree(local_path(store))
    env = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    assert (
        here.run("python", here.script(LOADS_SLOWLY), store, env=env).assert_ok().lines == ["2"] * 4
    )


UPLOADS_SLOWLY = """
import sys, time, fsspec, torch, mpiddp
from mpiddp.checkpoints import bucket
put = bucket.Bucket._put
def slowly(self, path, *folder):
    if path.suffix == ".safetensors":
        time.sleep(3)
    put(self, path, *folder)
bucket.Bucket._put = slowly
fsspec.config.conf["local"] = {"auto_mkdir": True}
with mpiddp.process_group(), mpiddp.Checkpoints(sys.argv[1], every=None, timeout_s=1.0) as checkpoints:
    checkpoints.resume()
    for step in (1, 2):
        checkpoints.save(step, {"step": torch.tensor(step)})
"""


def test_a_slow_upload(here, store):
    """A rank that uploads is not silent, however long it takes."""
    env = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    here.fork(here.script(UPLOADS_SLOWLY), store, ranks=2, env=env).assert_ok()
    assert mpiddp.load(store).step == 2


def test_a_file_server_that_is_away_for_a_moment(tmp_path, monkeypatch, capsys):
    """The save fails with a line, and the training goes on."""
    away, is_dir = [False], Path.is_dir

    def asked(self: Path) -> bool:
        if away[0] and str(tmp_path) in str(self):
            raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN), str(self))
        return is_dir(self)

    monkeypatch.setattr(Path, "is_dir", asked)
    runs().clear()
    with mpiddp.Checkpoints(tmp_path / "run", every=None, keep=9) as checkpoints:
        checkpoints.resume()
        for step in range(1, 6):
            checkpoints._wait_for_own_save()
            away[0] = step == 3
            checkpoints.save(step, {"step": torch.tensor(step)})
    assert {1, 2, 5} <= {*steps_kept(tmp_path / "run")}
    runs().clear()


def test_a_host_that_was_away_during_a_rewind(apart):
    """What a person has set aside stays aside, though that host still has it."""
    train = (
        "train",
        *OPTIONS,
        "--steps-per-epoch=9",
        "--amp=off",
        *SAVE_ALL,
        f"--out={PRIVATE}",
        "--batch-size=4",
    )
    apart.fork("node0:1,node1:1", *train, "--stop-at-step=4").assert_code(75)
    apart["node0"].run(
        [sys.executable, "-m", "mpiddp", "checkpoints", "rewind", PRIVATE, "2"],
        check=True,
        cwd=ROOT,
    )
    done = apart.fork("node0:1,node2:1", *train, "--stop-at-step=3").assert_code(75)
    assert resumed_step(done) == 2
    done = apart.fork("node0:1,node1:1", *train, "--stop-at-step=5")
    assert resumed_step(done) == 3


def test_a_start_from_another_run_whose_hosts_differ(apart):
    """--resume refuses a run whose newest checkpoint is another one on each host: their steps would not match."""
    other, new = PRIVATE / "other", PRIVATE / "new"
    train = ("train", *OPTIONS, "--steps-per-epoch=9", "--amp=off", *SAVE_ALL, "--batch-size=4")
    apart.fork("node0:1,node1:1", *train, f"--out={other}", "--stop-at-step=2").assert_code(75)
    shutil.rmtree(step_folder(apart["node1"].path(other), 2))
    done = apart.fork("node0:1,node1:1", *train, f"--out={new}", f"--resume={other}").assert_code(2)
    assert (
        f"the newest checkpoint of {other} is step 1 on one host, and 2 on another." in done.stderr
    )
    one = f"--resume={other}/checkpoints/step_00000001"
    apart.fork("node0:1,node1:1", *train, f"--out={new}", one, "--stop-at-step=2").assert_code(75)
