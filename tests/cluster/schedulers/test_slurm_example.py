"""examples/slurm/train.sbatch, as it stands, under a real Slurm: it saves, requeues itself and resumes. And
the shorter one of docs/clusters.md.

python -m pytest tests/cluster/schedulers/test_slurm_example.py
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, slurm
from tests.support.cluster.slurm import Slurm
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
TRAIN = ("--use-syn", "--backend=gloo", "--arch=resnet20", "--batch-size=4", "--epochs=1")
STEPS = 300
OWN = """
import sys, time, mpiddp
print("training", flush=True)
for step in range(1_000_000):
    time.sleep(0.01)
    if mpiddp.should_stop():
        sys.exit(75)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


@pytest.fixture(scope="module")
def batch(hosts: Cluster) -> Iterator[Slurm]:
    """Its credentials expire soon, because a job that is requeued waits for that."""
    with slurm.up_or_skip(hosts, credentials_s=20) as standing:
        yield standing


def submit(batch: Slurm) -> tuple[str, Path, Path]:
    """Submit the example and wait until it trains. Its number, its folder and its output."""
    login, folder = batch.cluster["node0"], batch.cluster.shared
    command = [
        "sbatch",
        "--parsable",
        SCRIPT,
        *TRAIN,
        f"--steps-per-epoch={STEPS}",
        "--log-every=5",
    ]
    env = {"OMP_NUM_THREADS": "1", "VENV": sys.prefix, "PYTHONPATH": str(ROOT)}
    job = login.run(command, cwd=folder, env=env, check=True).stdout.strip()
    run, output = folder / f"runs/train-{job}", folder / f"train-{job}.out"
    deadline = time.monotonic() + PATIENCE_S
    records = run / "metrics.jsonl"
    while not (records.exists() and "train_loss" in records.read_text()):
        assert time.monotonic() < deadline, output.read_text() if output.exists() else "no output"
        time.sleep(0.1)
    return job, run, output


def restarts(batch: Slurm, job: str) -> int:
    shown = batch.cluster["node0"].run(["scontrol", "show", "job", job], check=True).stdout
    found = re.search(r"Restarts=(\d+)", shown)
    assert found, shown
    return int(found[1])


def test_the_example_saves_before_the_time_limit_and_resumes_by_itself(batch: Slurm) -> None:
    """The signal is that of `#SBATCH --signal=B:TERM@…`, sent now."""
    job, run, output = submit(batch)
    batch.cluster["node0"].run(["scancel", "--batch", "--signal=TERM", job], check=True)
    code = batch.wait(job, output)
    printed = output.read_text()
    assert code == 0, printed
    assert restarts(batch, job) == 1
    assert "mpiddp: stopped on request." in printed
    assert printed.count("resuming from") == 1
    assert "2 on 2 hosts (node0 1, node1 1)" in printed
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["world_size"]) == (STEPS, 2)


def test_a_cancelled_example_saves_and_stays_cancelled(batch: Slurm) -> None:
    """scancel sends SIGTERM to every process of the job, so the launcher leaves with exit code 75."""
    job, run, output = submit(batch)
    batch.cluster["node0"].run(["scancel", job], check=True)
    batch.wait(job, output)
    shown = batch.cluster["node0"].run(["scontrol", "show", "job", job], check=True).stdout
    assert "JobState=CANCELLED" in shown, output.read_text()
    assert "Restarts=0" in shown
    assert len(list((run / "checkpoints").glob("step_*"))) == 1


def test_the_job_of_a_script_of_ones_own(batch: Slurm) -> None:
    """As docs/clusters.md has it, but for the GPUs, which the nodes lack."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    [text] = re.findall(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)
    login, folder = batch.cluster["node0"], batch.cluster.shared / "own"
    folder.mkdir()
    (folder / "train.py").write_text(OWN)
    (folder / "job.sbatch").write_text(text.replace("--gpus-per-node=8", "--output=%j.out"))
    env = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["sbatch", "--parsable", "job.sbatch"]
    job = login.run(command, cwd=folder, env=env, check=True).stdout.strip()
    output = folder / f"{job}.out"
    deadline = time.monotonic() + PATIENCE_S
    while not (output.exists() and "training" in output.read_text()):
        assert time.monotonic() < deadline, output.read_text() if output.exists() else "no output"
        time.sleep(0.1)
    login.run(["scancel", "--batch", "--signal=TERM", job], check=True)
    assert batch.wait(job, output) == 75, output.read_text()
    assert "mpiddp: stopped on request." in output.read_text()
