"""States: what a checkpoint holds of every rank, and what it is for other programs."""

import json
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import mpiddp
from mpiddp.checkpoints import folder as directory
from mpiddp.cli import main
from mpiddp.runtime.job.session import current
from tests.support.place import program
from tests.support.ranks import LAUNCH, ROOT, script
from tests.support.training import step_folder, steps_kept, unequal

OLD = ROOT / "tests/data/checkpoints"  # whole and sharded, as this format's predecessor wrote them


@pytest.fixture(autouse=True)
def run_of_this_test() -> Iterator[None]:
    yield
    current().run = None


def saved_run(folder: Path, *states: dict[str, Any], **options: Any) -> Path:
    """The folder of a run that saved these states after steps 1, 2, …"""
    with mpiddp.Checkpoints(folder, **{"every": None, "keep": 9, **options}) as checkpoints:
        checkpoints.resume()
        for step, state in enumerate(states, 1):
            checkpoints.save(step, state)
    return folder


# Complete, or refused


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_kind_of_state(here, ranks):
    """Any state of any ranks resumes on 1 to 4: types, FSDP, TP, pipeline × FSDP, EMA, schedules. A sharded
    model resumes as a whole one, and the other way round.
    """
    here.fork(program("states.py"), "save", here.folder, ranks=ranks).assert_ok()
    for later in (1, 2, 3, 4):
        # A stage takes its tensors out of a pipeline's state, and one that had all layers is none.
        kinds = ["values", "schedules", "scaler", "lbfgs", "plain", "fsdp", "ema", "averaged_model"]
        kinds += ["zero", "tensor_parallel", "nested", "fsdp=plain", "plain=fsdp"]
        kinds += ["pipeline"] if later == 1 or (later != 3 and ranks > 1) else []
        done = here.fork(program("states.py"), "resume", here.folder, *kinds, ranks=later)
        assert done.assert_ok().stdout.count("resume ") >= len(kinds)


def test_ranks_that_differ_are_refused(here):
    """What differs between ranks under one key is refused by key and rank, before a byte is written. Of
    BatchNorm under DDP, the running statistics of rank 0 are saved.
    """
    done = here.fork(program("differs.py"), "run", ranks=2).assert_ok()
    found = dict(line.split(": ", 1) for line in done.lines if " differs: " in line)
    for name, words in {
        "value": r"state\['position'\] differs: 0 on rank 0 on \S+, and 10 on rank 1 on ",
        "shape": r"state\['model'\]\['weight'\] differs: torch.float32 \[2\] on rank 0.* \[3\] on rank 1",
        "dtype": r"torch.float32 \[2\] on rank 0.*torch.float16 \[2\] on rank 1",
        "values": r"state\['model'\]\['ones'\] differs: values \(3.0, 3.0\)… on rank 0.*\(4.0",
        "stages": r"state\['model'\]\['weight'\] differs: values",
        "sharded on one": r" differs: .* as .*Shard.* on rank 0.*, and torch.float32 \[4\] on rank 1",
        "length": r"state\['optimizer'\]\['params'\] differs: a list of 1 on rank 0.* of 2 on rank 1",
        "kind": r"state\['optimizer'\] differs: a dict on rank 0.* a list of 1 on rank 1",
    }.items():
        assert re.search(words, found[name]), found[name]


class Average:
    """An object with a state of its own, which it may not have yet."""

    def __init__(self) -> None:
        self.shadow: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state


