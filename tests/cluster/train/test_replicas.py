"""Hosts that share no file system each keep the checkpoints, so the loss of one host loses nothing.

Tests mpiddp/checkpoints/replicas.py.
python -m pytest tests/cluster/train/test_replicas.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from tests.support import cluster
from tests.support.cluster import Cluster, Host
from tests.support.ranks import ROOT
from tests.support.training import contents, unequal

PRIVATE = "/run/run-of-a-test"  # each host has its own
OPTIONS = [
    "--use-syn", "--backend=gloo", "--arch=resnet20", "--batch-size=8", "--epochs=1",
    "--steps-per-epoch=8", "--amp=off", "--save-every=2", "--log-every=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(3) as standing:
        yield standing


@pytest.fixture(autouse=True)
def _no_run(hosts: Cluster) -> None:
    for host in hosts.hosts:
        shutil.rmtree(host.path(PRIVATE), ignore_errors=True)


def train(hosts: Cluster, names: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`mpiddp launch` from the first of the named hosts, a rank on each."""
    command = [sys.executable, "-m", "mpiddp", "launch", "-H", names, "-m", "mpiddp", "train"]
    return hosts[names.split(":")[0]].run(
        [*command, *OPTIONS, *options],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(ROOT)},
    )


def kept(host: Host) -> list[str]:
    """The checkpoints of a host; each of them is verified."""
    folders = directory.list_steps(host.path(PRIVATE) / "checkpoints")
    for folder in folders:
        directory.verify(folder)
    return [folder.name for folder in folders]


def proof(host: Host, step: int) -> str:
    folder = host.path(PRIVATE) / "checkpoints" / f"step_{step:08d}"
    return (folder / directory.COMPLETE).read_text()


def steps_recorded(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "train_loss" in record]


def test_the_loss_of_the_host_of_rank_0_loses_nothing(hosts: Cluster) -> None:
    node0, node1, node2 = hosts.hosts
    ran = train(hosts, "node0:1,node1:1", f"--out={PRIVATE}", "--stop-at-step=5")
    assert ran.returncode == 75, ran.stderr
    for host in (node0, node1):
        assert kept(host) == ["step_00000004", "step_00000005"]
        assert (host.path(PRIVATE) / "config.json").exists()
        assert not list(host.path(PRIVATE).glob(".*")), "the marks are removed"
    assert proof(node0, 5) == proof(node1, 5)
    original = contents(node0.path(PRIVATE), 5)

    # node0 is lost: the job resumes elsewhere, and its first host has no checkpoint yet.
    ran = train(hosts, "node2:1,node1:1", f"--out={PRIVATE}", "--stop-at-step=6")
    assert ran.returncode == 75, ran.stderr
    assert f"resuming from {PRIVATE}/checkpoints/step_00000005 on node1: step 5" in ran.stdout
    assert kept(node2) == ["step_00000005", "step_00000006"]
    assert unequal(contents(node2.path(PRIVATE), 5), original) == []
    assert proof(node1, 6) == proof(node2, 6)

    # node0 returns with its old checkpoints, and one of them is broken.
    newest = node0.path(PRIVATE) / "checkpoints" / "step_00000005" / "model.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    ran = train(hosts, "node0:1,node1:1", f"--out={PRIVATE}")
    assert ran.returncode == 0, ran.stderr
    assert "checkpoints/step_00000006 on node1: step 6" in ran.stdout
    assert kept(node0) == kept(node1)
    assert kept(node0)[-1] == "step_00000008"
    for host in (node0, node1):
        assert steps_recorded(host.path(PRIVATE))[-2:] == [7, 8]


def test_a_broken_newest_checkpoint_on_one_host_is_replaced_by_a_copy(hosts: Cluster) -> None:
    node0, node1, _ = hosts.hosts
    assert train(hosts, "node0:1,node1:1", f"--out={PRIVATE}", "--stop-at-step=4").returncode == 75
    model = node0.path(PRIVATE) / "checkpoints" / "step_00000004" / "model.pt"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 4
    model.write_bytes(content)
    ran = train(hosts, "node0:1,node1:1", f"--out={PRIVATE}", "--stop-at-step=6")
    assert ran.returncode == 75, ran.stderr
    assert (
        "checkpoint step_00000004: model.pt does not match its SHA-256 (node0); "
        "another host has a verified copy." in ran.stdout
    )
    assert "step_00000004 on node1: step 4" in ran.stdout
    assert kept(node0) == kept(node1) == ["step_00000004", "step_00000006"]
    assert proof(node0, 4) == proof(node1, 4)


def test_a_shared_folder_is_written_once(hosts: Cluster) -> None:
    out = hosts.shared / "run"
    ran = train(hosts, "node1:1,node2:1", f"--out={out}", "--stop-at-step=4")
    assert ran.returncode == 75, ran.stderr
    state = json.loads((out / "checkpoints" / "step_00000004" / "state.json").read_text())
    assert state["step"] == 4
    assert sorted(p.name for p in Path(out).iterdir()) == [
        "checkpoints", "config.json", "logs", "metrics.jsonl", "starts",
    ]  # fmt: skip
    assert steps_recorded(out) == [1, 2, 3, 4]
