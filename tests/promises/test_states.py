"""States: what a checkpoint holds of every rank, and what it is for other programs."""

import json
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import mpiddp
from mpiddp.checkpoints import folders
from mpiddp.checkpoints.records import runs
from mpiddp.cli import main
from mpiddp.errors import UserError
from tests.support.patience import slowness
from tests.support.place import eventually, program
from tests.support.ranks import LAUNCH
from tests.support.training import step_folder, steps_kept, unequal, verified

fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def run_of_this_test() -> Iterator[None]:
    yield
    runs().clear()


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
    for later in (1, 4) if ranks == 1 else (1, 2, 3, 4):
        # A stage takes its tensors out of a pipeline's state, and one that had all layers is none.
        kinds = ["values", "schedules", "scaler", "plain", "fsdp", "ema", "averaged_model"]
        kinds += ["zero", "tensor_parallel", "nested", "fsdp=plain", "plain=fsdp"]
        kinds += ["pipeline"] if later == 1 or (later != 3 and ranks > 1) else []
        done = here.fork(program("states.py"), "resume", here.folder, *kinds, ranks=later)
        assert done.assert_ok().stdout.count("resume ") >= len(kinds)


@pytest.mark.parametrize(
    ("ranks", "kinds"), [(2, ()), pytest.param(1, ("rest",), marks=pytest.mark.slow)]
)
def test_a_resume_is_exact(here, ranks, kinds):
    """A resume continues with the same bits: for each optimizer of torch, its kernels, and kinds of
    parameters; for fp32 or integer states of bf16 weights; for factored states; sharded or not.
    """
    job = (program("sweep.py"), "save", "run", *kinds)
    trained = here.fork(*job, ranks=ranks).assert_ok().lines[-1]
    assert int(trained.split()[0]) > 100
    for later in (1, 2):
        done = here.fork(program("sweep.py"), "resume", "run", *kinds, ranks=later).assert_ok()
        assert trained in done.lines, done.stdout


DIFFERS = """
import sys
from pathlib import Path
import pytest, torch, mpiddp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

def prints_the_refusal(step, name, state):
    with pytest.raises(ValueError, match=" differs: ") as refused:
        checkpoints.save(step, state)
    if rank == 1:
        print(f"{name}: {refused.value}", flush=True)

with mpiddp.process_group(backend="gloo") as world:
    rank = world.rank
    alone = DeviceMesh("cpu", [rank])
    shard = distribute_tensor(torch.full((4,), float(rank)), alone, [Shard(0)])
    states = {
        "one element": {"weight": torch.arange(100.0).index_fill(0, torch.tensor(3), 3.0 + 0.5 * rank)},
        "beside a large one": {"weight": torch.tensor([20.0, *[0.01 * (rank + 1)] * 9])},
        "another order": {"bias": torch.arange(64.0).roll(rank)},
        "a permutation": {"seen": torch.arange(100_000).roll(rank)},
        "a mask": {"mask": torch.tensor([rank, 1 - rank, 1 - rank, rank] * 20_000, dtype=torch.bool)},
        "a counter": {"seen": torch.tensor(1_000_000 + rank)},
        "value": {"position": 10 * rank},
        "shape": {"model": {"weight": torch.ones(2 + rank)}},
        "dtype": {"model": {"weight": torch.ones(2).to([torch.float32, torch.float16][rank])}},
        "values": {"model": {name: torch.full((2,), 3.0 + rank) for name in ("ones", "twos")}},
        "stages": {"model": {"weight": shard}},
        "sharded on one": {"model": torch.ones(4) if rank else shard},
        "length": {"optimizer": {"params": list(range(rank + 1))}},
        "kind": {"optimizer": [1] if rank else {"a": 1}},
    }
    with mpiddp.Checkpoints("run", every=None) as checkpoints:
        checkpoints.resume()
        for step, (name, state) in enumerate(states.items(), 1):
            prints_the_refusal(step, name, state)
            assert not list(Path("run").rglob("*.pt")), name
        # DDP keeps statistics of BatchNorm on each rank.
        model = DistributedDataParallel(torch.nn.BatchNorm1d(2))
        model(torch.full((4, 2), float(rank))).sum().backward()
        models = {"model": model.state_dict(), "bare": model.module.state_dict()}
        rounded = {"rounded": torch.arange(64.0) * (1 + 1.2e-7 * rank)}
        keys = {"a": None, "of 1": [rank, torch.ones(1)]} if rank else {"a": 5, "of 0": torch.ones(3)}
        checkpoints.save(20, {**models, **keys, **rounded})
        later = torch.zeros(4).index_fill(0, torch.tensor(2), float(rank))
        prints_the_refusal(21, "later", {"later": later})
"""