def test_a_load_is_right_or_refused(tmp_path):
    """load_into matches prefixes of DDP and torch.compile, or names what does not fit and loads nothing."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = mpiddp.load(saved_run(tmp_path / "run", state))

    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
        wrapped: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        for name in reversed(prefix.rstrip(".").split(".")):
            wrapped = nn.ModuleDict({name: wrapped})
        saved.load_into(model=wrapped)
        assert unequal(list(wrapped.state_dict().values()), list(model.state_dict().values())) == []

    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with torch.device("meta"):
        on_meta = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    longer = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    sgd = torch.optim.SGD(other.parameters())
    for objects, words in (
        ({"model": other}, r"1\.weight was saved with shape \[1, 3\]; it now has \[2, 3\]"),
        ({"model": longer}, "it has no 2.weight"),
        ({"model": model[0]}, "it has no weight"),
        ({"model": on_meta}, "0.weight is on meta.*to_empty"),
        ({"optimizer": sgd}, "another optimizer, with .*betas.*without .*momentum.*SGD"),
        ({"model": model, "optimizer": sgd}, "another optimizer"),
        ({"average": Average()}, "no 'average'"),
    ):
        with pytest.raises(mpiddp.UserError, match=words):
            saved.load_into(**objects)
    assert unequal(dict(other.state_dict()), before) == []


def test_sharded_state_needs_its_place(tmp_path):
    """A sharded tensor that an object gives no place is refused by its name."""
    saved = mpiddp.load(OLD / "sharded")
    with pytest.raises(mpiddp.UserError, match=r"model: 0.weight is sharded, and Average"):
        saved.load_into(model=Average())


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_checkpoints_of_earlier_versions(tmp_path, form):
    """Checkpoints that earlier versions wrote load, verified, whole or in shards."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    with mpiddp.Checkpoints(tmp_path / "run", config={"width": 5}) as checkpoints:
        saved = checkpoints.resume(OLD / form)
        saved.load_into(model=model, optimizer=optimizer, schedule=schedule)
        assert (saved.per_rank, saved.world_size) == ({"position": 0}, 2)
        assert saved.state["values"]["pair"] == (1, [2])
        total = sum(value.double().abs().sum().item() for value in model.state_dict().values())
        # As the script printed that saved it.
        assert total == pytest.approx(16.88269181456417, abs=1e-9)
        checkpoints.save(2, {"model": model.state_dict()})


# Nothing good is thrown away


def test_nan_never_replaces_a_finite_checkpoint(tmp_path, capsys):
    """After a NaN in the loss or in a tensor, the newest finite checkpoint stays, and a resume uses it."""
    good, bad = torch.ones(4), torch.tensor([1.0, float("nan")])
    mask = torch.full((2,), -float("inf"))  # on purpose, from the first save on
    run = tmp_path / "run"
    with mpiddp.Checkpoints(run, every=None, keep=2) as checkpoints:
        checkpoints.resume()
        for step in range(1, 9):
            mpiddp.log_metrics(step, train_loss=float("inf") if 4 < step < 7 else 0.5)
            checkpoints.save(step, {"weight": good if step < 7 else bad, "mask": mask})
    assert steps_kept(run) == [4, 7, 8]
    with mpiddp.Checkpoints(run, every=None, keep=2) as checkpoints:
        saved = checkpoints.resume()
        assert saved.step == 4
        checkpoints.save(5, {"weight": good, "mask": mask})
        checkpoints.save(6, {"weight": torch.full((2,), float("inf")), "mask": mask})
    assert steps_kept(run) == [5, 6]
    assert mpiddp.load(run).step == 5
    reasons = [json.loads((step_folder(run, step) / "state.json").read_text()) for step in (5, 6)]
    assert [each["not_finite"] for each in reasons] == ["", "state['weight'] has inf"]
    said = capsys.readouterr()
    first = r"step_00000005 is not finite: train_loss of step 5 is inf\. .*step_00000004 is kept"
    assert re.search(first, said.err)
    assert "step_00000008: state['weight'] has nan; resuming from step_00000004" in said.out


STAGES = """
import sys, torch, mpiddp
with mpiddp.process_group(backend="gloo") as world:
    model = torch.nn.ModuleDict({f"stage{world.rank}": torch.nn.Linear(1, 1, bias=False)})
    checkpoints = mpiddp.Checkpoints(sys.argv[1], every=1, keep=1)
    if saved := checkpoints.resume():
        saved.load_into(model=model)
    checkpoints.save(saved.step + 1 if saved else 1, {"model": model.state_dict()})
    checkpoints.close()
"""


