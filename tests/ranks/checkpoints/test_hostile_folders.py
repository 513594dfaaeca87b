"""A run's folder with what another program, another person or an accident has left there.

Tests mpiddp/checkpoints/contents.py, directory.py, resume.py, run.py, script.py and shards.py. Half-written
checkpoints are in test_checkpoint_directory.py, foreign ones in test_earlier_checkpoints.py, full disks in
test_faulty_disks.py, owners in test_run_owner.py.
python -m pytest tests/ranks/checkpoints/test_hostile_folders.py
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import torch

import mpiddp
from mpiddp.checkpoints import contents, directory
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.checkpoints.state import packed
from mpiddp.runtime.job.session import current
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import mpirun, script

HOST = gethostname()
NAME = '["model", "weight"]'


# A crafted checkpoint whose hashes are right


def sharded(root: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A checkpoint with one sharded tensor, whose shards.json is changed before it is hashed."""

    def write_files(new: Path) -> None:
        torch.save({"weight": None}, new / "model.pt")
        torch.save([{"rng": {}, "state": {}}], new / "ranks.pt")
        (new / "state.json").write_text(contents.facts_of(1, 1, ["model"], {}))
        torch.save({NAME: torch.arange(4.0)}, new / "shard_00000.pt")
        shard = (new / "shard_00000.pt").read_bytes()
        entry = {"bytes": len(shard), "sha256": sha256(shard).hexdigest()}
        chunk = {"offsets": [0], "sizes": [4], "rank": 0}
        tensor = {"shape": [4], "dtype": "float32", "chunks": [chunk]}
        index = {"tensors": {NAME: tensor}, "files": {"shard_00000.pt": entry}}
        change(index)
        (new / "shards.json").write_text(json.dumps(index))

    return directory.write(root, 1, write_files)


def tensor(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["tensors"][NAME].update(values)


def chunk(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda index: index["tensors"][NAME]["chunks"][0].update(values)


def grow(length: int) -> Callable[[dict[str, Any]], object]:
    """Say that the tensor, with its only chunk, has this length."""
    return lambda index: (tensor(shape=[length])(index), chunk(sizes=[length])(index))


def test_a_sharded_checkpoint_that_is_as_it_should_be(tmp_path: Path) -> None:
    assert contents.export(sharded(tmp_path, lambda _: None), tmp_path / "whole") == ["model"]
    weight = torch.load(tmp_path / "whole/model.pt")["weight"]
    assert weight.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [
        tensor(chunks=[]),
        tensor(shape=[5]),
        tensor(shape=[10**13]),
        tensor(shape=[-4]),
        tensor(shape="4"),
        tensor(dtype="load"),
        tensor(dtype="float33"),
        tensor(dtype=32),
        chunk(offsets=[1]),
        chunk(offsets=[-1]),
        chunk(sizes=[3]),
        chunk(sizes=[2, 2]),
        chunk(rank=-1),
        chunk(rank="../0"),
        grow(1 << 63),
        lambda index: index["tensors"][NAME]["chunks"].append(
            dict(index["tensors"][NAME]["chunks"][0])
        ),
        lambda index: index.update(tensors=[]),
    ],
)
def test_shards_that_do_not_fill_their_tensor_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """What no shard fills would be whatever was in the memory."""
    folder = sharded(tmp_path, change)
    with pytest.raises(mpiddp.UserError) as refused:
        contents.export(folder, tmp_path / "whole")
    sentence = error(":", f"{folder}: shards.json is not a table of shards")
    assert re.fullmatch(sentence, str(refused.value))
    assert not (tmp_path / "whole").exists()


def test_a_file_of_shards_that_nothing_lists(tmp_path: Path) -> None:
    folder = sharded(tmp_path, chunk(rank=5))
    with pytest.raises(mpiddp.UserError) as refused:
        contents.export(folder, tmp_path / "whole")
    sentence = error("which its", f"{folder} ", "shard_00005.pt", "shards.json")
    assert re.fullmatch(sentence, str(refused.value))


def test_a_file_of_shards_with_another_tensor(tmp_path: Path) -> None:
    folder = sharded(tmp_path, grow(6))
    with pytest.raises(mpiddp.UserError) as refused:
        contents.export(folder, tmp_path / "whole")
    sentence = error("this save", f"{folder}/shard_00000.pt ")
    assert re.fullmatch(sentence, str(refused.value))


def test_a_tensor_that_is_larger_than_the_memory(tmp_path: Path) -> None:
    folder = sharded(tmp_path, grow(10**15))
    with pytest.raises(mpiddp.JobFailed) as failed:
        contents.export(folder, tmp_path / "whole")
    sentence = error("no memory", "model.weight", " 4000000000000000 bytes")
    assert re.fullmatch(sentence, str(failed.value))
    assert not (tmp_path / "whole").exists()


def test_shards_of_another_model(tmp_path: Path) -> None:
    folder = sharded(tmp_path, lambda _: None)
    saved = contents.read({path.name: path for path in folder.iterdir()}).resumed_by(1)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(5))
    with pytest.raises(mpiddp.UserError) as refused:
        saved.load_into(model=model)
    sentence = error("was saved", "step 1 ", "model: model.weight ", "[4]", "[5]")
    assert re.fullmatch(sentence, str(refused.value))


