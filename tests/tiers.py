"""Set the markers `ranks` and `cluster` from the code that a test uses.

`./run.sh test` runs all tests except those marked `cluster`, `frameworks` or `slow`. It runs a test of real
ranks only if it is marked `quick`. `slow` and `quick` are marked by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

import pytest

from tests import cluster, mpis, ranks

STARTS_RANKS = (ranks.LAUNCH, ranks.find_mpirun, ranks.mpiddp, mpis.mpirun_of)
# The files that take longest, longest first. If a long file started last, one process would still run it
# after the others have finished.
LONGEST_FIRST = (
    *(
        "supervision",
        "launch",
        "launchers",
        "run",
        "training",
        "stop",
        "cifar10_learns",
        "series",
        "restarts",
        "growth",
        "own_script",
    ),
    "spawn",
    *("resume", "training_input", "exactly_once", "launch_hosts", "network_of_a_job", "replicas"),
    *("joining", "failing_rank", "bench", "slurm_job", "rendezvous", "run_sh", "faulty_disks"),
    *("grid_engine_job", "local_ranks", "device_mesh", "pitfalls", "per_rank_log"),
    *("gpt", "gpt_sharded"),
    *("preflight", "cifar10_fetch", "saver", "test_hosts", "launch_options", "coordinator"),
    "control_channel",
)
VERBS = ("run", "train", "launch", "bench", "-H")
STARTS_CLUSTER = ("up", "up_or_skip", "stand_up")


def mark(item: pytest.Function) -> None:
    """Add the markers that follow from the functions that the test and its fixtures use."""
    functions = [item.function]
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        functions += [definition.func for definition in definitions]
    if uses_cluster(functions):
        item.add_marker(pytest.mark.cluster)
    if starts_ranks(functions):
        item.add_marker(pytest.mark.ranks)


def by_length(item: pytest.Item) -> int:
    """The position of the test's file in LONGEST_FIRST. Files that are not listed come last."""
    name = item.path.stem.removeprefix("test_")
    return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)


def starts_ranks(functions: Iterable[object]) -> bool:
    """Whether the functions use mpirun, or a command of mpiddp, or a benchmark, that starts ranks."""
    for function in _reached(functions):
        used = _globals_of(function)
        if any(value is start for value in used for start in STARTS_RANKS):
            return True
        values = list(function.__code__.co_consts)
        for value in used:
            values += _flat(value)
        texts = [value for value in values if isinstance(value, str)]
        is_program = any("mpiddp" in text or "benchmarks." in text for text in texts)
        if is_program and any(verb in texts for verb in VERBS):
            return True
    return False


def _flat(value: object) -> list[object]:
    """The values in a list, tuple or dict, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [each for inner in value for each in _flat(inner)]
    return [value]


def uses_cluster(functions: Iterable[object]) -> bool:
    """Whether the functions start a cluster, with `cluster.up` or one of its relatives."""
    starts_cluster = [getattr(cluster, name) for name in STARTS_CLUSTER]
    for function in _reached(functions):
        names = _names(function.__code__)
        for value in _globals_of(function):
            if any(value is each for each in starts_cluster) or (
                value is cluster and not names.isdisjoint(STARTS_CLUSTER)
            ):
                return True
    return False


def _reached(functions: Iterable[object]) -> Iterator[FunctionType]:
    """The functions, and all functions of the tests that they use, directly or indirectly."""
    seen: set[int] = set()
    todo = [function for function in functions if isinstance(function, FunctionType)]
    while todo:
        function = inspect.unwrap(todo.pop())  # that of a context manager, for example
        if id(function) in seen or not function.__module__.startswith("tests."):
            continue
        seen.add(id(function))
        yield function
        for value in _globals_of(function):
            if isinstance(value, FunctionType):
                todo.append(value)
            elif isinstance(value, type):
                todo += [each for each in vars(value).values() if isinstance(each, FunctionType)]


def _globals_of(function: FunctionType) -> list[object]:
    """The values of the module's globals that the function uses."""
    names = _names(function.__code__)
    return [function.__globals__[name] for name in names & function.__globals__.keys()]


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
