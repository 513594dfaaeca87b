"""What a benchmark is made of: its options, its measuring, its table and its chart.

Each benchmark is one module of this package with one `BENCHMARK`. All of them run in the launching
process, without torch; what its jobs do in their ranks is in `mpiddp.bench.ranks`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpiddp.bench.jobs import Jobs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = dict[str, Any]  # what goes into the JSON file: numbers, texts, lists and dicts


@dataclass(frozen=True)
class Benchmark:
    """`measure` runs the jobs; `table` and `draw` show its results, and nothing but these.

    `size` is that of the chart, in inches. With `takes_hosts` the jobs run over a hostfile, else on
    this machine. With `takes_training` the options of `mpiddp train` are taken as well.
    """

    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Jobs], Results]
    table: Callable[[Results], str]
    draw: Callable[[Results, Figure], None]
    size: tuple[float, float]
    takes_hosts: bool = True
    takes_training: bool = False