@pytest.mark.parametrize("change", [{"keys": ["\ud800"]}, {"step": -5}, {"step": 10**30}])
def test_facts_of_no_save_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    def write_files(new: Path) -> None:
        torch.save({}, new / "model.pt")
        torch.save([{"rng": {}, "state": {}}], new / "ranks.pt")
        facts = json.loads(contents.facts_of(1, 1, ["model"], {}))
        (new / "state.json").write_text(json.dumps({**facts, **change}))

    folder = directory.write(tmp_path, 1, write_files)
    with pytest.raises(mpiddp.UserError) as refused:
        contents.export(folder, tmp_path / "whole")
    sentence = error("files have", f"{folder} ")
    assert re.fullmatch(sentence, str(refused.value))


def sparse() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the form is in beta state
        return torch.eye(2, dtype=torch.uint8).to_sparse_csr()


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the form is a prototype
        return torch.nested.nested_tensor([torch.zeros(size, dtype=torch.uint8) for size in (1, 2)])


def with_another_method() -> torch.Tensor:
    tensor = torch.zeros(1, dtype=torch.uint8)
    tensor.numpy = OrderedDict  # type: ignore[method-assign, assignment]
    return tensor


@pytest.mark.parametrize(
    ("own", "missing"),
    [
        (torch.arange(4, dtype=torch.uint8), "state"),
        (torch.zeros(1, dtype=torch.uint8).expand(1 << 40), "state"),
        (torch.arange(4.0), "state"),
        (sparse(), "state"),
        (nested(), "state"),
        (with_another_method(), "state"),
        (packed({"rng": {}, "state": [1]}), "state"),
        (packed({"state": {}}), "rng"),
        (packed([]), "state"),
        ({}, "state"),
    ],
)
def test_what_no_rank_has_saved_is_refused(tmp_path: Path, own: object, missing: str) -> None:
    def write_files(new: Path) -> None:
        torch.save({}, new / "model.pt")
        torch.save([own], new / "ranks.pt")
        (new / "state.json").write_text(contents.facts_of(1, 1, ["model"], {}))

    run = RunDir(tmp_path / "run")
    directory.write(run.checkpoints, 1, write_files)
    with pytest.raises(mpiddp.UserError) as refused:
        mpiddp.Checkpoints(run.path).resume()
    values = ("step 1 ", "ranks.pt ", f" {missing} ", "rank 0")
    assert re.fullmatch(error("pt has no", *values), str(refused.value))


# The folder of a run


