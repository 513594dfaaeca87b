"""A rank that is silent in a save is named within one time limit; one that cannot write lets no other wait.

Tests mpiddp/checkpoints/save.py, save_shards.py, ranks.py and resume.py.
python -m pytest tests/ranks/checkpoints/test_broken_saves.py
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from socket import gethostname

import pytest

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.checkpoints.save_shards import Exchange
from mpiddp.errors import NoAnswer
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.world import World
from tests.jobs.broken_save import SILENCE_S
from tests.support.channels import member, serving
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import launch, mpirun, own_lines, script

JOB = "tests.jobs.broken_save"
HOST = gethostname()
OF_SAVE = "the save of step 1: "
OTHERS = " The other ranks were stopped."


def checkpoints(folder: Path) -> dict[str, list[str]]:
    """The names of each host's checkpoints, all of which are verified."""
    found = {}
    for root in sorted(folder.iterdir()):
        steps = directory.list_steps(root / "checkpoints")
        for step in steps:
            directory.verify(step)
        found[root.name] = [step.name for step in steps]
    return found


@pytest.mark.parametrize(("form", "rank", "where"), [("sharded", "0", OF_SAVE), ("whole", "1", "")])
def test_a_job_with_a_silent_rank_is_restarted(
    tmp_path: Path, form: str, rank: str, where: str
) -> None:
    """In the sentence, the step shows that the first wait has ended the save, not a later one."""
    done = launch(
        *("-H", "localhost:2", "--max-restarts=1", "-m", JOB), str(tmp_path), form, "silent", rank
    )
    assert done.returncode == 0, done.stderr
    values = (f"mpiddp: {where}rank {rank} on {HOST} ", f" {SILENCE_S:g} s", OTHERS)
    assert re.search(error("did not answer", *values) + "\n", done.stderr), done.stderr
    both = ["step_00000001", "step_00000002"]
    assert checkpoints(tmp_path) == {"host0": both, "host1": both}


def test_without_restarts_the_exit_code_is_1(tmp_path: Path) -> None:
    done = launch("-H", "localhost:2", "-m", JOB, str(tmp_path), "sharded", "silent", "1")
    assert done.returncode == 1
    values = (f"mpiddp: {OF_SAVE}rank 1 on {HOST} ", f" {SILENCE_S:g} s", OTHERS)
    assert re.search(error("did not answer", *values) + r"\n\Z", done.stderr), done.stderr
    assert done.stderr.count("") == 1
    assert checkpoints(tmp_path) == {"host0": [], "host1": []}


def test_a_rank_that_waits_itself_is_not_named() -> None:
    """Rank 0 waits for the reports of all; rank 1 for the folder of rank 2, which is silent."""
    with serving(3) as server:
        coordinators = [
            Coordinator(World(rank, 3, rank, 3), member(server, rank, 3), hostnames=("a", "b", "c"))
            for rank in range(3)
        ]
        limits = [0.0, 0.0, PATIENCE_S]
        exchanges = [Exchange(*each) for each in zip(coordinators, limits, strict=True)]
        for exchange in exchanges:
            exchange.begin(1)
        late = f"^{error('did not answer', f'{OF_SAVE}rank 2 on c ', ' 0 s')}$"
        with pytest.raises(NoAnswer, match=late):
            exchanges[1].get("folder", 2)
        exchanges[0].set("done", None)
        with pytest.raises(NoAnswer, match=late):
            exchanges[0].get_all("done", [0, 1, 2])
        exchanges[2].set("folder", "")  # rank 1 has its answer, and still reports nothing
        exchanges[2].set("done", None)
        exchanges[2].get_all("done", [0, 2])
        late = f"^{error('did not answer', f'{OF_SAVE}rank 1 on b ', ' 0 s')}$"
        with pytest.raises(NoAnswer, match=late):
            exchanges[0].get_all("done", [0, 1, 2])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_no_rank_waits_for_one_that_cannot_open_a_copy(tmp_path: Path, rank: str) -> None:
    """It would wait for longer than this test does."""
    ran = mpirun(2, "-m", "mpiddp", "run", "-m", JOB, str(tmp_path), "sharded", "unopenable", rank)
    assert ran.returncode == 0, ran.stderr
    root = tmp_path / f"host{rank}" / "checkpoints"
    first, last = own_lines(ran.stderr)
    values = (f"warning: {HOST}: {root}: ", "step 1", "Is a directory")
    assert re.fullmatch(error("write the", *values), first), first
    assert last == "warning: 1 of 2 saves failed."
    assert checkpoints(tmp_path) == {"host0": ["step_00000002"], "host1": ["step_00000002"]}
    for host in ("host0", "host1"):
        files = (tmp_path / host / "checkpoints" / "step_00000002").glob("shard_*")
        assert sorted(file.name for file in files) == ["shard_00000.pt", "shard_00001.pt"]


