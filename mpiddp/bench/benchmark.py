"""The parts of a benchmark: its options, its measurement, its table and its chart.

Each benchmark is one module of this package, or of the top-level `benchmarks`, with one `BENCHMARK`. It
runs in the launching process, without torch. `mpiddp.bench.ranks` contains the ranks of its jobs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from mpiddp.bench.charts import Chart
from mpiddp.bench.jobs import Jobs
from mpiddp.bench.result_lines import Result

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Results = Result  # the contents of the JSON file: numbers, strings, lists and dicts
Options = TypeVar("Options", bound="DataclassInstance")


@dataclass(frozen=True)
class Benchmark(Generic[Options]):
    """`measure` runs the jobs; `table` and `chart` show only its results.

    `options` is the frozen dataclass of the options that `add_options` adds. `size` is the size of the
    chart in inches. With `takes_hosts` the jobs run over a hostfile, otherwise on this machine. With
    `takes_training` the benchmark also accepts the options of `mpiddp train`.
    """

    options: type[Options]
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[Options, Jobs], Results]
    table: Callable[[Results], str]
    chart: Callable[[Results], Chart] | None = None
    size: tuple[float, float] = (8, 4.8)
    takes_hosts: bool = True
    takes_training: bool = False
    example: str = ""  # options, for --help
