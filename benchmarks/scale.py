"""The cost of large jobs to the launcher, or beside rank 0, with light clients in place of ranks.

    python -m benchmarks.scale --ranks 64,256,1024,4096,16384

- launcher: the real supervisor runs `benchmarks.ranks.light_clients` as its mpirun. Each client joins,
  agrees twice with all others, reports a few steps and ends.
- server: the process beside rank 0, without a launcher. All ranks connect, agree twice and leave.
- names: the launcher resolves the names of all hosts, and the name server answers each after 0.2 s. Only
  root can measure it.

There are 8 ranks on each host. Costs are seconds of processor time of the measured process; those of the
clients stand beside. The dashed line is the cost of the smallest job times the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import start_benchmark
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.charts import Chart, Panel
from mpiddp.bench.jobs import Jobs, progress
from mpiddp.bench.options import counts
from mpiddp.bench.report import Spread, spread
from mpiddp.text import align_columns

MEASURED = ("launcher", "server", "names")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=counts(1),
        default="64,256,1024,4096,16384",
        metavar="64,256",
        help="numbers of ranks (default: 64 to 16384)",
    )


def measure(options: Options, jobs: Jobs) -> Results:
    measured = MEASURED if os.getuid() == 0 else MEASURED[:-1]
    costs: dict[str, dict[str, Any]] = {name: {} for name in measured}
    for ranks in options.ranks:
        for number, name in enumerate(measured, start=1):
            cost = _cost(name, ranks)
            costs[name][str(ranks)] = cost
            progress(f"scale, {name}", ranks, number, len(measured), f"{cost['cpu_s']:.2f} s")
    return {"costs": costs}


def _cost(name: str, ranks: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.ranks.light_clients", name, str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "LIGHT_CLIENTS_FOLDER": folder}
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S
        )
    cost: dict[str, float] = json.loads(done.stdout)
    return cost


def table(results: Results) -> str:
    costs = results["costs"]
    head = ["ranks", "launcher CPU s", "its clients", "server CPU s", "its clients", "wall s"]
    rows = [[*head, "names, wall s"]]
    for ranks in costs["launcher"]:
        launcher, server = (costs[name][ranks] for name in MEASURED[:2])
        names = costs["names"][ranks] if "names" in costs else None
        rows.append(
            [
                ranks,
                f"{launcher['cpu_s']:.2f}",
                f"{launcher['clients_cpu_s']:.2f}",
                f"{server['cpu_s']:.2f}",
                f"{server['clients_cpu_s']:.2f}",
                f"{launcher['wall_s']:.1f}, {server['wall_s']:.1f}",
                f"{names['wall_s']:.2f}" if names else "-",
            ]
        )
    return align_columns(rows, right=range(7))


def chart(results: Results) -> Chart:
    series: dict[str, dict[int, Spread]] = {}
    for name, label in (("launcher", "launcher"), ("server", "beside rank 0")):
        costs = {int(ranks): cost["cpu_s"] for ranks, cost in results["costs"][name].items()}
        smallest = min(costs)
        series[label] = {ranks: spread([cost]) for ranks, cost in costs.items()}
        series[f"ideal {label}"] = {
            ranks: spread([costs[smallest] * ranks / smallest]) for ranks in costs
        }
    panel = Panel("processor time, s", "ranks", series, logarithmic="xy", tick=str)
    return Chart("", [panel])


BENCHMARK = Benchmark(Options, _add_options, measure, table, chart, takes_hosts=False)

if __name__ == "__main__":
    start_benchmark("scale", "the cost of large jobs to the launcher, or beside rank 0", BENCHMARK)