def test_ranks_that_differ_are_refused(here):
    """What differs between ranks under one key is refused by key and rank, before a byte is written: numbers
    and integers exactly, other tensors if any element differs by more than rounding. Of BatchNorm under DDP,
    the running statistics of rank 0 are saved.
    """
    done = here.fork(here.script(DIFFERS), ranks=2).assert_ok()
    rounding = r"1 tensor of the ranks differ by rounding, .*state\['rounded'\]: element 48 is 48.0 on rank 0"
    assert re.search(rounding, done.stderr), done.stderr
    found = dict(line.split(": ", 1) for line in done.lines if " differs: " in line)
    for name, words in {
        "value": r"state\['position'\] differs: 0 on rank 0 on \S+, and 10 on rank 1 on ",
        "shape": r"state\['model'\]\['weight'\] differs: torch.float32 \[2\] on rank 0.* \[3\] on rank 1",
        "dtype": r"torch.float32 \[2\] on rank 0.*torch.float16 \[2\] on rank 1",
        "values": r"state\['model'\]\['ones'\] differs: element 0 is 3.0 on rank 0.*, and 4.0 on rank 1",
        "one element": r"state\['weight'\] differs: element 3 is 3.0 on rank 0.*, and 3.5 on rank 1",
        "beside a large one": r"element 1 is 0.0099.* rank 0.*, and 0.0199.* rank 1.*difference of 0.01",
        "another order": r"state\['bias'\] differs: element 0 is 0.0 on rank 0.*, and 63.0 on rank 1",
        "a permutation": r"state\['seen'\] differs: element 0 is 0 on rank 0.*, and 99999 on rank 1",
        "a mask": r"state\['mask'\] differs: element 0 is False on rank 0.*, and True on rank 1",
        "a counter": r"state\['seen'\] differs: .* of 1000000 on rank 0.* of 1000001 on rank 1",
        "later": r"state\['later'\] differs: element 2",
        "stages": r"state\['model'\]\['weight'\] at \[0\] differs: element 0 is 0.0",
        "sharded on one": r" differs: .* as .*Shard.* on rank 0.*, and torch.float32 \[4\] on rank 1",
        "length": r"state\['optimizer'\]\['params'\] differs: a list of 1 on rank 0.* of 2 on rank 1",
        "kind": r"state\['optimizer'\] differs: a dict on rank 0.* a list of 1 on rank 1",
    }.items():
        assert re.search(words, found[name]), found[name]
    whole = mpiddp.load(here.folder / "run")
    for other in (nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, track_running_stats=False)):
        # A tensor that only rank 0 has, beside it, is no reason to leave out any of the model's.
        with pytest.raises(mpiddp.UserError, match="bare: it also has "):
            whole.load_into(bare=other)
    saved = whole.state
    assert saved["model"]["module.running_mean"].tolist() == [0, 0]
    assert saved["bare"]["running_mean"].tolist() == [0, 0]
    assert (saved["a"], saved["of 1"][0]) == (5, 1)
    assert (saved["of 0"].tolist(), saved["of 1"][1].tolist()) == ([1, 1, 1], [1])


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
    # What only rank 0 had under another key makes no check of the model less strict.
    partial = replace(saved, about=replace(saved.about, partial=[["counts"]]))
    with pytest.raises(mpiddp.UserError, match=r"it also has 1\.weight, 1\.bias"):
        partial.load_into(model=nn.Sequential(nn.Linear(2, 3)))
    assert unequal(dict(other.state_dict()), before) == []