def test_a_stage_that_no_rank_loads_is_not_lost(here):
    """A pipeline that resumes on fewer ranks, which leave a stage to nobody, is refused at its first save."""
    run, job = here.folder / "run", here.script(STAGES)
    for ranks in (3, 3, 2):
        done = here.fork(job, run, ranks=ranks)
    assert "model: the checkpoint that the run resumes from also has stage2.weight, " in done.stderr
    assert (done.code, steps_kept(run), len(mpiddp.load(run).state["model"])) == (2, [2], 3)


DIVERGES = """
import os, signal, sys, torch, mpiddp
with mpiddp.process_group(backend="gloo") as world:
    checkpoints = mpiddp.Checkpoints(sys.argv[1], every=None, keep=9)
    saved = checkpoints.resume()
    stages = [0] if sys.argv[2] == "whole" else range(world.rank, 2, world.world_size)
    weight = torch.full((2,), float("inf") if saved else 1.0)
    state = {f"weight{stage}": weight for stage in stages}
    state |= {f"mask{stage}": torch.full((2,), -float("inf")) for stage in stages}
    checkpoints.save(saved.step + 1 if saved else 1, state)
    if saved is None and world.rank == 0:
        checkpoints._wait_for_own_save()
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.close()
"""


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_infinities_on_purpose_are_known_after_a_restart(here, form):
    """Infinities of a run's first save, as of masks, are on purpose; new ones are found after a restart."""
    run, job = here.folder / "run", here.script(DIVERGES)

    def not_finite(step: int) -> str:
        reason = json.loads((step_folder(run, step) / "state.json").read_text())["not_finite"]
        assert isinstance(reason, str)
        return reason

    here.run("launch", *here.where(2), "--max-restarts", "1", job, "run", form).assert_ok()
    assert [not_finite(step) for step in (1, 2)] == ["", "state['weight0'] has inf"]
    here.fork(job, run, form, ranks=1).assert_ok()  # which has the tensors of both ranks
    assert not_finite(2) == "state['weight0'] has inf"
    assert mpiddp.load(run).step == 1

    # A checkpoint of an earlier version does not name them: as before, the next save does.
    first, name = step_folder(run, 1), "state.json"
    facts = json.loads((first / name).read_text())
    (first / name).write_text(json.dumps({key: facts[key] for key in ("step", "config")}))
    for each in ("manifest.json", "COMPLETE"):
        (first / each).unlink()
    directory.seal(first, {})
    here.fork(job, run, form, ranks=1).assert_ok()
    assert not_finite(2) == ""


def test_training_that_diverges_keeps_its_checkpoint(here):
    """A training whose loss becomes NaN or infinite says so once, with the step, and keeps its newest finite
    checkpoint, where its next start resumes.
    """
    train = ("--backend=gloo", "--arch=resnet20", "--use-syn", "--batch-size=2", "--epochs=1")
    train += ("--steps-per-epoch=8", "--save-every=1", "--log-every=1", "--out=run", "--amp=off")
    here.train(*train, "--stop-at-step=2", ranks=2)
    done = here.train(*train, "--lr=1e30", ranks=2).assert_ok()
    assert len(re.findall(r"the loss is (nan|inf) at step \d\b", done.stderr)) == 1, done.stderr
    assert "is not finite" in done.stderr
    first = steps_kept(here.folder / "run")[0]
    assert f"step_{first:08d} is kept, and a resume starts from it" in done.stderr
    again = here.train(*train, "--stop-at-step=4", ranks=2)
    assert f"resuming from run/checkpoints/step_{first:08d}" in again.stdout


