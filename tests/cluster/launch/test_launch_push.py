"""A job on hosts that have nothing but sshd and python3: `mpiddp launch --push`.

Tests mpiddp/launch/main.py and mpiddp/hosts/push.py.
python -m pytest tests/cluster/launch/test_launch_push.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, Layout
from tests.support.errors import error
from tests.support.ranks import ROOT

MPIDDP = [sys.executable, "-m", "mpiddp"]
LEFT_OUT = (
    ".git",
    ".frameworks",
    ".mpi",
)  # of the repository, whose Open MPI is in its environment


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2, layout=Layout(apart=True)) as standing:
        yield standing


@pytest.mark.slow  # two gigabytes: torch, its interpreter and Open MPI
def test_from_bare_hosts_to_a_finished_training(hosts: Cluster, tmp_path: Path) -> None:
    """Checkpoints on both hosts at the end; then one line changes, and the next launch brings it along."""
    node0, node1 = hosts.hosts
    file = hosts.shared / "hosts"
    file.write_text("node0 slots=1\nnode1 slots=1\n")
    project = tmp_path / "project"
    project.mkdir()
    (project / "whose.py").write_text("import os\nprint('first', os.environ['RANK'])\n")
    train = ["-m", "mpiddp", "train", "--use-syn", "--arch", "resnet20", "--batch-size", "4"]
    train += ["--epochs", "1", "--steps-per-epoch", "2", "--save-every", "1", "--out", "runs/x"]
    launch = [*MPIDDP, "launch", "--hostfile", str(file)]

    done = node0.run([*launch, *train], cwd=project)
    assert done.returncode == 2
    assert re.search(error("Install it at", "node1: ", "mpiddp hosts push"), done.stderr)

    # The environment leads to the repository (an editable install) and to its interpreter.
    leave_out = [option for name in LEFT_OUT for option in ("--leave-out", name)]
    folders = [str(project), str(ROOT)]
    if not node1.path(Path(sys.executable).resolve()).exists():
        folders.append(sys.base_prefix)
    push = [*MPIDDP, "hosts", "push", str(file), *leave_out]
    done = node0.run([*push, *folders], cwd=project)
    assert done.returncode == 0, done.stderr

    done = node0.run([*launch, *train], cwd=project)
    assert done.returncode == 0, done.stderr
    for host in hosts.hosts:
        assert host.path(project / "runs/x/checkpoints/step_00000002/COMPLETE").exists()

    (project / "whose.py").write_text("import os\nprint('second', os.environ['RANK'])\n")
    done = node0.run([*launch, "--push", "--log-ranks", "all", "whose.py"], cwd=project)
    assert "second 1" in done.stdout, done.stderr
    assert (node1.path(project) / "runs/x").is_dir()


def test_launch_pushes_first(hosts: Cluster) -> None:
    """A host that cannot take the folder ends the launch with code 2, before anything has started."""
    folder = Path("/run/project")
    hosts["node0"].run(["mkdir", "-p", str(folder)], check=True)
    hosts["node0"].path(folder / "job.py").write_text("print('started')\n")
    hosts["node1"].path(folder).write_text("a file")
    launch = [*MPIDDP, "launch", "-H", "node0:1,node1:1", "--push"]
    done = hosts["node0"].run([*launch, "job.py"], cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"mpiddp: node1: {folder}: File exists\.\n", done.stderr), done.stderr
    done = hosts["node0"].run([*launch, "--wait-for-hosts", "1m", "job.py"], cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    waits = error("--push does", "--push ", "--wait-for-hosts")
    assert re.fullmatch(f"{waits}\n", done.stderr), done.stderr
