"""A rank that is silent in a save is named within one time limit; one that cannot write lets no other wait.

Tests mpiddp/checkpoints/shards/exchange.py, write.py and hosts.py, and mpiddp/checkpoints/saver.py.
python -m pytest tests/test_broken_saves.py
"""

from __future__ import annotations

from pathlib import Path
from socket import gethostname

import pytest
import torch.distributed as dist

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.shards.exchange import Exchange
from mpiddp.errors import NoAnswer
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.world import World
from tests.jobs.broken_save import SILENCE_S
from tests.ranks import launch, mpirun, own_lines

JOB = "tests.jobs.broken_save"
HOST = gethostname()
NO_ANSWER = f"rank 1 on {HOST} did not answer in {SILENCE_S:g} s."
OF_SAVE = "the save of step 1: "


def checkpoints(folder: Path) -> dict[str, list[str]]:
    """The names of each host's checkpoints, all of which are valid."""
    found = {}
    for root in sorted(folder.iterdir()):
        steps = directory.list_steps(root)
        for step in steps:
            directory.verify(step)
        found[root.name] = [step.name for step in steps]
    return found


@pytest.mark.parametrize(
    ("form", "rank", "sentence"),
    [
        pytest.param("sharded", "1", f"{OF_SAVE}{NO_ANSWER}", marks=pytest.mark.quick),
        ("sharded", "0", f"{OF_SAVE}{NO_ANSWER.replace('rank 1', 'rank 0')}"),
        ("whole", "1", NO_ANSWER),
        (
            "whole",
            "0",
            f"rank 1 on {HOST}: no answer from rank 0 on {HOST} in {SILENCE_S + 5:g} s.",
        ),
    ],
)
def test_a_job_with_a_silent_rank_is_restarted(
    tmp_path: Path, form: str, rank: str, sentence: str
) -> None:
    """In the sentence, the step shows that the first wait has ended the save, not a later one."""
    done = launch(
        *("-H", "localhost:2", "--max-restarts=1", "-m", JOB), str(tmp_path), form, "silent", rank
    )
    assert done.returncode == 0, done.stderr
    assert f"mpiddp: {sentence} The other ranks were stopped.\n" in done.stderr
    both = ["step_00000001", "step_00000002"]
    assert checkpoints(tmp_path) == {"host0": both, "host1": both}


def test_without_restarts_the_exit_code_is_1(tmp_path: Path) -> None:
    done = launch("-H", "localhost:2", "-m", JOB, str(tmp_path), "sharded", "silent", "1")
    assert done.returncode == 1
    assert done.stderr.endswith(f"mpiddp: {OF_SAVE}{NO_ANSWER} The other ranks were stopped.\n")
    assert done.stderr.count(NO_ANSWER) == 1
    assert checkpoints(tmp_path) == {"host0": [], "host1": []}


def test_a_rank_that_waits_itself_is_not_named() -> None:
    """Rank 0 waits for the reports of all; rank 1 for the folder of rank 2, which is silent."""
    store = dist.HashStore()
    exchanges = []
    for rank in range(3):
        coordinator = Coordinator(World(rank, 3, rank, 3), store)
        coordinator.hostnames = ("a", "b", "c")
        exchanges.append(Exchange(coordinator.values, coordinator, "save", timeout_s=0.0))
    with pytest.raises(NoAnswer, match=r"^rank 2 on c did not answer in 0 s\.$"):
        exchanges[1].get("folder", 2)
    exchanges[0].set("done", None)
    with pytest.raises(NoAnswer, match=r"^rank 2 on c did not answer in 0 s\.$"):
        exchanges[0].get_all("done", [0, 1, 2])
    exchanges[2].set("folder", "")  # rank 1 has its answer, and still reports nothing
    exchanges[2].set("done", None)
    with pytest.raises(NoAnswer, match=r"^rank 1 on b did not answer in 0 s\.$"):
        exchanges[0].get_all("done", [0, 1, 2])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_no_rank_waits_for_one_that_cannot_open_a_copy(tmp_path: Path, rank: str) -> None:
    """It would wait for longer than this test does."""
    ran = mpirun(2, "-m", "mpiddp", "run", "-m", JOB, str(tmp_path), "sharded", "unopenable", rank)
    assert ran.returncode == 0, ran.stderr
    root = tmp_path / f"host{rank}"
    assert own_lines(ran.stderr) == [
        f"warning: {HOST}: {root}: cannot write the checkpoint of step 1: Is a directory.",
        "warning: 1 of 2 saves failed.",
    ]
    assert checkpoints(tmp_path) == {"host0": ["step_00000002"], "host1": ["step_00000002"]}
    for host in ("host0", "host1"):
        files = (tmp_path / host / "step_00000002").glob("shard_*")
        assert sorted(file.name for file in files) == ["shard_00000.pt", "shard_00001.pt"]
