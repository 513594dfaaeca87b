"""Every launcher runs the same script with the same placement, output and weights, bit for bit.

Tests mpiddp/world.py.
python -m pytest tests/cluster/launch/test_launchers.py
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.cluster.slurm import Slurm
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

EXAMPLE = str(ROOT / "examples" / "message_passing.py")
BIN = Path(sys.executable).parent
TRAIN = shlex.split(
    "-m mpiddp train --use-syn --backend=gloo --arch=resnet20 --batch-size=8 --epochs=1 "
    "--steps-per-epoch=3 --amp=off --out"
)
# The number of threads determines the order of additions on a CPU.
ENV = {"OMP_NUM_THREADS": "1"}
MESSAGES = [
    "worker_0 has received 10 from rank 1",
    "worker_0 sent data to Rank 1",
    "worker_1 has received data from rank 0",
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def launched(hosts: Cluster, *options: str) -> Callable[..., str]:
    """`mpiddp launch` over both hosts."""

    def run(*job: str) -> str:
        command = [str(BIN / "mpiddp"), "launch", "-H", "node0:1,node1:1", *options, *job]
        done = hosts["node0"].run(command, cwd=ROOT, env=ENV)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


STATIC = "--node-rank={rank} --master-addr={address} --master-port=29511"
C10D = "--rdzv-backend=c10d --rdzv-endpoint={address}:29513 --rdzv-id=job"


def torchrun(hosts: Cluster, program: str, rendezvous: str = STATIC) -> Callable[..., str]:
    """Start a torchrun agent on each of two hosts, and return the output of both.

    The agents' exit codes are ignored: on a busy machine one may be 1 although all ranks succeeded.
    """

    def run(*job: str) -> str:
        agents = [
            hosts[name].popen(
                [
                    *(sys.executable, "-m", program, "--nnodes=2", "--nproc-per-node=1"),
                    *rendezvous.format(rank=rank, address=hosts["node0"].address).split(),
                    *job,
                ],
                cwd=ROOT,
                env=ENV,
            )
            for rank, name in enumerate(("node0", "node1"))
        ]
        outputs = [agent.communicate(timeout=PATIENCE_S) for agent in agents]
        return "".join(out for out, _ in outputs)

    return run


def torchrun_on_one_node(hosts: Cluster) -> Callable[..., str]:
    def run(*job: str) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *job]
        done = hosts["node0"].run(command, cwd=ROOT, env=ENV)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def srun(batch: Slurm, *options: str) -> Callable[..., str]:
    def run(*job: str) -> str:
        command = ["srun", "-N2", "--ntasks-per-node=1", *options, sys.executable, *job]
        done = batch.cluster["node0"].run(command, cwd=ROOT, env=ENV)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def sbatch(batch: Slurm) -> Callable[..., str]:
    def run(*job: str) -> str:
        command = shlex.join([str(BIN / "mpiddp"), "launch", *job])
        done = batch.sbatch(
            f"#!/bin/sh\n{command}\n", "-N2", "--ntasks-per-node=1", cwd=ROOT, env=ENV
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


LAUNCHERS = (
    "openmpi",
    "openmpi4",
    "mpich",
    "intelmpi",
    "torchrun",
    "torchrun-c10d",
    "torchrun-one-node",
    "torch.distributed.launch",
    "srun",
    "srun-pmi2",
    "sbatch",
)
ONE_OF_EACH_KIND = ("openmpi", "torchrun", "torch.distributed.launch", "srun")


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest, hosts: Cluster) -> tuple[str, Callable[..., str]]:
    name = request.param
    if name in ("openmpi4", "mpich", "intelmpi"):
        return name, launched(hosts, "--mpirun", mpirun_of(name))
    if name == "openmpi":
        return name, launched(hosts)
    if name == "torchrun":
        return name, torchrun(hosts, "torch.distributed.run")
    if name == "torchrun-c10d":
        return name, torchrun(hosts, "torch.distributed.run", C10D)
    if name == "torchrun-one-node":
        return name, torchrun_on_one_node(hosts)
    if name == "torch.distributed.launch":
        return name, torchrun(hosts, "torch.distributed.launch")
    standing = request.getfixturevalue("batch")
    if name == "sbatch":
        return name, sbatch(standing)
    return name, srun(standing, *(["--mpi=pmi2"] if name == "srun-pmi2" else ["--mpi=none"]))


# One launcher of each kind is enough: the training below runs under all of them.
@pytest.mark.parametrize("launcher", ONE_OF_EACH_KIND, indirect=True)
def test_message_passing_prints_the_same(launcher: tuple[str, Callable[..., str]]) -> None:
    _, run = launcher
    # Not compared by line: with PYTHONUNBUFFERED, messages of two ranks can share a line.
    stdout = run(EXAMPLE, "--backend", "gloo")
    assert [stdout.count(message) for message in MESSAGES] == [1] * len(MESSAGES), stdout


def test_a_script_through_mpiddp_run_under_a_dynamic_rendezvous(hosts: Cluster) -> None:
    """With c10d, the agents agree on the nodes' ranks, and on rank 0's address."""
    stdout = torchrun(hosts, "torch.distributed.run", C10D)("-m", "mpiddp", "run", EXAMPLE)
    assert [stdout.count(message) for message in MESSAGES] == [1] * len(MESSAGES), stdout


@pytest.fixture(scope="module")
def weights(hosts: Cluster) -> str:
    """The digest of the weights that ranks of torchrun on one host have trained."""
    out = hosts.shared / "run-reference"
    torchrun_on_one_node(hosts)(*TRAIN, str(out))
    return digest(out)


def test_training_gives_the_same_weights(
    launcher: tuple[str, Callable[..., str]], hosts: Cluster, weights: str
) -> None:
    name, run = launcher
    out = hosts.shared / f"run-{name}"
    stdout = run(*TRAIN, str(out))
    placement = "2 on 1 host" if name == "torchrun-one-node" else "2 on 2 hosts (node0 1, node1 1)"
    assert placement in stdout
    assert digest(out) == weights


def digest(run: Path) -> str:
    """The digest of the weights of the run's last checkpoint."""
    state = torch.load(run / "checkpoints" / "step_00000003" / "model.pt", weights_only=True)
    parts = [name.encode() + tensor.numpy().tobytes() for name, tensor in state.items()]
    return hashlib.sha256(b"".join(parts)).hexdigest()
