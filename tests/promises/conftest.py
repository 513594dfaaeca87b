"""Fixtures of the promises: where a test runs (`here`, `hosts`, or `place` for both), and the MPI (`mpi`).

python -m pytest tests/promises --collect-only -q     # the list of what mpiddp promises
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster as test_cluster
from tests.support.cluster import Cluster, slurm
from tests.support.cluster.slurm import Slurm
from tests.support.installs import mpirun_of
from tests.support.place import Here, Hosts, Place

CHAPTERS = (
    *("start", "as_under_torchrun", "variables", "allocations", "output", "failures", "hangs"),
    *("stop", "restarts", "checkpoints", "states", "training", "hosts", "ssh", "doctor", "python"),
    "page_commands",
)


def pytest_report_collectionfinish(
    config: pytest.Config, items: list[pytest.Item]
) -> list[str] | None:
    """With --collect-only: each chapter, and each promise once, however many MPIs show it."""
    if not config.getoption("collectonly"):
        return None
    lines = []
    for chapter in CHAPTERS:
        of_chapter = [
            item
            for item in items
            if isinstance(item, pytest.Function)
            and item.path == Path(__file__).with_name(f"test_{chapter}.py")
        ]
        if of_chapter:
            lines += ["", _first_paragraph(of_chapter[0].module)]
            promises = [_first_paragraph(item.function) for item in of_chapter]
            lines += [f"  - {promise}" for promise in dict.fromkeys(promises)]
    return [*lines, ""]


def _first_paragraph(documented: object) -> str:
    text = inspect.getdoc(documented)
    assert text, f"{documented} has no docstring, which is the promise"
    return " ".join(text.split("\n\n")[0].split())


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


@pytest.fixture
def mpi(request: pytest.FixtureRequest) -> str:
    """The MPI that `every_mpi` names, or Open MPI 5."""
    name: str = getattr(request, "param", "openmpi5")
    mpirun_of(name)  # which skips the test without it
    return name