def saved(run: Path, *steps: int) -> None:
    checkpoints = mpiddp.Checkpoints(run, keep=9)
    checkpoints.resume()
    for step in steps:
        checkpoints.save(step, {"step": step})
    checkpoints.close()
    current().run = None


def test_a_checkpoint_that_lacks_shards_hides_none_of_another_run(tmp_path: Path) -> None:
    """Both are of step 1. No host has shard_00001.pt of this run's."""
    saved(tmp_path / "other", 1)

    def lose(index: dict[str, Any]) -> None:
        index["files"]["shard_00001.pt"] = index["files"]["shard_00000.pt"]

    sharded(tmp_path / "run/checkpoints", lose)
    with mpiddp.Checkpoints(tmp_path / "run") as checkpoints:
        resumed = checkpoints.resume(tmp_path / "other")
    current().run = None
    assert resumed is not None
    assert resumed.state == {"step": 1}


@pytest.mark.parametrize("link", ["best", "checkpoints/latest"])
def test_a_run_goes_back_through_a_link(tmp_path: Path, link: str) -> None:
    run = tmp_path / "run"
    saved(run, 2, 5)
    (run / link).symlink_to(run / "checkpoints/step_00000002")
    resumed = mpiddp.Checkpoints(run).resume(run / link)
    assert resumed is not None
    assert resumed.step == 2
    assert (run / "checkpoints/step_00000005.old-1").is_dir()


def test_a_checkpoint_that_was_set_aside_has_to_be_renamed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, 2, 5)
    aside = (run / "checkpoints/step_00000005").rename(run / "checkpoints/step_00000005.old-1")
    with pytest.raises(mpiddp.UserError) as refused:
        mpiddp.Checkpoints(run).resume(aside)
    sentence = error("the name", f"{aside}: ", "step_")
    assert re.fullmatch(sentence, str(refused.value))


@pytest.mark.parametrize("name", ["step_00000001", "step_00000009"])
def test_a_renamed_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    """As step 9 it would stay the newest one, and the run would repeat the same steps at each resume."""
    saved(tmp_path / "run", 5)
    root = tmp_path / "run/checkpoints"
    (root / "step_00000005").rename(root / name)
    with pytest.raises(mpiddp.UserError) as refused:
        saved(tmp_path / "run", 6)
    sentence = error("rename it", f"{root / name} ", "step 5", "step_00000005")
    assert re.fullmatch(sentence, str(refused.value))
    assert [each.name for each in root.iterdir()] == [name]