class Grows(nn.Module):
    """A module whose buffer, and whose own state, have the length that they need."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen
        self.register_buffer("scale", torch.ones(len(seen)))

    def get_extra_state(self) -> Any:
        return torch.tensor(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = state.tolist()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.scale = torch.empty_like(state[f"{prefix}scale"])
        super()._load_from_state_dict(state, prefix, *rest)


def test_torch_decides_what_a_module_loads(tmp_path):
    """A module with a load of its own gets what was saved, in whichever shape. With strict=False, a module
    takes what it has in the same shape.
    """
    model = nn.Sequential(nn.Linear(2, 3), Grows([1, 2, 3]))
    saved = mpiddp.load(saved_run(tmp_path / "run", {"model": model}))
    again = nn.Sequential(nn.Linear(2, 3), Grows([]))
    saved.load_into(model=again)
    assert (again[1].seen, again[1].scale.tolist()) == ([1, 2, 3], [1, 1, 1])

    other = nn.ModuleDict({"0": nn.Linear(2, 3), "1": nn.Linear(3, 5), "head": nn.Linear(3, 1)})
    with pytest.raises(mpiddp.UserError, match=r"it has no 1\.weight"):
        saved.load_into(model=other)
    saved.load_into(model=other, strict=False)
    assert torch.equal(other["0"].weight, model[0].weight)
    with pytest.raises(mpiddp.UserError, match="it has none of its tensors"):
        saved.load_into(model=nn.ModuleDict({"head": nn.Linear(3, 1)}), strict=False)


@dataclass
class Progress:
    epoch: int
    best: np.floating


class Counts:
    """An object whose state is no plain dict."""

    def state_dict(self) -> dict[str, Any]:
        return defaultdict(int, a=1)


def test_in_goes_what_comes_out(tmp_path):
    """save() takes the objects that load_into() takes, and plain values of numpy and Python."""
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    counts = defaultdict(int, {"a": 1})
    values = {"shape": model.weight.shape, "last": deque([1, 2]), "seen": {2, 1}, "counts": counts}
    with mpiddp.Checkpoints(tmp_path / "run", every=None) as checkpoints:
        progress = Progress(3, np.float32(0.5))
        state = {"values": values, "progress": progress, "counted": Counts()}
        checkpoints.save(np.int64(5), state, model=model, optimizers={"one": optimizer})
        with pytest.raises(ValueError, match="state has 'model' already"):
            checkpoints.save(6, {"model": 1}, model=model)
    saved = mpiddp.load(tmp_path / "run")
    plain = {"shape": (3, 2), "last": [1, 2], "seen": [1, 2], "counts": {"a": 1}}
    assert saved.state["values"] == plain
    assert saved.state["progress"] == {"epoch": 3, "best": 0.5}
    assert saved.state["counted"] == {"a": 1}
    again = nn.Linear(2, 3)
    other = torch.optim.SGD(again.parameters(), lr=1.0, momentum=0.9)
    saved.load_into(model=again, optimizers={"one": other})
    assert torch.equal(again.weight, model.weight)
    assert other.param_groups[0]["lr"] == 0.25


def test_a_run_may_begin_with_another_one(tmp_path):
    """A run that starts from another run's checkpoint draws by its own seed, and has its own config, steps.
    Once it has a checkpoint of its own, it resumes from that, with its random numbers.
    """
    other, drawn = tmp_path / "other", list[float]()
    torch.manual_seed(1)
    with mpiddp.Checkpoints(other, every=None, config={"lr": 1}) as checkpoints:
        checkpoints.save(5000, {"weight": torch.ones(1)})
    for seed in (11, 12, 11):
        torch.manual_seed(seed)
        run = tmp_path / f"tuned{seed}"
        with mpiddp.Checkpoints(run, every=None, config={"lr": 2}) as checkpoints:
            saved = checkpoints.resume() or mpiddp.load(other)
            drawn.append(torch.rand(1).item())
            checkpoints.save(1 if saved.step == 5000 else 2, saved.state)
    assert steps_kept(run) == [1, 2]
    expected = []
    for seed in (11, 12):
        torch.manual_seed(seed)
        expected += [torch.rand(1).item(), torch.rand(1).item()]
    assert drawn == [expected[0], expected[2], expected[1]]


def test_sharded_state_needs_its_place(sharded):
    """A sharded tensor that an object gives no place is refused by its name."""
    saved = mpiddp.load(sharded)
    with pytest.raises(mpiddp.UserError, match=r"model: 0.weight is sharded, and Average"):
        saved.load_into(model=Average())


# Nothing good is thrown away


def test_nan_is_never_saved(tmp_path, capsys):
    """A state with a NaN, or an infinity beside numbers, is a failed save, whatever its tensors are named.
    The newest checkpoint stays, one line says why at once, and the run fails if it was the last save.
    """
    run, nan = tmp_path / "run", torch.tensor([1.0, float("nan")])
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -float("inf")).triu(1))
    good = {
        "model": model,
        "best": torch.tensor(float("inf")),
        "adapter": {"lora_A": torch.ones(2)},
    }
    with mpiddp.Checkpoints(run, every=None, keep=1) as checkpoints:
        checkpoints.save(1, good)
        for step, bad in enumerate(
            ({"model": {**model.state_dict(), "bias": nan}}, {"adapter": {"lora_A": nan}}), 2
        ):
            checkpoints.save(step, {**good, **bad})
            checkpoints._wait_for_own_save()
            assert steps_kept(run) == [1]
            words = rf"step {step} cannot be saved: state\['\w+'\]\['\w+'\] has nan\. step_00000001 is kept"
            assert re.search(words, capsys.readouterr().err)
        checkpoints.save(4, good, per_rank={"accuracy": nan})
    assert steps_kept(run) == [4]
    checkpoints = mpiddp.Checkpoints(run, every=None, keep=1)
    assert checkpoints.resume().step == 4
    checkpoints.save(5, {"scale": {"a": nan / 0}})
    with pytest.raises(
        mpiddp.JobFailed, match=r"step 5 cannot be saved: state\['scale'\]\['a'\] has"
    ):
        checkpoints.close()
    with mpiddp.Checkpoints(run, every=None, saves_nan=True) as checkpoints:
        assert checkpoints.resume().step == 4
        checkpoints.save(5, {"model": {"bias": nan}})
    assert mpiddp.load(run).step == 5


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
    assert (
        "model: a save would lose stage2.weight of the checkpoint that the run resumes from, "
        in done.stderr
    )
    assert (done.code, steps_kept(run), len(mpiddp.load(run).state["model"])) == (2, [2], 3)


def test_training_that_diverges_keeps_its_checkpoint(here):
    """A training whose loss becomes NaN or infinite says so once, with the step, and fails. It keeps its
    newest checkpoint, from which it resumes.
    """
    train = ("--backend=gloo", "--arch=resnet20", "--use-syn", "--batch-size=2", "--epochs=1")
    train += ("--steps-per-epoch=8", "--save-every=1", "--log-every=1", "--out=run", "--amp=off")
    here.train(*train, "--stop-at-step=2", ranks=2)
    done = here.train(*train, "--lr=1e30", ranks=2).assert_code(1)
    assert len(re.findall(r"the loss is (nan|inf) at step \d\b", done.stderr)) == 1, done.stderr
    last = steps_kept(here.folder / "run")[-1]
    assert re.search(rf"step 8 cannot be saved: .* has nan\. step_{last:08d} is kept", done.stderr)
    again = here.train(*train, f"--stop-at-step={last + 1}", ranks=2)
    assert f"resuming from run/checkpoints/step_{last:08d}" in again.stdout


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
    losses = {2: 0.9, 6: 0.1, 8: 0.2, 11: 0.5}
    options: dict[str, Any] = {"every": None, "keep": 2, "best": ("val_loss", "min")}
    steps = (1, 2, 3, 6, 8, 11, 12)
    with mpiddp.Checkpoints(run, keep_every=5, **options) as checkpoints:
        checkpoints.resume()
        for step in steps:
            if step in losses:
                mpiddp.log_metrics(step, val_loss=losses[step])
            checkpoints.save(step, {"weight": [1.0]})
            if step == 3:
                checkpoints._wait_for_own_save()
                assert main(["checkpoints", "pin", str(run), "3"]) == 0
    for path in (run, run / "checkpoints"):  # as the run does, which has nothing to remove
        assert main(["checkpoints", "prune", str(path)]) == 0
    capsys.readouterr()
    assert main(["checkpoints", "list", str(run)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[0]: line[6:] for line in lines if line[6:]} == {
        "step_00000003": ["pinned"],
        "step_00000006": ["best"],
    }
    assert mpiddp.load(run, best=True).step == 6
    assert [step for step in steps if step_folder(run, step).exists()] == [3, 6, 11, 12]
    assert len(removed) > 2
    assert not any(removed)
    with mpiddp.Checkpoints(run, **options) as checkpoints:
        checkpoints.resume()
        assert mpiddp.load(run, best=True).step == 6  # a start forgets no score
        for step in (13, 14, 15):
            checkpoints.save(step, {"step": step})
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [f"step_{step:08d}" for step in (3, 6, 14, 15)]
    assert main(["checkpoints", "list", str(run)]) == 0
    assert "intact  pinned" in capsys.readouterr().out
    assert main(["checkpoints", "pin", str(run), "4"]) == 2
    copy = shutil.copytree(step_folder(run, 6), tmp_path / "published")
    assert main(["checkpoints", "list", str(copy)]) == 0
    with pytest.raises(UserError, match="no checkpoint has a score"):
        mpiddp.load(copy, best=True)
    for wrong in ('{"step": null, "config": {}}', '{"step": [6], "config": {}}', "["):
        (copy / "about.json").write_text(wrong)
        capsys.readouterr()
        assert main(["checkpoints", "list", str(copy)]) == 0
        assert capsys.readouterr().out.split()[-1] == "broken"


def test_prune_asks_what_to_keep(tmp_path, capsys):
    """`mpiddp checkpoints prune` removes nothing from a folder whose run does not say what to keep, as in a
    copy of its checkpoints, until it gets `--keep`.
    """
    run = saved_run(tmp_path / "run", *({"step": step} for step in range(1, 5)))
    copy = shutil.copytree(run / "checkpoints", tmp_path / "copy")
    (run / "wishes.json").write_text('{"keep": 1, "by": "another program"}')
    capsys.readouterr()
    for path in (run, copy):
        assert main(["checkpoints", "prune", str(path)]) == 2
        fix = f"  fix: mpiddp checkpoints prune {path} --keep N\n"
        assert capsys.readouterr().err.endswith(f"which says how many checkpoints to keep.\n{fix}")
    assert steps_kept(run) == [1, 2, 3, 4]
    for path in (run, copy):
        assert main(["checkpoints", "prune", str(path), "--keep", "3"]) == 0
    assert steps_kept(run) == [2, 3, 4]
    assert len(list(copy.iterdir())) == 3


def test_going_back_as_often_as_asked(tmp_path, capsys):
    """`mpiddp checkpoints rewind` takes the next resume to a step, each time that a person asks. What comes
    later is set aside and listed, and removed once enough newer ones are set aside.
    """
    run = tmp_path / "run"
    saved_run(run, *({"attempt": 0} for _ in range(4)))

    def names() -> list[str]:
        return sorted(path.name[11:] for path in (run / "checkpoints").iterdir())

    for attempt in (1, 2):
        assert main(["checkpoints", "rewind", str(run), "2"]) == 0
        for start in (2, 4):
            with mpiddp.Checkpoints(run, every=None, keep=3) as checkpoints:
                assert checkpoints.resume().step == start, "the mark counts once"
                for step in range(start + 1, 5):
                    checkpoints.save(step, {"attempt": attempt})
    assert mpiddp.load(run).state == {"attempt": 2}
    assert names() == ["02", "03", "03.old2", "04", "04.old", "04.old2"]
    assert main(["checkpoints", "list", str(run)]) == 0
    assert capsys.readouterr().out.count("set aside") == 3
    assert main(["checkpoints", "rewind", str(run), "9"]) == 2
    assert main(["checkpoints", "prune", str(run), "--keep", "1"]) == 0
    assert names() == ["04", "04.old2"]


def test_the_score_of_a_step(tmp_path):
    """The best checkpoint is the one whose step has the best score, logged before or after its save, in each
    open run; and a resume knows the scores.
    """
    folders, runs = [tmp_path / "last", tmp_path / "best"], list[mpiddp.Checkpoints]()
    for folder, best in zip(folders, (None, ("loss", "min")), strict=True):
        runs.append(mpiddp.Checkpoints(folder, every=None, keep=1, best=best))
        runs[-1].resume()
    for step, loss in enumerate([3.0, 1.0, 2.0, None, 0.5], 1):
        for checkpoints in runs:
            checkpoints.save(step, {"step": step})
        if loss is not None:
            mpiddp.log_metrics(step, loss=loss if step < 5 else 5.0)
    for checkpoints in runs:
        checkpoints.close()
    assert [steps_kept(folder) for folder in folders] == [[5], [2, 5]]
    assert len({(folder / "metrics.jsonl").read_text() for folder in folders}) == 1
    with mpiddp.Checkpoints(folders[1], every=None, keep=1, best=("loss", "min")) as checkpoints:
        checkpoints.resume()
        checkpoints.save(6, {})
    assert steps_kept(folders[1]) == [2, 6]


def test_another_metric(tmp_path, capsys):
    """A change of `best`, and a change back, each count only the scores of their own metric, also those of
    a run of an older version, whose wishes.json has no name beside its scores.
    """
    run = tmp_path / "run"

    def train(metric: str, direction: Any, values: dict[int, float], **options: Any) -> None:
        best = (metric, direction)
        with mpiddp.Checkpoints(run, every=None, best=best, **options) as checkpoints:
            checkpoints.resume()
            for step, value in values.items():
                checkpoints.save(step, {"step": step})
                mpiddp.log_metrics(step, **{metric: value})

    train("loss", "min", {1: 2.3, 2: 2.5}, keep=9)
    wishes = json.loads((run / "wishes.json").read_text())
    wishes["scores"] = {"1": 2.3, "2": 2.5}
    (run / "wishes.json").write_text(json.dumps(wishes))
    assert mpiddp.load(run, best=True).step == 1
    train("accuracy", "max", {3: 0.7}, keep=9)
    (run / "metrics.jsonl").write_text("")  # as on another host
    train("accuracy", "max", {4: 0.9, 5: 0.8, 6: 0.6}, keep=3)
    assert mpiddp.load(run, best=True).step == 4
    assert main(["checkpoints", "list", str(run)]) == 0
    assert "00004 " in next(line for line in capsys.readouterr().out.splitlines() if "best" in line)
    train("loss", "min", {7: 2.4, 8: 2.6}, keep=9)
    train("accuracy", "max", {9: 0.5}, keep=1)
    assert steps_kept(run) == [4, 9]
    train("loss", "max", {10: 2.0}, keep=9)
    train("loss", "min", {11: 2.2, 12: 2.2}, keep=1)
    assert steps_kept(run) == [10, 12]


LOGS = """
import mpiddp
with mpiddp.process_group(backend="gloo") as world:
    with mpiddp.Checkpoints("run", every=None) as checkpoints:
        checkpoints.resume()
        for step in (1, 2, 3):
            if world.rank == 1:  # as the rank of a pipeline's last stage, which knows the loss
                mpiddp.log_metrics(step, loss=1.0)
            checkpoints.save(step, {"step": step})
