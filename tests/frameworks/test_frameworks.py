"""Training frameworks run as under torchrun: their own test scripts, and a small training of each.

python -m tests.support.frameworks install; python -m pytest tests/frameworks/test_frameworks.py
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster, frameworks
from tests.support.cluster import Cluster
from tests.support.ranks import LAUNCH, ROOT, launch, mpirun

JOBS = ROOT / "tests" / "jobs"
LIGHTNING = str(JOBS / "lightning_training.py")
TRANSFORMERS = str(JOBS / "transformers_training.py")
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def check_lightning(done: Done, folder: Path) -> None:
    """Two ranks trained one model to a small loss, and saved it once."""
    assert done.returncode == 0, done.stderr
    losses = dict(re.findall(r"^rank (\d) of 2: loss (\S+)$", done.stdout, re.MULTILINE))
    assert losses["0"] == losses["1"]
    assert float(losses["0"]) < 0.2
    assert [path.name for path in folder.iterdir()] == ["saved-epoch=4.ckpt"]


def test_lightning_on_one_host(tmp_path: Path) -> None:
    env = frameworks.environment("lightning")
    check_lightning(launch("-n", "2", LIGHTNING, str(tmp_path), "2", "1", **env), tmp_path)


def test_lightning_on_two_hosts(hosts: Cluster) -> None:
    env = frameworks.environment("lightning")
    out = hosts.shared / "lightning"
    command = [*LAUNCH, "-H", "node0:1,node1:1", LIGHTNING, str(out), "1", "2"]
    done = hosts["node0"].run(command, cwd=ROOT, env=env | {"OMP_NUM_THREADS": "1"})
    check_lightning(done, out)


def test_lightning_under_a_raw_mpirun(tmp_path: Path) -> None:
    env = frameworks.environment("lightning")
    command = ("-m", "mpiddp", "run", LIGHTNING, str(tmp_path), "2", "1")
    check_lightning(mpirun(2, *command, env=env), tmp_path)


def test_lightning_within_a_command(tmp_path: Path) -> None:
    """`mpiddp launch -- python train.py`: the ranks' processes join, and Lightning runs in their children."""
    env = frameworks.environment("lightning")
    command = (sys.executable, LIGHTNING, str(tmp_path), "2", "1")
    check_lightning(launch("-n", "2", "--", *command, **env), tmp_path)


def test_lightning_within_a_command_on_two_hosts(hosts: Cluster) -> None:
    env = frameworks.environment("lightning")
    out = hosts.shared / "lightning-command"
    line = shlex.join([sys.executable, LIGHTNING, str(out), "1", "2"])
    command = [*LAUNCH, "-H", "node0:1,node1:1", "--", "bash", "-c", f"{line}; exit $?"]
    done = hosts["node0"].run(command, cwd=ROOT, env=env | {"OMP_NUM_THREADS": "1"})
    check_lightning(done, out)


def test_lightning_refuses_one_device_under_two_ranks(tmp_path: Path) -> None:
    """It must never train as rank 0 of 1 on each rank."""
    env = frameworks.environment("lightning")
    done = launch("-n", "2", LIGHTNING, str(tmp_path), "1", "1", **env)
    assert done.returncode == 1, done.stderr
    assert "does not match the world size (2)" in done.stderr
    assert "of 1: loss" not in done.stdout


@pytest.mark.parametrize("name", ["test_script", "test_ops", "test_sync"])
def test_accelerates_own_scripts(name: str) -> None:
    env = frameworks.environment("accelerate")
    module = f"accelerate.test_utils.scripts.{name}"
    done = launch("-x", "ACCELERATE_USE_CPU=1", "-n", "2", "-m", module, **env)
    assert done.returncode == 0, done.stderr


def test_transformers_trainer(tmp_path: Path) -> None:
    env = frameworks.environment("transformers")
    done = launch("-n", "2", TRANSFORMERS, str(tmp_path), **env)
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"^rank \d of 2: 6 steps$", done.stdout, re.MULTILINE)
    assert sorted(ends) == ["rank 0 of 2: 6 steps", "rank 1 of 2: 6 steps"]
    assert {path.name for path in tmp_path.iterdir()} >= {"checkpoint-3", "checkpoint-6"}
