"""The cost of large jobs to the launcher, or beside rank 0, with light clients in place of ranks.

    python -m benchmarks.scale --ranks 64,256,1024,4096,16384

- launcher: the real supervisor runs `benchmarks.ranks.light_clients` as its mpirun. Each client joins,
  agrees twice with all others, reports a few steps and ends.
- server: the process beside rank 0, without a launcher. All ranks connect, agree twice and leave.

There are 8 ranks on each host. Costs are seconds of processor time of the measured process; those of the
clients stand beside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from benchmarks.harness import ENV, option, progress, run_script, wholes
from mpiddp.bench.measured_jobs import Jobs, Result, aligned

MEASURED = ("launcher", "server")


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = option("numbers of ranks", parse=wholes(1), default="64,256,1024,4096")


def measure(options: Options, jobs: Jobs) -> Result:
    costs: Result = {name: {} for name in MEASURED}
    for ranks in options.ranks:
        for number, name in enumerate(MEASURED, start=1):
            costs[name][str(ranks)] = cost = _cost(name, ranks)
            progress(f"scale, {name}", ranks, number, len(MEASURED), f"{cost['cpu_s']:.2f} s")
    return {"costs": costs}


def _cost(name: str, ranks: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.ranks.light_clients", name, str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "LIGHT_CLIENTS_FOLDER": folder}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=900)
    return dict(json.loads(done.stdout))


def table(results: Result) -> str:
    head = ("ranks", "launcher CPU s", "its clients", "server CPU s", "its clients", "wall s")
    rows = []
    for ranks in results["costs"]["launcher"]:
        costs = [results["costs"][name][ranks] for name in MEASURED]
        cells = [f"{cost[name]:.2f}" for cost in costs for name in ("cpu_s", "clients_cpu_s")]
        rows.append([ranks, *cells, ", ".join(f"{cost['wall_s']:.1f}" for cost in costs)])
    return aligned(head, rows)


if __name__ == "__main__":
    os.environ.update(ENV)
    sys.exit(
        run_script(
            "scale", "the cost of large jobs to the launcher, or beside rank 0", takes_hosts=False
        )
    )
