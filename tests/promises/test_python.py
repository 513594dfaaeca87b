"""Python: functions, notebooks, frameworks and meshes on the ranks; measurements and records."""

import json
import os
import re
import shutil
import signal
import sys
from statistics import median
from typing import Any

import pytest

from tests.support import installs
from tests.support.patience import slowness
from tests.support.place import Here, Hosts, Place, eventually, program
from tests.support.ranks import ROOT
from tests.support.training import steps_kept

HYBRID = str(ROOT / "examples/hybrid.py")


def spawns(place: Place, how: str) -> list[str]:
    """The command of a script that calls mpiddp.spawn. Only node0 has its file, and both have its module."""
    if isinstance(place, Here):
        return ["python", program("spawns.py"), "localhost:2", how]
    assert isinstance(place, Hosts)
    home = place["node0"].home()
    for host, name in (("node0", "spawns.py"), ("node0", "spawned.py"), ("node1", "spawned.py")):
        shutil.copy(program(name), place[host].path(f"{home}/{name}"))
    return ["python", f"{home}/spawns.py", "node1:1,node0:1", how]


def test_spawn_returns_results(hosts):
    """mpiddp.spawn runs a function on every rank, even on hosts without its file, and returns the results."""
    done = hosts.run(*spawns(hosts, "sums")).assert_ok()
    assert done.lines[-2:] == ["node1 0 3", "node0 10 3"]
    assert sorted(done.lines[:-2]) == ["out 0", "out 1"]


CALLS = """
import time, mpiddp
from itertools import pairwise
from statistics import median
mpiddp.init()
checkpoints = mpiddp.Checkpoints("run", every=100_000)
times = []
for step in range(1, 20_001):
    if step % 1000 == 1:
        times.append(time.perf_counter())
    mpiddp.progress(step, 20_000, loss=0.5)
    checkpoints.due(step)
    mpiddp.should_stop()
print(median(later - earlier for earlier, later in pairwise(times)) / 1000, flush=True)
"""


def test_what_a_step_calls(here):
    """progress, should_stop, and the due of a number of steps take some microseconds of a step."""
    done = here.run("launch", *here.where(2), here.script(CALLS)).assert_ok()
    assert len(done.lines) == 2
    assert max(map(float, done.lines)) < 200e-6 * slowness()


OWN_MODULES = {
    "calls.py": """\
import os

import helper
import mpiddp
import space.shifts
from pkg import scale


def work(x):
    from torch.utils.data import DataLoader

    import sets

    kinds = ("fork", "spawn", "forkserver")
    loaders = [
        DataLoader(sets.Numbers(), 4, num_workers=1, multiprocessing_context=each) for each in kinds
    ]
    sums = [int(batch.sum()) for loader in loaders for batch in loader]
    return [helper.locked(scale(space.shifts.shifted(x))), *sums, helper.DATA.exists()]


print(mpiddp.spawn(work, 1, hosts="localhost:1"))
print(mpiddp.spawn(helper.locked, 1, hosts="localhost:1"))
with open(helper.__file__, "a") as file:
    file.write("VERSION = 2\\n")
print(mpiddp.spawn(helper.locked, 1, hosts="localhost:1"))
""",
    "helper.py": """\
import threading
from pathlib import Path

LOCK = threading.Lock()
DATA = Path(__file__).with_name("data.txt")
VERSION = 1


def locked(x):
    with LOCK:
        return x + VERSION
""",
    "sets.py": """\
class Numbers:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index
""",
    "pkg/__init__.py": "from .inner import scale\n",
    "pkg/inner.py": "def scale(x):\n    from . import lazy\n    return lazy.FACTOR * x\n",
    "pkg/lazy.py": "FACTOR = 10\n",
    "space/shifts.py": "def shifted(x):\n    return x + 1\n",
    "data.txt": "beside a module",
}


def test_spawn_finds_own_modules(here):
    """The ranks find a function's modules where the caller does: packages, what it imports late, one with a
    lock. An edited module counts from the next call on.
    """
    home = here.folder / "home"
    for name, text in OWN_MODULES.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    done = here.run(sys.executable, home / "calls.py").assert_ok()
    assert done.lines[:3] == ["[[21, 6, 6, 6, True]]", "[2]", "[3]"]


