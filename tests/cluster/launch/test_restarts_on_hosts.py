"""A job restarts on the hosts that are usable: a lost host is left out, a spare takes its place.

Tests mpiddp/launch/job.py.
python -m pytest tests/cluster/launch/test_restarts_on_hosts.py
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT

TRAIN = ("-m", "mpiddp", "train", "--use-syn", "--arch", "resnet20", "--epochs", "1")
SILENT = ("s. Check that the", "no answer in")  # whichever notices it first
UNRESOLVED = error("be resolved", "nowhere: ", "node0")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(3) as standing:
        yield standing


def test_a_lost_host_is_left_out_and_takes_part_again(hosts: Cluster) -> None:
    """With 3 ranks, then 2, then 3, the run continues with the same global batch."""
    out = hosts.shared / "run"
    command = [*LAUNCH, "--max-restarts", "3", "--min-hosts", "2", "-H", "node0:1,node1:1,node2:1"]
    command += [*TRAIN, "--batch-size", "5", "--steps-per-epoch", "150", "--save-every", "10"]
    command += ["--log-every", "10", "--out", str(out)]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with hosts["node0"].popen(command, cwd=ROOT, env=env) as launcher:
        records = out / "metrics.jsonl"
        wait_for_step(records, 20)
        hosts["node1"].link("down")
        try:
            before = last_step(records)
            wait_for_step(records, before + 20)
        finally:
            hosts["node1"].link("up")
        rank = next(p for p in hosts["node2"].processes() if "mpiddp train" in p.command)
        hosts["node2"].run(["kill", "-KILL", str(rank.pid)], check=True)
        stdout, stderr = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 0, stderr
    sentences = (
        "mpiddp: lost node1 (rank 1): the host stopped answering.",
        "mpiddp: restarting on node0 and node2 (restart 1 of 3).",
        "mpiddp: 2 ranks instead of 3; the global batch stays at 15.",
        "mpiddp: restarting on node0, node1 and node2 (restart 2 of 3).",
    )
    # mpirun's own last line may lack a newline.
    assert all(sentence in stderr for sentence in sentences), stderr
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["global_batch_size"], summary["steps"], summary["world_size"]) == (15, 150, 3)
    assert stdout.count("resuming from") == 2


def test_a_spare_takes_the_place_of_a_lost_host(hosts: Cluster) -> None:
    """The run continues on as many ranks, and the lost host takes part again once it answers."""
    out = hosts.shared / "spared"
    command = [*LAUNCH, "--max-restarts", "3", "--spares", "1", "-H", "node0:1,node1:1,node2:1"]
    command += [*TRAIN, "--batch-size", "5", "--steps-per-epoch", "120", "--save-every", "10"]
    command += ["--log-every", "10", "--out", str(out)]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with hosts["node0"].popen(command, cwd=ROOT, env=env) as launcher:
        records = out / "metrics.jsonl"
        wait_for_step(records, 20)
        assert not hosts["node2"].processes()  # the spare
        hosts["node1"].link("down")
        try:
            wait_for_step(records, last_step(records) + 20)
        finally:
            hosts["node1"].link("up")
        stdout, stderr = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 0, stderr
    sentences = (
        "mpiddp: kept in reserve: node2\n",
        "mpiddp: lost node1 (rank 1): the host stopped answering.",
        "mpiddp: restarting on node0 and node2 (restart 1 of 3).",
    )
    assert all(sentence in stderr for sentence in sentences), stderr
    silent = [error(id, "mpiddp: leaving out a host: ssh node1: ") for id in SILENT]
    assert re.search("|".join(silent), stderr), stderr
    assert "instead of" not in stderr  # as many ranks as before
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["hosts"], summary["steps"]) == ({"node0": 1, "node2": 1}, 120)
    assert stdout.count("resuming from") == 1


def test_a_spare_takes_the_place_of_a_host_that_fails_the_first_preflight(hosts: Cluster) -> None:
    command = [*LAUNCH, "--spares", "2", "-H", "node0:1,nowhere:1,node1:1,node2:1", "--report"]
    command += ["-m", "platform"]
    done = hosts["node0"].run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert re.match(f"mpiddp: leaving out a host: {UNRESOLVED}", done.stderr), done.stderr
    assert "mpiddp: kept in reserve: node2\n" in done.stderr
    assert re.findall(r"^\d +(\w+) ", done.stdout, re.MULTILINE) == ["node0", "node1"]
    command[command.index("2")] = "0"
    done = hosts["node0"].run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (2, "")


def test_too_few_hosts_are_an_error(hosts: Cluster) -> None:
    command = [*LAUNCH, "--min-hosts", "3", "-H", "node0:1,node1:1,nowhere:1", "-m", "platform"]
    done = hosts["node0"].run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert re.match(UNRESOLVED, done.stderr), done.stderr
    command[command.index("--min-hosts") + 1] = "2"
    done = hosts["node0"].run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert re.match(f"mpiddp: leaving out a host: {UNRESOLVED}", done.stderr), done.stderr


def last_step(records: Path) -> int:
    lines = records.read_text().splitlines() if records.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def wait_for_step(records: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while last_step(records) < step:
        assert time.monotonic() < deadline, f"step {last_step(records)} instead of {step}"
        time.sleep(0.1)