def test_retention(tmp_path, capsys):
    """The newest, every Nth, the best by a metric, and pinned checkpoints stay; all others are removed. None
    of their files is open then: NFS would keep it, and its folder.
    """
    run, removed = tmp_path / "run", list[list[str]]()

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event == "shutil.rmtree" and run in Path(args[0]).parents:
            targets = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
            removed.append([each for each in targets if each.startswith(str(args[0]))])

    sys.addaudithook(look)
    losses = {2: 0.9, 6: 0.1, 8: 0.01, 11: 0.5}
    options: dict[str, Any] = {"every": None, "keep": 2, "best": ("val_loss", "min")}
    steps = (1, 2, 3, 6, 8, 11, 12)
    with mpiddp.Checkpoints(run, keep_every=5, **options) as checkpoints:
        checkpoints.resume()
        for step in steps:
            if step in losses:
                mpiddp.log_metrics(step, val_loss=losses[step])
            checkpoints.save(step, {"weight": torch.tensor(float("nan") if step == 8 else 1.0)})
            if step == 3:
                checkpoints._wait_for_own_save()
                assert main(["checkpoints", "pin", str(run), "3"]) == 0
    assert [step for step in steps if step_folder(run, step).exists()] == [3, 6, 11, 12]
    assert len(removed) > 2
    assert not any(removed)
    with mpiddp.Checkpoints(run, **options) as checkpoints:
        checkpoints.resume()
        for step in (13, 14, 15):
            checkpoints.save(step, {"step": step})
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [f"step_{step:08d}" for step in (3, 6, 14, 15)]
    assert main(["checkpoints", "list", str(run)]) == 0
    assert "intact  pinned" in capsys.readouterr().out
    assert main(["checkpoints", "pin", str(run), "4"]) == 2


# Scale


VERIFIES = """
import sys, mpiddp
from pathlib import Path
def read():
    return int(Path("/proc/self/io").read_text().split()[1])
with mpiddp.process_group(backend="gloo") as world:
    checkpoints = mpiddp.Checkpoints(sys.argv[1], every=None)
    before = read()
    checkpoints.resume()
    print("read", read() - before, flush=True)
"""


def test_ranks_verify_a_checkpoint_once(hosts):
    """The files of a checkpoint on a shared disk are verified once: the ranks of all hosts divide them."""
    tensors = {f"part{index}": torch.zeros(1_000_000) for index in range(4)}
    saved_run(hosts.folder / "run", tensors)
    job = script(hosts.folder, VERIFIES)
    done = hosts.fork("node0:1,node1:1", job, hosts.folder / "run").assert_ok()
    found = [int(number) for number in re.findall(r"read (\d+)", done.stdout)]
    assert len(found) == 2
    assert max(found) < 10_000_000 < 16_000_000 < sum(found) < 20_000_000


RESUMES = """
import sys, torch, mpiddp
def private():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))
before = private()
saved = mpiddp.Checkpoints(sys.argv[1], every=None).resume()
assert saved.state["weight"].sum() == 0
print(private() - before)
"""


def test_tensors_are_mapped(here):
    """A resume reads no tensor into memory of its own."""
    saved_run(here.folder / "run", {"weight": torch.zeros(50_000_000)})
    done = here.fork(script(here.folder, RESUMES), "run").assert_ok()
    assert int(done.lines[-1]) < 20_000  # kB, of 200 MB


def test_many_small_tensors(tmp_path):
    """100,000 small tensors cost the thread that saves them a second of CPU, and a tenth of the time."""
    tensors = {f"layer.{index}": torch.full((3,), float(index)) for index in range(100_000)}
    run = tmp_path / "run"
    with mpiddp.Checkpoints(run, every=None) as checkpoints:
        checkpoints.save(1, {"model": tensors})
        saver = checkpoints._saver
        before, start = time.process_time() - time.thread_time(), time.monotonic()
        while not saver.pending.done():
            sum(range(1000))
        cpu_s = time.process_time() - time.thread_time() - before
        assert cpu_s < min(1, 0.1 * (time.monotonic() - start))
    assert unequal(mpiddp.load(run).state["model"], tensors) == []