REGISTERS = """
import cloudpickle, mpiddp, shifts
try:
    mpiddp.spawn(shifts.shifted, 1, hosts="node1:1")
except mpiddp.UserError as error:
    assert "cloudpickle.register_pickle_by_value(shifts)" in str(error), error
cloudpickle.register_pickle_by_value(shifts)
print(mpiddp.spawn(shifts.shifted, 1, hosts="node1:1"))
"""


def test_spawn_ships_a_registered_module(hosts):
    """A module that a host lacks is named, with the call that lets it travel."""
    host = hosts["node0"]
    home = f"{host.home()}/ships"
    for name, text in {"calls.py": REGISTERS, "shifts.py": "def shifted(x): return x + 1"}.items():
        file = host.path(f"{home}/{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert hosts.run("python", f"{home}/calls.py").assert_ok().lines[-1] == "[2]"


def test_spawn_raises_the_first_failure(hosts):
    """mpiddp.spawn raises the exception of the first rank that fails, with its traceback."""
    done = hosts.run(*spawns(hosts, "fails")).assert_ok()
    assert done.lines[0] == "1 node0 Trouble(7)"
    assert "raise spawned.Trouble(7)" in done.stdout


def test_spawn_restarts_saves_and_stops(here):
    """A spawned function restarts, saves, resumes and stops as a script does."""
    done = here.run("python", program("spawns.py"), "localhost:1", "restarts").assert_ok()
    assert done.lines[-1] == "[1]"
    assert steps_kept(here.folder / "run") == [1]
    done = here.run(*spawns(here, "stops")).assert_ok()
    first, second = json.loads(done.lines[-1])
    assert first == second > 5


@pytest.mark.parametrize(
    ("place", "number"), [("here", signal.SIGINT), ("hosts", signal.SIGKILL)], indirect=["place"]
)
def test_end_of_the_caller(place, number):
    """If the process that called mpiddp.spawn ends, its job ends on every host."""
    job = place.start(*spawns(place, "sleeps")).until("ready", 2)
    job.signal(number).wait()
    eventually(lambda: not place.processes())


def test_notebook(here):
    """A notebook's cell shows the results, output and exceptions of the ranks, and can be interrupted."""
    env = installs.environment("ipykernel")
    here.run("python", program("notebook.py"), env=env).assert_ok()
    eventually(lambda: not here.processes())


OF_LIGHTNING = """
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

torch.manual_seed(1)
x = torch.rand(48, 1)
loader = DataLoader(TensorDataset(x, 2 * x), batch_size=4, num_workers=1)
saves = ModelCheckpoint(dirpath="out", filename="saved-{epoch}", save_last=True)
where = {"accelerator": "cpu", "strategy": "ddp", "devices": 1, "num_nodes": 2}
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
trainer = Trainer(max_epochs=5, callbacks=[saves], **where, **quiet)
trainer.fit(Regression(), loader)
loss = float(trainer.callback_metrics["loss"])
print(f"rank {trainer.global_rank} of {trainer.world_size}: loss {loss:.3f}\\n", end="", flush=True)
"""


def test_lightning(hosts):
    """PyTorch Lightning works unchanged on several hosts."""
    job = ("launch", *hosts.where(2), hosts.script(OF_LIGHTNING))
    done = hosts.run(*job, env=installs.environment("lightning")).assert_ok()
    losses = dict(re.findall(r"^rank (\d) of 2: loss (\S+)$", done.stdout, re.M))
    assert losses["0"] == losses["1"]
    assert float(losses["0"]) < 0.2
    saved = sorted(path.name for path in (hosts.folder / "out").iterdir())
    assert saved == ["last.ckpt", "saved-epoch=4.ckpt"]


def test_accelerate(here):
    """accelerate passes its own test scripts under mpiddp."""
    env = installs.environment("accelerate") | {"ACCELERATE_USE_CPU": "1"}
    options = ("-x", "ACCELERATE_USE_CPU", *here.where(2))
    names = [f"accelerate.test_utils.scripts.test_{name}" for name in ("ops", "sync", "script")]
    job = "".join(f"runpy.run_module({name!r}, run_name='__main__')\n" for name in names)
    job = here.script(f"import runpy\n{job}print('all have passed')")
    assert (
        here.run("launch", *options, job, env=env).assert_ok().stdout.count("all have passed") == 2
    )


OF_TRANSFORMERS = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"input_ids": torch.full((8,), index), "labels": torch.tensor(index % 2)}

sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
steps = {"max_steps": 6, "save_steps": 3, "logging_steps": 3, "per_device_train_batch_size": 4}
quiet = {"report_to": [], "disable_tqdm": True}
arguments = TrainingArguments("out", use_cpu=True, dataloader_num_workers=1, **steps, **quiet)
torch.manual_seed(1)
model = BertForSequenceClassification(BertConfig(vocab_size=64, **sizes))
made = Trainer(model, arguments, train_dataset=Numbers()).train().global_step
print(f"rank {arguments.process_index} of {arguments.world_size}: {made} steps\\n", end="", flush=True)
"""


def test_transformers(here):
    """The Trainer of transformers trains on all ranks, and saves."""
    (here.folder / "out").mkdir()  # rank 0 alone would make it
    job = ("launch", *here.where(2), here.script(OF_TRANSFORMERS))
    done = here.run(*job, env=installs.environment("transformers")).assert_ok()
    assert sorted(re.findall(r"^rank (\d) of 2: 6 steps$", done.stdout, re.M)) == ["0", "1"]
    saved = sorted(path.name for path in (here.folder / "out").glob("checkpoint-*"))
    assert saved == ["checkpoint-3", "checkpoint-6"]


GROUPS = """
import json, sys
from contextlib import nullcontext
import torch, torch.distributed as dist, mpiddp
from torch.distributed.tensor import Shard, distribute_tensor

how, *arguments = sys.argv[1:]
if how == "plain":
    dist.init_process_group("gloo")
with nullcontext() if how == "plain" else mpiddp.process_group(backend="gloo"):  # which a refusal ends
    rank = dist.get_rank()
    mesh = eval(f"mpiddp.mesh({', '.join(arguments)})")
groups = {}
for name in mesh.mesh_dim_names or ():
    group = mesh[name].get_group()
    members = mesh[name].mesh.tolist()
    total = torch.tensor(2**rank)
    dist.all_reduce(total, group=group)
    assert int(total) == sum(2**member for member in members)
    # DTensor relies on it that a rank's coordinate is its rank in the group.
    assert members[mesh.get_local_rank(name)] == rank
    assert dist.get_rank(group) == mesh.get_local_rank(name)
    numbers = torch.arange(2.0 * len(members) + 1)
    shards = distribute_tensor(numbers, mesh[name], [Shard(0)], src_data_rank=None)
    assert torch.equal(shards.full_tensor(), numbers)  # gathered in the order of the coordinates
    groups[name] = members
print(json.dumps(groups) + "\\n", end="", flush=True)
dist.destroy_process_group()
"""


def groups(text: str, name: str) -> list[list[int]]:
    """The groups of ranks along a dimension, which their ranks agree on."""
    ranks = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    found = sorted({tuple(each[name]) for each in ranks})
    assert sorted(rank for group in found for rank in group) == list(range(len(ranks)))
    return [list(group) for group in found]


def test_mesh_on_unequal_hosts(hosts):
    """mpiddp.mesh keeps tensor-parallel groups within hosts, even with unequal slots."""
    script = hosts.script(GROUPS)
    job = (script, "plain")
    done = hosts.fork("node0:4,node1:2", *job, "tp=2").assert_ok()
    assert groups(done.stdout, "tp") == [[0, 1], [2, 3], [4, 5]]
    assert groups(done.stdout, "dp") == [[0, 2, 4], [1, 3, 5]]
    hosts.run("launch", *hosts.where(2), *job, "tp=2").assert_refused("mpiddp.mesh: tp=2")
    by_turns = "node0:1,node1:1,node0:1,node1:1"
    hosts.fork(by_turns, script, "init", "tp=2").assert_refused("mpiddp.mesh: tp=2")
    done = hosts.fork("node0:1,node1:1", *job, "tp=2", "tp_across_hosts=True").assert_ok()
    assert groups(done.stdout, "tp") == [[0, 1]]


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, "dp=3 tp=1"), (2, "tp=10+rank"), (1, "device_type='gpu0'")]
)
def test_mesh_that_does_not_fit(here, ranks, sizes):
    """A mesh that does not fit, or that differs between ranks, is refused in one line."""
    here.fork(here.script(GROUPS), "init", *sizes.split(), ranks=ranks).assert_refused(
        "mpiddp.mesh: "
    )


def test_hybrid_example(here):
    """examples/hybrid.py combines data and tensor parallelism, and has the losses of one process."""

    def losses(ranks: int, *options: str) -> list[float]:
        done = here.fork(HYBRID, *options, ranks=ranks).assert_ok()
        return [float(each) for each in re.findall(r"step \d+: loss ([0-9.]+)", done.stdout)]

    one = losses(0)
    assert one[-1] < one[0] / 2  # it learns, so a wrong gradient shows
    assert losses(4, "--tp", "2") == pytest.approx(one, rel=1e-4)


STEPS = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.1 * dist.get_world_size())
"""


