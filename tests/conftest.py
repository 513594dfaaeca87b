"""Fixtures of several test modules."""

import ctypes
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

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
    start checkpoints failures stop doctor python training allocations restarts hangs hosts output
    variables refusals packaging page_commands run_sh
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = LONGEST_FIRST.split()

    def by_length(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return order.index(name) if name in order else len(order)

    items.sort(key=by_length)