def test_tied_tensors_are_written_once(tmp_path):
    """Tied weights take the space of one, and expanded tensors that of what they repeat."""
    weight = torch.randn(1000, 1000)
    state = {"model": {"a": weight, "b": weight, "wide": torch.ones(1000, 1).expand(1000, 5000)}}
    run = saved_run(tmp_path / "run", state)
    assert 4_000_000 < (step_folder(run, 1) / "model.safetensors").stat().st_size < 4_100_000
    found = mpiddp.load(run).state["model"]
    assert unequal(found, state["model"]) == []


# For other programs


SAVES = """
import itertools, sys, torch, mpiddp
with mpiddp.Checkpoints(sys.argv[1], keep=1, every=None) as checkpoints:
    checkpoints.resume()
    for step in itertools.count(1):
        checkpoints.save(step, {"weight": torch.full((100,), float(step))})
"""


def test_load_beside_a_live_run(here, capsys):
    """Another process loads or verifies the checkpoints of a live run, 5,000 of 5,000 times."""
    run = here.folder / "run"
    job = here.start("python", script(here.folder, SAVES), "run")
    try:
        while not list(run.glob("checkpoints/step_*")):
            assert job.process.poll() is None, job.stderr
            time.sleep(0.05)
        steps = set()
        for _ in range(3000):
            saved = mpiddp.load(run)
            assert saved.state["weight"].tolist() == [saved.step] * 100
            steps.add(saved.step)
        for verb in ("verify", "list") * 1000:
            assert main(["checkpoints", verb, str(run)]) == 0
        assert "broken" not in capsys.readouterr().out
        assert job.process.poll() is None, job.stderr
        assert len(steps) > 10
        held = step_folder(run, saved.step)
        newest = saved.step + 5
        while max(int(path.name[5:]) for path in run.glob("checkpoints/step_*")) < newest:
            time.sleep(0.05)
        assert held.exists()
    finally:
        job.process.kill()
        job.wait()


def test_load_passes_over_damage(tmp_path):
    """mpiddp.load reads the newest checkpoint that is verified, and names the damage if there is none."""
    run = saved_run(tmp_path / "run", {"a": 1}, {"a": 2}, {"a": 3})
    (step_folder(run, 3) / "COMPLETE").unlink()
    with (step_folder(run, 2) / "tree.pt").open("ab") as file:
        file.write(b"x")
    assert mpiddp.load(run).state == {"a": 1}
    with pytest.raises(mpiddp.UserError, match=r"step_00000002: tree\.pt has .* bytes instead of"):
        mpiddp.load(step_folder(run, 2))
    with pytest.raises(mpiddp.UserError, match="not found"):
        mpiddp.load(tmp_path / "nothing")


@pytest.mark.parametrize("to", ["torch", "dcp", "safetensors"])
@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_formats_of_other_programs(tmp_path, to, form, capsys):
    """A checkpoint is exported for torch.load, DCP and safetensors; mpiddp.load reads the last two back."""
    out = tmp_path / "out"
    assert main(["checkpoints", "export", "--to", to, str(OLD / form), str(out)]) == 0
    capsys.readouterr()
    whole = mpiddp.load(OLD / "whole")
    if to == "torch":
        assert unequal(torch.load(out / "model.pt"), whole.state["model"]) == []
        return
    found = mpiddp.load(out)
    assert found.state.keys() == whole.state.keys()
    assert unequal(found.state["model"], dict(whole.state["model"])) == []
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    found.load_into(model=model, optimizer=optimizer)
    assert unequal(optimizer.state_dict()["state"], whole.state["optimizer"]["state"]) == []
    if to == "dcp":
        empty = {name: torch.empty_like(each) for name, each in model.state_dict().items()}
        dcp.load({"model": empty}, checkpoint_id=out, no_dist=True)
        assert unequal(empty, dict(model.state_dict())) == []
    else:
        content = (out / "model.safetensors").read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header["0.weight"]["dtype"] == "F32"
        assert header["0.weight"]["shape"] == [5, 3]


