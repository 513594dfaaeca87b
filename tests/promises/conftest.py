"""Fixtures of the promises: where a test runs (`here`, `hosts`, or `place` for both), and the MPI (`mpi`)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster as test_cluster
from tests.support.cluster import Cluster, slurm
from tests.support.cluster.slurm import Slurm
from tests.support.installs import mpirun_of
from tests.support.place import Here, Hosts, Place, program


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    """This machine, with a new folder."""
    place = Here(tmp_path)
    yield place
    place.clear()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The hosts of a file of tests. A file that needs others has a fixture of this name."""
    with test_cluster.up_or_skip(3) as up:
        yield up


@pytest.fixture
def hosts(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """The hosts of `cluster`, with a new folder that they share."""
    with Hosts.on(cluster, request.node.name) as place:
        yield place


@pytest.fixture(scope="module")
def batch(cluster: Cluster) -> Iterator[Slurm]:
    """A Slurm on the hosts of `cluster`."""
    with slurm.up_or_skip(cluster) as up:
        yield up


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """`here`, or the place that `here_and_on_hosts` names."""
    chosen: Place = request.getfixturevalue(getattr(request, "param", "here"))
    return chosen


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a model in two shards, saved after steps 1 and 2. Tests use copies, or only read it."""
    place = Here(tmp_path_factory.mktemp("sharded"))
    place.fork(program("states.py"), "save", ".", "fsdp", ranks=2).assert_ok()
    return place.folder / "fsdp"


@pytest.fixture
def mpi(request: pytest.FixtureRequest) -> str:
    """The MPI that `every_mpi` names, or Open MPI 5."""
    name: str = getattr(request, "param", "openmpi5")
    mpirun_of(name)  # which skips the test without it
    return name
