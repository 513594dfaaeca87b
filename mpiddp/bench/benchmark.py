"""What a benchmark is made of: its options, its measuring, its table and its chart.

Each benchmark is one module of this package, or of the top-level `benchmarks`, with one `BENCHMARK`. All
of them run in the launching process, without torch; what their jobs do in the ranks is in
`mpiddp.bench.ranks`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from mpiddp.bench.jobs import Jobs
from mpiddp.bench.result_lines import Result

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from matplotlib.figure import Figure

Results = Result  # what goes into the JSON file: numbers, texts, lists and dicts
Options = TypeVar("Options", bound="DataclassInstance")


@dataclass(frozen=True)
class Benchmark(Generic[Options]):
    """`measure` runs the jobs; `table` and `draw` show its results, and nothing but these.

    `options` is the frozen dataclass of what `add_options` adds. `size` is that of the chart, in
    inches. With `takes_hosts` the jobs run over a hostfile, else on this machine. With
    `takes_training` the options of `mpiddp train` are taken as well.
    """

    options: type[Options]
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[Options, Jobs], Results]
    table: Callable[[Results], str]
    draw: Callable[[Results, Figure], None] | None = None
    size: tuple[float, float] = (8, 4.8)
    takes_hosts: bool = True
    takes_training: bool = False
    example: str = ""  # options, for --help
