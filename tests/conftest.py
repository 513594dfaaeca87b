"""Fixtures of several test modules."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import tiers
from tests.cluster import Cluster, slurm
from tests.cluster.slurm import Slurm
from tests.data_cache import official_batches

# tests/test_parsers.py with other inputs in every run, and many more: pytest --hypothesis-profile=long
settings.register_profile(
    "long",
    max_examples=20_000,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def official() -> Path:
    """The folder of CIFAR-10's official batches. They are fetched once."""
    return official_batches()


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A temporary folder for copies of the data set. pytest would keep it for three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def batch(hosts: Cluster) -> Iterator[Slurm]:
    """A Slurm on the hosts of the module, which its fixture `hosts` starts."""
    with slurm.up_or_skip(hosts) as standing:
        yield standing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function):
            tiers.mark(item)
    items.sort(key=tiers.by_length)
