"""mpiddp.mesh on real ranks: tensor-parallel groups lie inside hosts, or all ranks refuse.

Tests mpiddp/runtime/torch/device_mesh.py, examples/hybrid.py.
python -m pytest tests/cluster/train/test_device_mesh.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.errors import error
from tests.support.mesh_groups import Ranks
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ALL_OUTPUT, LAUNCH, ROOT, find_mpirun

JOB = str(ROOT / "tests" / "jobs" / "mesh_groups.py")
EXAMPLE = ROOT / "examples" / "hybrid.py"
RUN = (sys.executable, "-m", "mpiddp", "run", JOB)
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **ALL_OUTPUT}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def over_mpirun(hosts: Cluster, slots: str, *options: str, job: tuple[str, ...] = RUN) -> Any:
    """`mpirun -H SLOTS OPTIONS JOB…` on the first host."""
    command = [find_mpirun(), "--allow-run-as-root", "--bind-to", "none", "-H", slots, *options]
    exports = [part for name in ENV for part in ("-x", name)]
    return hosts["node0"].run([*command, *exports, *job], cwd=ROOT, env=ENV)


def test_hosts_with_4_and_2_slots(hosts: Cluster) -> None:
    done = hosts["node0"].run(
        [*LAUNCH, "-H", "node0:4,node1:2", JOB, "plain", "tp=2"], cwd=ROOT, env=ENV
    )
    assert done.returncode == 0, done.stderr
    ranks = Ranks(done.stdout)
    assert ranks.groups("tp") == [[0, 1], [2, 3], [4, 5]]
    assert ranks.groups("dp") == [[0, 2, 4], [1, 3, 5]]
    assert [ranks.num_hosts(group) for group in ranks.groups("tp")] == [1, 1, 1]


NOT_BY_HOST = error(
    "which are", "mpiddp.mesh: tp=2 ", "ranks 0, 1", "node0 and node1", "mpirun --map-by slot"
)


@pytest.mark.parametrize("how", ["plain", "init"])
def test_ranks_dealt_out_in_turn_are_refused(hosts: Cluster, how: str) -> None:
    """torch would put each all-reduce of a layer on the network. Without tp nothing is refused."""
    job = (*RUN, how) if how == "plain" else (sys.executable, JOB, how)
    options = ("--map-by", "node", "-np", "4")
    done = over_mpirun(hosts, "node0:2,node1:2", *options, job=(*job, "tp=2"))
    assert done.returncode == 2, done.stderr
    assert len(re.findall(NOT_BY_HOST, done.stderr)) == 1
    assert "Traceback" not in done.stderr
    done = over_mpirun(hosts, "node0:2,node1:2", *options, job=(*job, "pp=2"))
    assert done.returncode == 0, done.stderr
    assert Ranks(done.stdout).groups("pp") == [[0, 2], [1, 3]]


def torchrun(hosts: Cluster, *job: str) -> list[tuple[int, str, str]]:
    """The exit code, stdout and stderr of an agent of torchrun with two ranks on each host."""
    agents = [
        hosts[name].popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes=2",
                    "--nproc-per-node=2",
                ),
                *(f"--node-rank={node}", f"--master-addr={hosts['node0'].address}"),
                *("--master-port=29517", *job),
            ],
            cwd=ROOT,
            env=ENV,
        )
        for node, name in enumerate(("node0", "node1"))
    ]
    outputs = [agent.communicate(timeout=PATIENCE_S) for agent in agents]
    return [(agent.returncode, *each) for agent, each in zip(agents, outputs, strict=True)]


@pytest.mark.parametrize("how", ["plain", "init"])
def test_torchrun(hosts: Cluster, how: str) -> None:
    ends = torchrun(hosts, JOB, how, "tp=2")
    ranks = Ranks("".join(stdout for _, stdout, _ in ends))
    assert len(ranks.hosts) == 4, ends
    assert ranks.groups("tp") == [[0, 1], [2, 3]]
    assert [ranks.num_hosts(group) for group in ranks.groups("dp")] == [2, 2]


def test_a_mesh_that_does_not_fit_ends_all_ranks(hosts: Cluster) -> None:
    done = hosts["node0"].run(
        [*LAUNCH, "-H", "node0:4,node1:2", JOB, "plain", "tp=4"], cwd=ROOT, env=ENV
    )
    assert done.returncode == 2, done.stderr
    misfit = error("does not divide", "mpiddp.mesh: tp = 4 ", "6 ranks", "node1 2")
    assert len(re.findall(misfit, done.stderr)) == 1
    assert "Traceback" not in done.stderr


def test_a_mesh_that_does_not_fit_under_torchrun(hosts: Cluster) -> None:
    """The script has not joined: its ranks refuse over their own process group."""
    ends = torchrun(hosts, JOB, "plain", "dp=3", "tp=2")
    values = ("mpiddp.mesh: dp × tp = 6 ", "4 ranks", "2 hosts × 2")
    printed = "".join(stderr for _, _, stderr in ends)
    assert len(re.findall(error("is not", *values), printed)) == 1, ends
    assert all(code for code, _, _ in ends)


def test_tp_across_hosts(hosts: Cluster) -> None:
    command = [*LAUNCH, "-H", "node0:2,node1:1", JOB, "plain", "tp=3", "tp_across_hosts"]
    done = hosts["node0"].run(command, cwd=ROOT, env=ENV)
    assert done.returncode == 0, done.stderr
    assert Ranks(done.stdout).groups("tp") == [[0, 1, 2]]


# --- on this machine ---


# --- the example ---


def losses(output: str) -> list[float]:
    return [float(each) for each in re.findall(r"step \d+: loss ([0-9.]+)", output)]


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    """The losses of the example's network and batches, without any parallelism."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"), names)
    model: nn.Module = names["network"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(1, names["STEPS"] + 1):
        batch = torch.randn(names["BATCH"], 32, generator=generator)
        loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            found.append(loss.item())
    assert found[-1] < found[0] / 2  # it learns, so a wrong gradient shows
    return found


def test_the_example_on_unequal_hosts(hosts: Cluster, plain_losses: list[float]) -> None:
    """Three replicas, on hosts of four and two slots."""
    job = (*RUN[:-1], str(EXAMPLE), "--tp", "2")
    done = over_mpirun(hosts, "node0:4,node1:2", "--map-by", "slot", "-np", "6", job=job)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx(plain_losses, rel=1e-4)
