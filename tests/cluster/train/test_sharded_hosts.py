"""Sharded models on several hosts: hsdp, and checkpoints of which each host holds a part.

Tests mpiddp/train/copies.py, mpiddp/train/divergence.py and mpiddp/checkpoints/save_shards.py and run.py.
python -m pytest tests/cluster/train/test_sharded_hosts.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mpiddp.checkpoints import folder as directory
from mpiddp.checkpoints.state import unpacked
from mpiddp.cli import main
from tests.support import cluster
from tests.support.cluster import Cluster, Host
from tests.support.errors import error
from tests.support.ranks import ROOT
from tests.support.training import records, summary, unequal

PRIVATE = "/run/run-of-a-test"  # each host has its own
MODEL = ["--arch=resnet20", "--amp=off", "--epochs=1", "--log-every=1"]
STEPS_20 = [*MODEL, "--use-syn", "--batch-size=4", "--steps-per-epoch=20", "--lr=0.001"]
STEPS_8 = [*MODEL, "--use-syn", "--global-batch-size=24", "--steps-per-epoch=8", "--save-every=2"]
# Relative. The sums of four ranks are rounded in another order, and a larger learning rate magnifies that.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(3) as standing:
        yield standing


def train(
    hosts: Cluster,
    names: str,
    *options: str | Path,
    job: Sequence[str] = ("-m", "mpiddp", "train"),
) -> subprocess.CompletedProcess[str]:
    """`mpiddp launch -H NAMES JOB OPTIONS…` on the first host."""
    command = [sys.executable, "-m", "mpiddp", "launch", "-H", names, *job]
    return hosts[names.split(":")[0]].run(
        [*command, "--backend=gloo", *map(str, options)],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(ROOT)},
    )


def losses(run: Path) -> dict[int, float]:
    return {each["step"]: each["train_loss"] for each in records(run) if "train_loss" in each}


def shards(host: Host, step: int) -> list[str]:
    """The files of shards in a checkpoint of a host, which is verified."""
    folder = host.path(PRIVATE) / "checkpoints" / f"step_{step:08d}"
    directory.verify(folder)
    return sorted(path.name for path in folder.glob("shard_*"))


def lose(host: Host) -> None:
    shutil.rmtree(host.path(PRIVATE))


def test_hsdp_shards_within_each_of_two_hosts(hosts: Cluster) -> None:
    found = {}
    for parallel in ("ddp", "hsdp"):
        out = hosts.shared / parallel
        job = ("-m", "tests.jobs.counted_bytes", str(hosts.shared))
        options = [*STEPS_20, f"--parallel={parallel}", f"--out={out}"]
        ran = train(hosts, "node0:2,node1:2", *options, job=job)
        assert ran.returncode == 0, ran.stderr
        shares = [(hosts.shared / f"bytes_{rank}").read_text().split() for rank in range(4)]
        for own, one_copy in shares:  # hsdp: half on each of the two ranks of a host
            share = int(one_copy) / (2 if parallel == "hsdp" else 1)
            assert int(own) == pytest.approx(share, rel=0.1)
        for rank in range(4):
            (hosts.shared / f"bytes_{rank}").unlink()
        found[parallel] = losses(out)
    assert len(found["ddp"]) == 20
    assert found["hsdp"] == pytest.approx(found["ddp"], rel=TOLERANCE)


def test_copies_that_differ_end_the_training(hosts: Cluster) -> None:
    """The bit of a shard. The ranks with other shards end as well, and nothing is saved."""
    out = hosts.shared / "diverged"
    options = [*STEPS_8, "--parallel=hsdp", "--check-divergence=4", f"--out={out}"]
    job = ("-m", "tests.jobs.flipped_bit", "parameter", "3", "4")
    ran = train(hosts, "node0:2,node1:2", *options, job=job)
    assert ran.returncode == 1, ran.stderr
    count = f"1 of {2 * 59} tensors"  # parameters, each with its momentum
    values = ("step 4: ", "rank 1 on node0 and rank 3 on node1", "fc.weight", count)
    assert re.search(error("This state", *values), ran.stderr), ran.stderr
    (saved,) = (out / "checkpoints").iterdir()  # the next test resumes from one like it
    assert saved.name == "step_00000002"
    directory.verify(saved)


def test_one_copy_has_nothing_to_compare(hosts: Cluster) -> None:
    out = hosts.shared / "one-copy"
    options = [*STEPS_8, "--steps-per-epoch=2", "--check-divergence=1", f"--out={out}"]
    ran = train(hosts, "node0:2", *options, "--parallel=hsdp")
    assert ran.returncode == 0, ran.stderr
    assert (
        "warning: --check-divergence has nothing to compare: the ranks are on one host, and share one copy "
        "of the model."
    ) in ran.stderr


def tensors(run: Path, step: int) -> dict[str, Any]:
    """All tensors of a checkpoint, by the names of its files; training.pt names the run's folder."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    directory.verify(folder)
    files = [file for file in folder.glob("*.pt") if file.name != "training.pt"]
    found = {file.name: torch.load(file) for file in files}
    return {**found, "ranks.pt": [unpacked(own) for own in found["ranks.pt"]]}