def bench(here: Here, name: str, *options: str) -> tuple[dict[str, Any], list[str]]:
    """The results of a benchmark, and the cells of its table's last row."""
    done = here.run("bench", name, "--out", "out", *options).assert_ok()
    record = json.loads((here.folder / f"out/{name}.json").read_text())
    assert record["benchmark"] == name
    return record["results"], done.stdout.splitlines()[-3].split()


def test_bench(here):
    """`mpiddp bench` measures the scaling efficiency of any script, and the bus bandwidth of all-reduces."""
    options = ("--hosts", "localhost:2", "--rounds=1", "--seconds=8")
    results, row = bench(here, "scaling", *options, here.script(STEPS))
    speeds = {run["ranks"]: run["steps"] / run["seconds"] for run in results["runs"]}
    # By its sleep, a step of two ranks takes twice as long.
    assert 0.3 < speeds[2] / speeds[1] < 0.8
    assert 3 / slowness() < speeds[1] < 11
    assert row[:2] == ["2", "1"]
    assert row[6] == f"{speeds[2] / speeds[1]:.3f}"
    options = ("-H", "localhost:3", "--max-size=1M", "--seconds=0.000001")
    results, row = bench(here, "allreduce", *options)
    point = results["points"][-1]
    assert len(point["seconds"]) == 5
    assert float(row[4]) == pytest.approx(2**20 / median(point["seconds"]) / 1e9 * 4 / 3, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise KeyError('of its own')", "KeyError: 'of its own'"),
        ("import torch", "the launcher has counted 0 steps, which is too few to measure."),
    ],
    ids=["fails", "makes no step"],
)
def test_bench_of_a_script_that_cannot_be_measured(here, text, words):
    """`mpiddp bench scaling` tells why it cannot measure a script: its error, or that it makes no steps."""
    done = here.run("bench", "scaling", "-H", "localhost:1", "--out", "out", here.script(text))
    assert words in done.assert_code(1).stderr
    assert not (here.folder / "out/scaling.json").exists()


LOGS_STEPS = """
import sys, mpiddp
with mpiddp.process_group(backend="gloo") as world:
    checkpoints = mpiddp.Checkpoints("run", every=4, config={"lr": 0.1})
    saved = checkpoints.resume()
    for step in range(saved.step + 1 if saved else 1, int(sys.argv[1]) + 1):
        if not saved or step > 5:
            mpiddp.log_metrics(step, loss=1 / step, resumed=saved is not None, name="a", best=None)
        if checkpoints.due(step):
            checkpoints.save(step, {})
"""
READS_LOGS = """
import json, struct
from pathlib import Path
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

def tensorboard():
    events = EventAccumulator("run/tensorboard")
    events.Reload()
    assert "lr" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    return {"run/tensorboard": [(each.step, each.value) for each in events.Scalars("loss")]}

def wandb():
    runs = {}
    for path in sorted(Path("wandb").glob("offline-run-*/*.wandb")):
        points = runs.setdefault(path.stem.removeprefix("run-"), [])
        content = path.read_bytes()
        assert len(content) < 1 << 15, "a record may lie in two blocks"
        at = 7  # behind the header of the file: one of LevelDB's logs
        while at < len(content):
            _, size, kind = struct.unpack_from("<IHB", content, at)
            assert kind == 1
            record = Record.FromString(content[at + 7 : at + 7 + size])
            at += 7 + size
            if values := {each.nested_key[0]: each.value_json for each in record.history.item}:
                points.append((json.loads(values["_step"]), json.loads(values["loss"])))
    return runs

def mlflow():
    client = MlflowClient(f"file:{Path.cwd()}/mlruns")
    runs = {}
    for run in client.search_runs(["0"]):
        assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.1"})
        history = client.get_metric_history(run.info.run_id, "loss")
        runs[run.info.run_name] = [(each.step, each.value) for each in history]
    return runs

print(json.dumps({each.__name__: each() for each in (tensorboard, wandb, mlflow)}))
"""
KEY = r"run-20\d{6}-\d{6}"  # the name of the folder, and when its first start began