"""


def test_records_of_a_rank_that_writes_none(here):
    """If only a rank that does not write calls log_metrics, one line says that nothing is recorded."""
    done = here.fork(here.script(LOGS), ranks=2).assert_ok()
    assert done.stderr.count("calls mpiddp.log_metrics, and rank 0 does not") == 1, done.stderr


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
    job = hosts.script(VERIFIES)
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
    done = here.fork(here.script(RESUMES), "run").assert_ok()
    assert int(done.lines[-1]) < 20_000  # kB, of 200 MB


def test_many_small_tensors(tmp_path):
    """25,000 small tensors cost the thread that saves them a second of CPU."""
    tensors = {f"layer.{index}": torch.full((3,), float(index)) for index in range(25_000)}
    run = tmp_path / "run"
    with mpiddp.Checkpoints(run, every=None) as checkpoints:
        checkpoints.save(1, {"model": tensors})
        before = time.process_time() - time.thread_time()
        checkpoints._wait_for_own_save()
        assert time.process_time() - time.thread_time() - before < slowness()
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
        if step == 2:
            print("has saved step 1", flush=True)
"""


def test_load_beside_a_live_run(here, capsys):
    """Another process loads or verifies the checkpoints of a live run, 1,600 of 1,600 times."""
    run, steps = here.folder / "run", set()
    job = here.start("python", here.script(SAVES), "run").until("has saved")
    for _ in range(1000):
        saved = mpiddp.load(run)
        assert saved.state["weight"].tolist() == [saved.step] * 100
        steps.add(saved.step)
    for verb in ("verify", "list") * 300:
        assert main(["checkpoints", verb, str(run)]) == 0
    assert "broken" not in capsys.readouterr().out
    assert len(steps) > 10
    eventually(lambda: mpiddp.load(run).step > saved.step + 5)
    assert step_folder(run, saved.step).exists()
    assert job.process.poll() is None, job.stderr


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
def test_formats_of_other_programs(tmp_path, sharded, to):
    """A checkpoint is exported for torch.load, DCP and safetensors, with whole tensors."""
    out = tmp_path / "out"
    assert main(["checkpoints", "export", "--to", to, str(sharded), str(out)]) == 0
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = torch.optim.Adam(model.parameters())
    mpiddp.load(sharded).load_into(model=model, optimizer=optimizer)
    whole = dict(model.state_dict())
    if to == "torch":
        assert unequal(dict(torch.load(out / "model.pt")), whole) == []
        return
    if to == "dcp":
        empty = {name: torch.empty_like(value) for name, value in whole.items()}
        dcp.load({"model": empty}, checkpoint_id=out, no_dist=True)
        assert unequal(empty, whole) == []
        return
    found = mpiddp.load(out)
    assert unequal(dict(found.state["model"]), whole) == []
    state = optimizer.state_dict()["state"]
    assert unequal(found.state["optimizer"]["state"], state) == []
    content = (out / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert (header["0.weight"]["dtype"], header["0.weight"]["shape"]) == ("F32", [7, 6])


class Touch:
    """Its unpickling creates a file."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch run-code",)


def test_foreign_files_run_no_code(tmp_path, monkeypatch):
    """No checkpoint can run code, whichever program has written it, and a damaged one is refused."""
    monkeypatch.chdir(tmp_path)
    own = step_folder(saved_run(tmp_path / "run", {"a": 1}), 1)
    torch.save([Touch()], own / "tree.pt")
    for name in ("manifest.json", "COMPLETE"):
        (own / name).unlink()
    new = folders.NewFolder(own)
    own.rename(new.path)
    new.seal({})  # what a stranger can write as well
    new.publish()
    with pytest.raises(mpiddp.UserError, match=r"tree\.pt|step_00000001"):
        mpiddp.load(own)
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


def test_read_only_folder_is_refused(here):
    """A read-only folder is refused with exit code 2, and the job is not started again."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    mount = 'mount -t tmpfs -o ro none run && exec "$@"'
    (here.folder / "run").mkdir()
    job = here.script("import mpiddp; mpiddp.Checkpoints('run').resume()")
    launch = (*LAUNCH, *here.where(1), "--max-restarts", "2", job)
    done = here.run("unshare", "-m", "sh", "-c", mount, "sh", *launch)
    refused = done.assert_refused(r"Read-only file system\.\n  fix: name another folder")
    assert "restart" not in refused.stderr


def test_a_resume_holds_its_checkpoint(tmp_path, monkeypatch):
    """Nothing removes the checkpoint of a resume before the run's first save, which hashes it no more."""
    run, hashed = saved_run(tmp_path / "run", {"a": 1}, {"a": torch.ones(2)}), list[Path]()
    plain = folders._sha256
    monkeypatch.setattr(folders, "_sha256", lambda path: hashed.append(path) or plain(path))
    with mpiddp.Checkpoints(run, every=None, keep=2) as checkpoints:
        saved = checkpoints.resume()
        assert {path.parent for path in hashed} == {step_folder(run, 2)}
        hashed.clear()
        shutil.copytree(
            step_folder(run, 1), step_folder(run, 3)
        )  # newer, so the run would not keep it
        assert main(["checkpoints", "prune", str(run), "--keep", "1"]) == 0
        assert step_folder(run, 2).exists()
        shutil.rmtree(step_folder(run, 3))
        hashed.clear()
        checkpoints.save(3, saved.state)
        checkpoints._wait_for_own_save()
        assert not [path for path in hashed if step_folder(run, 2) in path.parents]
    assert steps_kept(run) == [2, 3]


def test_a_lock_lives_as_long_as_its_tensors(tmp_path):
    """A run removes no file that a reader or its own script has mapped, also if nothing but a tensor is kept.
    A worker of a DataLoader, which inherits the open files, keeps none of them.
    """
    model = nn.Linear(30, 30)
    state = {"model": model.state_dict(), "a": torch.ones(1000), "b": torch.ones(1)}
    run, ended = saved_run(tmp_path / "run", state), fork.Event()
    with mpiddp.Checkpoints(run, every=None, keep=1) as checkpoints:
        saved = checkpoints.resume()
        saved.load_into(model=model)
        tensors = [saved.state.pop("a"), saved.state.pop("b"), mpiddp.load(run).state["a"]]
        worker = fork.Process(target=ended.wait, daemon=True)
        worker.start()
        for step in (2, 3, 4):
            checkpoints.save(step, {})
            checkpoints._wait_for_own_save()
            assert step_folder(run, 1).exists()
            assert all(tensors.pop())
        checkpoints.save(5, {})
    ended.set()
    assert steps_kept(run) == [5]


def test_an_error_leaves_the_folder_when_the_save_has_ended(tmp_path, monkeypatch):
    """A run keeps its folder until its thread has written, because the next run removes what is half done."""
    run, left, plain = tmp_path / "run", threading.Event(), folders.NewFolder.publish
    locked = list[bool]()

    def publish(new: folders.NewFolder) -> None:
        left.wait(1)  # the script goes on to its end in the meantime, if it does not wait
        locked.append((run / "owner.json").exists())
        plain(new)

    monkeypatch.setattr(folders.NewFolder, "publish", publish)
    with suppress(ZeroDivisionError), mpiddp.Checkpoints(run, every=None) as checkpoints:
        checkpoints.save(1, {"a": 1})
        raise ZeroDivisionError
    left.set()
    assert (locked, steps_kept(run)) == ([True], [1])


def test_a_step_that_is_saved_again_is_never_absent(tmp_path, monkeypatch):
    """If the process is killed while a checkpoint replaces one of its step, the older one is still there."""
    run, rename = saved_run(tmp_path / "run", {"a": 1}), Path.rename
    new = folders.NewFolder(step_folder(run, 1))
    shutil.copytree(step_folder(run, 1), new.path)

    def killed(path: Path, target: Path) -> Path:
        if path == new.path:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        new.publish()
    folders.remove_leftovers(run / "checkpoints")
    verified(step_folder(run, 1).with_suffix(".old"))


def test_reading_imports_no_writing(here):
    """To read a checkpoint, in a notebook for example, a process imports neither the lock of a run, nor the
    coordinator of its ranks, nor object storage.
    """
    saved_run(here.folder / "run", {"a": torch.ones(1)})
    reads = here.script("import sys, mpiddp; mpiddp.load('run'); print(sorted(sys.modules))")
    modules = here.run("python", reads).assert_ok().stdout
    for name in ("run_folder", "save", "bucket", "coordinator", "agreement"):
        assert f".{name}'" not in modules, name
    assert ".contents'" in modules


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
    done = here.run("python", here.script(LIMITED), "run").assert_ok()
    assert re.search("JobFailed .*out of memory", done.stdout), done.stdout