class Touch:
    """Its unpickling creates a file."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch run-code",)


def test_foreign_files_run_no_code(tmp_path, monkeypatch):
    """No checkpoint can run code, of whichever program, and a damaged one is refused."""
    monkeypatch.chdir(tmp_path)
    own = step_folder(saved_run(tmp_path / "run", {"a": 1}), 1)
    torch.save([Touch()], own / "tree.pt")
    for name in ("manifest.json", "COMPLETE"):
        (own / name).unlink()
    directory.seal(own, {})  # what a stranger can write as well
    with pytest.raises(mpiddp.UserError, match=r"tree\.pt|step_00000001"):
        mpiddp.load(own)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(mpiddp.UserError, match=r"posix\.system"):
        mpiddp.load(tmp_path / "dcp")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "a.safetensors"
    for content in (b"", b"x" * 20, len(header).to_bytes(8, "little") + header + b"1234"):
        file.write_bytes(content)
        with pytest.raises(mpiddp.UserError, match="damaged"):
            mpiddp.load(file)
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert mpiddp.load(file).state["a"]["a"].tolist() == [0, 0]
    assert not (tmp_path / "run-code").exists()


def test_optimizer_state_by_names(tmp_path):
    """The state of torch's get_optimizer_state_dict loads into an optimizer with another order."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    first = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    first.step()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, first)}
    run = saved_run(tmp_path / "run", state)
    again = nn.Sequential(nn.Linear(2, 3), checkpoint_wrapper(nn.Linear(3, 1)))
    second = torch.optim.Adam(reversed(list(again.parameters())))
    saved = mpiddp.load(run)
    words = "by parameter names: load its model in the same call"
    with pytest.raises(mpiddp.UserError, match=words):
        saved.load_into(optimizer=second)
    saved.load_into(model=again, optimizer=second)
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(first.state[old]["exp_avg"], second.state[new]["exp_avg"])
    assert second.param_groups[0]["lr"] == 0.5


# The right sentence, at the start


LIMITED = """
import resource, sys, torch, mpiddp
import mpiddp.checkpoints.checkpoints
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000,) * 2)
try:
    mpiddp.load(sys.argv[1])
except Exception as error:
    print(type(error).__name__, error)
"""


def test_out_of_memory_is_named(here):
    """A resume that finds too little memory says so, and does not call the checkpoint foreign."""
    saved_run(here.folder / "run", {"weight": torch.zeros(100_000_000)})
    done = here.run("python", script(here.folder, LIMITED), "run").assert_ok()
    assert re.search("JobFailed .*out of memory", done.stdout), done.stdout


NO_RENAME = """
import errno, os, sys, mpiddp
from pathlib import Path
def rename(path, target):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))
Path.rename = rename
mpiddp.Checkpoints(sys.argv[1]).resume()
"""


def test_folder_that_cannot_be_renamed(here):
    """A file system that cannot rename folders is refused at the start."""
    done = here.run("launch", *here.where(1), script(here.folder, NO_RENAME), "run")
    assert done.code == 2, done.stderr
    assert "cannot rename folders (Function not implemented)" in done.stderr
    assert not (here.folder / "run").exists()


def test_folder_opened_twice_through_a_link(tmp_path):
    """One process cannot open a run's folder a second time, under another name of it either."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with mpiddp.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.resume()
        with pytest.raises(mpiddp.UserError, match="in use by this process"):
            mpiddp.Checkpoints(tmp_path / "link").resume()


def test_read_only_folder_is_refused(here):
    """A read-only folder is refused with exit code 2, and the job is not started again."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    mount = 'mount -t tmpfs -o ro none run && exec "$@"'
    (here.folder / "run").mkdir()
    job = script(here.folder, "import mpiddp; mpiddp.Checkpoints('run').resume()")
    launch = (*LAUNCH, *here.where(1), "--max-restarts", "2", job)
    done = here.run("unshare", "-m", "sh", "-c", mount, "sh", *launch)
    assert done.code == 2, done.stderr
    assert "Read-only file system. Name another folder." in done.stderr
    assert "restart" not in done.stderr