@pytest.mark.parametrize(("form", "rank"), [("sharded", "1"), ("sharded", "0"), ("whole", "1")])
def test_a_folder_that_can_no_longer_be_read_causes_a_warning(
    tmp_path: Path, form: str, rank: str
) -> None:
    """As on a file server that is gone. No rank waits for its part of the save."""
    ran = mpirun(2, "-m", "mpiddp", "run", "-m", JOB, str(tmp_path), form, "gone", rank)
    assert ran.returncode == 0, ran.stderr
    root = tmp_path / f"host{rank}" / "checkpoints"
    first, last = own_lines(ran.stderr)
    values = (f"warning: {HOST}: {root}: ", "step 1", os.strerror(errno.ENAMETOOLONG))
    assert re.fullmatch(error("", *values), first), first
    assert last == "warning: 1 of 2 saves failed."
    kept = {f"host{each}": ["step_00000002"] for each in (0, 1)}
    if form == "whole":
        kept["host0"].insert(0, "step_00000001")
    assert checkpoints(tmp_path) == kept


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_script_may_destroy_its_process_group_during_its_last_save(
    tmp_path: Path, rank: str
) -> None:
    ran = mpirun(2, "-m", "mpiddp", "run", "-m", JOB, str(tmp_path), "sharded", "destroyed", rank)
    assert (ran.returncode, own_lines(ran.stderr)) == (0, []), ran.stderr
    both = ["step_00000001", "step_00000002"]
    assert checkpoints(tmp_path) == {"host0": both, "host1": both}


RECEIVES = """
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
    files = bring(run, newest(run))
    print(f"{rank} {files['state.json'].read_text()}\\n", end="")
"""


def test_no_rank_waits_for_one_that_cannot_keep_a_copy_of_the_records(tmp_path: Path) -> None:
    runs = [RunDir(tmp_path / f"host{rank}") for rank in (0, 1)]
    folder = directory.write(
        runs[0].checkpoints, 1, lambda new: (new / "state.json").write_text("{}") and None
    )
    runs[0].metrics.write_text("{}\n")
    runs[1].metrics.mkdir(parents=True)
    ran = mpirun(2, script(tmp_path, RECEIVES), str(tmp_path), str(PATIENCE_S))
    assert ran.returncode == 0, ran.stderr
    (warning,) = own_lines(ran.stderr)
    assert warning.startswith(f"warning: {HOST}: cannot keep a copy of metrics.jsonl: [Errno 21]")
    assert sorted(ran.stdout.splitlines()) == ["0 {}", "1 {}"]
    directory.verify(runs[1].checkpoints / folder.name)


def test_no_rank_waits_for_one_that_cannot_keep_the_checkpoint(tmp_path: Path) -> None:
    runs = [RunDir(tmp_path / f"host{rank}") for rank in (0, 1)]
    directory.write(
        runs[0].checkpoints, 1, lambda new: (new / "state.json").write_text("{}") and None
    )
    runs[1].path.mkdir()
    runs[1].checkpoints.symlink_to(tmp_path / "gone")
    ran = mpirun(2, script(tmp_path, RECEIVES), str(tmp_path), str(PATIENCE_S))
    assert ran.returncode == 1
    where = f"rank 1 on {HOST}: {runs[1].checkpoints}/step_00000001: "
    assert re.search(error("cannot keep", where), ran.stderr), ran.stderr


LOOKS = """
import errno, os, sys
from pathlib import Path
from mpiddp.checkpoints.ranks import Ranks, find_file_systems
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.errors import JobFailed
from mpiddp.runtime.start.join import join
def gone(path):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
with join() as coordinator:
    if coordinator.world.rank == 0:
        Path.exists = gone
    try:
        find_file_systems(RunDir(Path(sys.argv[1])), Ranks(coordinator, None, float(sys.argv[2])))
    except JobFailed as error:
        print(f"{error}\\n", end="")
"""


def test_no_rank_waits_for_one_whose_file_server_is_gone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    program = script(tmp_path, LOOKS)
    ran = mpirun(2, program, str(tmp_path / "run"), str(PATIENCE_S))
    assert ran.returncode == 0, ran.stderr
    values = (f"rank 0 on {HOST}: {tmp_path}/run ", os.strerror(errno.ESTALE))
    sentence = error("cannot be written", *values)
    assert re.fullmatch(f"({sentence}\n){{2}}", ran.stdout), ran.stdout
    assert list((tmp_path / "run").iterdir()) == []