def test_log_to(here):
    """--log-to writes the numbers of any script to TensorBoard, W&B and MLflow. A resume continues the run
    there; TensorBoard shows what the resumed run has repeated as this has logged it, or not at all."""
    env = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for package in ("tensorboard", "wandb", "mlflow_skinny"):
        env |= installs.environment(package)
    options = [f"--log-to={each}" for each in ("tensorboard", "wandb", "mlflow:file:mlruns")]
    launch = ("launch", *here.where(1), *options, here.script(LOGS_STEPS))
    here.run(*launch, "6", env=env).assert_ok()
    here.run(*launch, "8", env=env).assert_ok()  # from the checkpoint of step 4
    read = here.run("python", "-c", READS_LOGS, env=env).assert_ok()
    for name, runs in json.loads(read.lines[-1]).items():
        ((run, points),) = runs.items()
        is_tensorboard = name == "tensorboard"
        assert re.fullmatch("run/tensorboard" if is_tensorboard else KEY, run)
        steps = [1, 2, 3, 4, 6, 7, 8] if is_tensorboard else [1, 2, 3, 4, 5, 6, 6, 7, 8]
        assert sorted(points) == [[step, pytest.approx(1 / step)] for step in steps], name
    viewer = str(ROOT / ".frameworks/bin/tensorboard")
    shown = here.run(viewer, "--inspect", "--logdir", "run", env=env).assert_ok()
    assert re.search(r"scalars\n +loss\n +resumed\n", shown.stdout), shown.stdout


# The client of a library whose server goes away at the third step.
GOES_AWAY = """
import os
def note(*what):
    with open("calls", "a") as file:
        print(os.environ["RANK"], *what, file=file)
def init(**options):
    note("init", options["project"], options["resume"])
def log(values, step):
    note("log", step, values)
    if step == 3:
        raise ConnectionError("the server is gone\\nwith a second line")
def finish():
    note("finish")
"""

LOGS = """
import sys
import torch
import mpiddp
for step in range(1, int(sys.argv[1]) + 1):
    mpiddp.log_metrics(step, loss=torch.tensor(float("nan")), name="a")
print("done")
"""


def test_a_library_that_fails(here):
    """A library of --log-to that fails causes one warning, and the job goes on. Rank 0 alone writes."""
    here.script(GOES_AWAY, "trackio.py")
    variables = {"PYTHONPATH": os.pathsep.join([str(here.folder), str(ROOT)])}
    env = {**variables, "MPIDDP_LOG_TO": "'trackio:a project'"}
    done = here.fork(here.script(LOGS), "5", ranks=2, env=env).assert_ok()
    assert done.lines == ["done"] * 2
    gone = "mpiddp: warning: --log-to trackio: the server is gone. The job goes on without it."
    assert done.stderr.splitlines() == [gone]
    calls = (here.folder / "calls").read_text().splitlines()
    begins = ["0 init a project allow", "0 log 1 {'loss': nan}", "0 log 2 {'loss': nan}"]
    assert calls == [*begins, "0 log 3 {'loss': nan}"]
    here.run("launch", *here.where(2), "--log-to=trackio:b", here.script(LOGS), "2", env=variables)
    calls = (here.folder / "calls").read_text().splitlines()[4:]
    assert calls == [*(each.replace("a project", "b") for each in begins), "0 finish"]


@pytest.mark.parametrize("how", ["launch", "by hand"])
def test_a_library_that_is_not_installed(here, how):
    """If a library of --log-to is not installed, no rank starts its script; the error has pip's command."""
    (here.folder / "wandb").mkdir()  # as an earlier run of W&B leaves it
    script = here.script("import mpiddp\nwith mpiddp.process_group(): print('began')")
    if how == "launch":
        done = here.run("launch", *here.where(2), "--log-to", "wandb:project", script)
    else:
        done = here.fork(script, ranks=2, env={"MPIDDP_LOG_TO": "wandb"})
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.count("--log-to") == 1
    assert done.fixes == [f"{sys.executable} -m pip install wandb"]