def test_hsdp_resumes_bit_for_bit_and_its_checkpoint_is_read_back(hosts: Cluster) -> None:
    """With accumulation and clipping, on two hosts of two ranks that share the run's folder."""
    hsdp = [
        *STEPS_8, "--parallel=hsdp", "--grad-accum-steps=2", "--clip-grad-norm=1", "--keep=9",
        "--lr=0.001",
    ]  # fmt: skip
    whole, stopped = hosts.shared / "hsdp whole", hosts.shared / "hsdp stopped"
    ran = train(hosts, "node0:2,node1:2", *hsdp, f"--out={whole}")
    assert ran.returncode == 0, ran.stderr
    shutil.copytree(whole, stopped)  # as a crash after step 4 would have left it
    for step in (6, 8):
        shutil.rmtree(stopped / f"checkpoints/step_{step:08d}")
    (stopped / "summary.json").unlink()
    ran = train(hosts, "node0:2,node1:2", *hsdp, f"--out={stopped}")
    assert ran.returncode == 0, ran.stderr
    assert f"resuming from {stopped}/checkpoints/step_00000004: step 4\n" in ran.stdout
    assert list(losses(stopped).items()) == list(losses(whole).items())
    expected = tensors(whole, 8)
    assert unequal(tensors(stopped, 8), expected) == []
    assert unequal(tensors(whole, 6), expected) != []  # the test can fail

    # Each rank has half of a copy, and both hosts have the same: every part is saved once.
    parts = [expected[f"shard_{rank:05d}.pt"] for rank in range(4)]
    saved = sum(tensor.numel() for contents in parts for tensor in contents.values())
    assert saved == 2 * summary(whole)["num_parameters"]  # and the momentum
    read, ddp = hosts.shared / "hsdp read", hosts.shared / "hsdp ddp"
    half = whole / "checkpoints" / "step_00000004"
    assert main(["checkpoints", "export", str(half), str(read)]) == 0
    directory.verify(read)
    options = ["--parallel=ddp", f"--resume={read}", f"--out={ddp}"]
    ran = train(hosts, "node0:2,node1:2", *hsdp, *options)
    assert ran.returncode == 0, ran.stderr
    later = {step: loss for step, loss in losses(whole).items() if step > 4}
    assert losses(ddp) == pytest.approx(later, rel=1e-4)


def test_hsdp_refuses_hosts_with_different_numbers_of_ranks(hosts: Cluster) -> None:
    out = hosts.shared / "unequal"
    ran = train(hosts, "node0:2,node1:1", *STEPS_20, "--parallel=hsdp", f"--out={out}")
    assert ran.returncode == 2, ran.stderr
    values = ("--parallel hsdp ", "2 on node0 and 1 on node1", "--parallel fsdp")
    assert re.search(error("Give the", *values), ran.stderr), ran.stderr
    assert not out.exists()


def test_the_loss_of_a_host_loses_no_shard(hosts: Cluster) -> None:
    """Three hosts that share nothing; then the others alone; then all again; then one alone."""
    node0, node1, node2 = hosts.hosts
    fsdp = [*STEPS_8, "--parallel=fsdp", f"--out={PRIVATE}"]
    ran = train(hosts, "node0:1,node1:1,node2:1", *fsdp, "--stop-at-step=4")
    assert ran.returncode == 75, ran.stderr
    assert "one host holds" not in ran.stdout
    for host, kept in ((node0, "02"), (node1, "01"), (node2, "12")):
        assert shards(host, 4) == [f"shard_0000{rank}.pt" for rank in kept]

    lose(node2)
    ran = train(hosts, "node1:1,node0:1", *fsdp, "--stop-at-step=6")
    assert ran.returncode == 75, ran.stderr
    assert "step_00000004" in ran.stdout
    assert "sending 2 files of shards to the hosts that lack them" in ran.stdout
    for host in (node0, node1):
        assert shards(host, 6) == ["shard_00000.pt", "shard_00001.pt"]
        assert not list((host.path(PRIVATE) / "checkpoints").glob(".*"))

    ran = train(hosts, "node0:1,node1:1,node2:1", *fsdp)
    assert ran.returncode == 0, ran.stderr
    assert "step_00000006" in ran.stdout
    for host in hosts.hosts:
        assert len(shards(host, 8)) == 2
        assert list(losses(host.path(PRIVATE))) == [1, 2, 3, 4, 5, 6, 7, 8]

    lose(node1)
    lose(node2)  # of step 8, node0 has the shards of two of three ranks; of step 6, all
    ran = train(hosts, "node0:1", *fsdp)
    assert ran.returncode == 0, ran.stderr
    assert (
        "checkpoint step_00000008: shard_00001.pt is on none of these hosts, or is of another save; "
        "resuming from step_00000006 (2 steps lost)."
    ) in ran.stdout
    assert shards(node0, 8) == ["shard_00000.pt"]
