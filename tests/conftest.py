"""Fixtures of several test modules."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# No test remembers the hosts of another (mpiddp/hosts/history.py).
os.environ["XDG_STATE_HOME"] = "/dev/null"
# Several test processes share the cores. Threads of torch that wait for each other after every operation
# would make it take 40 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The files that take longest, longest first: if one started last, one process would still run it after the
# others have finished.
LONGEST_FIRST = """
    training start checkpoints stop failures allocations output python restarts variables hosts doctor hangs
    run_sh cifar10_fetch supervision silent_ends without_launcher rendezvous gpu random_faults resume
    training_input divergence determinism reference_benchmark shown_output saver control_channel
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = LONGEST_FIRST.split()

    def by_length(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return order.index(name) if name in order else len(order)

    items.sort(key=by_length)
