"""Fixtures of several test modules."""

import ctypes
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from mpiddp.launch import log

# No test sees the detached jobs of another.
os.environ["XDG_STATE_HOME"] = "/dev/null"
# Several test processes share the cores. Threads of torch that wait for each other after every operation
# would make it take 40 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background process ignores Ctrl-C, and its children would as well.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest, longest first: if one started last, one process would still run it after the
# others have finished.
LONGEST_FIRST = """
    failures hangs as_under_torchrun training stop states doctor checkpoints bench_parts restarts allocations ssh hosts
    start run_sh page_commands python output variables gpus refusals script
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    if find_spec("pytest_timeout") is None:  # as for tests/unit, which need pytest alone
        parser.addini("timeout", "the limit of a test in seconds, which nobody enforces here")


@pytest.fixture(autouse=True)
def _nothing_left_of_a_launcher() -> Iterator[None]:
    """A test that plays a launcher, in this process, must not leave to the tests after it what it has set.

    A launcher adopts its orphans: nobody would reap what the later tests have started, and a test that waits for
    the end of a process would see it for ever. And with --quiet, its log would stay silent.
    """
    yield
    set_child_subreaper = 36  # linux/prctl.h
    ctypes.CDLL(None).prctl(set_child_subreaper, 0, 0, 0, 0)
    log.is_quiet = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = LONGEST_FIRST.split()

    def by_length(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return order.index(name) if name in order else len(order)

    items.sort(key=by_length)
