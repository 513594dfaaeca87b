"""Fixtures of several test modules."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # tests/unit runs without what these need
    from tests.support.cluster import Cluster
    from tests.support.cluster.slurm import Slurm

# No test remembers the hosts of another (mpiddp/hosts/history.py).
os.environ["XDG_STATE_HOME"] = "/dev/null"
# Several test processes share the cores. Threads of torch that wait for each other after every operation
# would make it take 40 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The files that take longest, longest first: if one started last, one process would still run it after the
# others have finished.
LONGEST_FIRST = """
    drill supervision launch launchers run training sharded_hosts frameworks gpt stop series
    restarts restarts_on_hosts drill_on_hosts growth launch_push own_script script_checkpoints cifar10_learns
    command output_on_hosts spawn signals gpu resume training_input exactly_once
    launch_hosts users_and_ports slurm_example unmodified_hangs divergence reference_benchmark
    without_launcher determinism silent_ends slurm_job network_of_a_job replicas joining
    failing_rank bench run_sh faulty_disks grid_engine_job report local_ranks
    device_mesh pitfalls per_rank_log gpt_sharded preflight cifar10_fetch shown_output saver
    first_jobs test_hosts launch_options control_channel
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    if find_spec("pytest_timeout") is None:  # as for tests/unit, which need pytest alone
        parser.addini("timeout", "the limit of a test in seconds, which nobody enforces here")


@pytest.fixture(autouse=True)
def _no_adopted_orphans() -> Iterator[None]:
    """A launcher adopts its orphans. A test that plays one must not leave this to the tests after it.

    Nobody would reap what they have started, and a test that waits for the end of a process would see it for
    ever.
    """
    yield
    set_child_subreaper = 36  # linux/prctl.h
    ctypes.CDLL(None).prctl(set_child_subreaper, 0, 0, 0, 0)


@pytest.fixture
def official() -> Path:
    """The folder of CIFAR-10's official batches. They are fetched once."""
    from tests.support.data_cache import official_batches

    return official_batches()


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A temporary folder for copies of the data set. pytest would keep it for three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def batch(hosts: Cluster) -> Iterator[Slurm]:
    """A Slurm on the hosts of the module, which its fixture `hosts` starts."""
    from tests.support.cluster import slurm

    with slurm.up_or_skip(hosts) as standing:
        yield standing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = LONGEST_FIRST.split()

    def by_length(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return order.index(name) if name in order else len(order)

    items.sort(key=by_length)