def test_pruning_removes_a_link_and_not_what_it_names(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    saved(run, 1)
    root = run / "checkpoints"
    shutil.move(root / "step_00000001", elsewhere)
    (root / "step_00000001").symlink_to(elsewhere)
    saved(run, 2, 3)
    assert directory.prune(root, keep=1) == [root / f"step_0000000{step}" for step in (2, 1)]
    directory.verify(elsewhere)
    assert [each.name for each in root.iterdir()] == ["step_00000003"]


def test_an_owner_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    """The file can neither be created nor read."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.owner.symlink_to(tmp_path / "gone")
    with pytest.raises(mpiddp.UserError) as refused:
        saved(run.path, 1)
    sentence = error("file that", f"{run.owner} ")
    assert re.fullmatch(sentence, str(refused.value))
    assert not (tmp_path / "gone").exists()


def test_records_are_not_written_through_a_link(tmp_path: Path) -> None:
    """A run that resumes drops the records of later steps, in a file beside the old one."""
    saved(tmp_path / "run", 1)
    run = RunDir(tmp_path / "run")
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (run.path / ".metrics.jsonl.part").symlink_to(mine)
    saved(run.path)
    assert run.metrics.read_text() == '{"step": 1}\n'
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_config_that_equals_no_other_is_refused(tmp_path: Path, value: float) -> None:
    """NaN differs from itself, so no later run could resume."""
    with pytest.raises(TypeError, match="config: expected numbers, strings, lists and dicts"):
        mpiddp.Checkpoints(tmp_path / "run", config={"lr": value})


# Hosts that share nothing

BRINGS = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from mpiddp.checkpoints.ranks import FileSystems, form_ranks
from mpiddp.checkpoints.resume import bring, newest
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.runtime.start.join import join
from mpiddp.runtime.torch.process_group import default_group
cpu = torch.device("cpu")
with join() as coordinator, default_group(coordinator, "gloo", cpu, timeout_s=float(sys.argv[2])):
    rank = coordinator.world.rank
    # Two hosts that share nothing, as the search sees them.
    coordinator.world = replace(coordinator.world, local_rank=0, node_rank=rank, num_nodes=2)
    ranks = form_ranks(coordinator, float(sys.argv[2]))
    run = Run(RunDir(Path(sys.argv[1]) / f"host{rank}"), ranks, FileSystems((0, 1)), None)
    found = newest(run)
    if rank == 0 and sys.argv[3:]:
        (found.folder / sys.argv[3]).unlink()
    bring(run, found)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> list[RunDir]:
    """Two hosts. The first has a checkpoint and newer records than the second."""
    hosts = [RunDir(tmp_path / f"host{rank}") for rank in (0, 1)]
    for host in hosts:
        host.path.mkdir()

    def write_files(new: Path) -> None:
        (new / "model.pt").write_text("model")
        (new / "state.json").write_text("{}")

    directory.write(hosts[0].checkpoints, 1, write_files)
    hosts[0].metrics.write_text('{"step": 1}\n')
    return hosts


def test_a_file_that_vanishes_after_the_search_is_an_error_of_all_ranks(
    hosts: list[RunDir], tmp_path: Path
) -> None:
    ran = mpirun(2, script(tmp_path, BRINGS), str(tmp_path), str(PATIENCE_S), "model.pt")
    assert ran.returncode == 1
    vanished = (f"rank 0 on {HOST}: {hosts[0].checkpoints}/step_00000001: ", "No such file ")
    assert len(re.findall(error("cannot send", *vanished), ran.stderr)) == 1, ran.stderr
    assert "Traceback" not in ran.stderr
    damaged = ("rank 1 on ", "model.pt arrived damaged: its SHA-256 differs")
    assert re.search(error("cannot keep", *damaged), ran.stderr), ran.stderr
    assert list(hosts[1].checkpoints.iterdir()) == []


def test_the_records_of_another_host_replace_the_own_ones_as_a_whole(
    hosts: list[RunDir], tmp_path: Path
) -> None:
    """A host that is lost in the middle of the copy keeps its own."""
    hosts[1].metrics.write_text('{"step": 0}\n')
    before = tmp_path / "before"
    os.link(hosts[1].metrics, before)
    ran = mpirun(2, script(tmp_path, BRINGS), str(tmp_path), str(PATIENCE_S))
    assert ran.returncode == 0, ran.stderr
    assert hosts[1].metrics.read_text() == '{"step": 1}\n'
    assert before.read_text() == '{"step": 0}\n'
    assert hosts[0].metrics.read_text() == '{"step": 1}\n'
    directory.verify(hosts[1].checkpoints / "step_00000001")


def test_a_new_host_takes_the_own_checkpoint_and_not_a_later_one_of_another_run(
    hosts: list[RunDir], tmp_path: Path
) -> None:
    """The path of another run counts until this run has a checkpoint, on any host."""
    saved(tmp_path / "other", 2)
    job = BRINGS.replace("newest(run)", 'newest(run, Path(sys.argv[1], "other"))')
    ran = mpirun(2, script(tmp_path, job), str(tmp_path), str(PATIENCE_S))
    assert ran.returncode == 0, ran.stderr
    assert "other is not used: " in ran.stdout
    directory.verify(hosts[1].checkpoints / "step_00000001")
