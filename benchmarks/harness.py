"""Shared by the scripts of this folder: their options, their turns, the variables of their jobs, and tables.

The options of a script are the fields of its dataclass `Options`:

    rounds: int = option("rounds of all sizes", parse=whole(1), default=3)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, field, fields
from typing import Any, TypeVar

from mpiddp.arguments import Option, whole
from mpiddp.bench.measured_jobs import Jobs, new_parser, values_of
from mpiddp.errors import print_error
from mpiddp.text import counted
from tests.support.ranks import ROOT

T = TypeVar("T")

# The variables of jobs, which import this checkout. A rank has one thread, as under torchrun.
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def option(help: str, *, default: object = None, **record: Any) -> Any:
    """A field that is an option: see `mpiddp.arguments.Option`."""
    shown = f"{help} (default: {default})" if default else help
    return field(metadata={"value": "N", "help": shown, "default": default, **record})


def wholes(low: int) -> Callable[[str], tuple[int, ...]]:
    """A parser for ascending lists of whole numbers such as 1,2,4."""
    return lambda text: tuple(sorted({whole(low)(part) for part in text.split(",")}))


def run_script(
    name: str,
    purpose: str,
    *,
    takes_hosts: bool = True,
    least_ranks: int = 1,
    check: Callable[[str, list[str]], None] | None = None,
) -> int:
    """Run this script, which has `Options`, `measure` and `table`; return its exit code.

    Args:
        takes_hosts: the options of `mpiddp launch` choose the hosts. Otherwise it measures this machine.
        check: if there is this function, further arguments are for the ranks, and it raises UserError if they
            are wrong. `measure` takes them after the options and the jobs.
    """
    module: Any = sys.modules["__main__"]
    prog, argv = f"python -m benchmarks.{name}", sys.argv[1:]
    own = [
        Option(f"--{row.name.replace('_', '-')}", **row.metadata) for row in fields(module.Options)
    ]
    parser, where = new_parser(prog, purpose, own)
    values, more = parser.parse_known_args([*argv, *(() if takes_hosts else ("-H", "localhost:1"))])
    if check:
        check(prog, more)  # before the ranks start
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    options = module.Options(**values_of(own, values))
    jobs = Jobs(prog, argv, values, where, ["-m", "mpiddp.bench.allreduce"], least_ranks)

    def measure() -> Any:
        return module.measure(options, jobs, *((more,) if check else ()))

    return jobs.report({**asdict(options), "arguments": more}, measure, module.table)


def run_job(jobs: Jobs, module: str, options: Any, training: Sequence[str]) -> Any:
    """Run a module on all slots, with its options as JSON and those of the training; return its result."""
    return jobs.run("-m", module, json.dumps(asdict(options)), *training)


def turns(names: Sequence[T], rounds: int, warmup: int = 0) -> Iterator[tuple[int, T]]:
    """Yield (round, name), each name once per round, so that other load affects all of them equally.

    Rounds count from 1; the numbers of the `warmup` rounds before them end with 0. Every second round has the
    reverse order of the round before, and each such pair starts one name later. So the after-effects of a
    turn, in caches or pending writes, do not always hit the same name.
    """
    for index in range(warmup + rounds):
        start = index // 2 % len(names)
        order = (*names[start:], *names[:start])
        for name in reversed(order) if index % 2 else order:
            yield index + 1 - warmup, name


def progress(name: str, ranks: int, round_number: int, rounds: int, measured: str) -> None:
    print_error(f"{name}: {counted(ranks, 'rank')}, round {round_number} of {rounds}: {measured}")


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio of each round, in which both figures were measured shortly after each other."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, for a page of docs/."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
