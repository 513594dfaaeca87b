"""`mpiddp bench NAME`: measure one thing, print a table, keep the numbers as JSON and a chart as PNG.

mpiddp bench scaling --hostfile hostfiles/two_nodes --arch resnet50
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from mpiddp.bench import charts
from mpiddp.bench.benchmark import Benchmark
from mpiddp.bench.jobs import JobFailed, Jobs, say
from mpiddp.bench.machine import machine, one_line
from mpiddp.bench.options import launch_words, parse
from mpiddp.errors import UserError
from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import make_plan
from mpiddp.launch.starters.environment import without_secrets
from mpiddp.train.config import check_options

BENCHMARKS = {
    "scaling": "images/s and efficiency against the number of ranks",
    "allreduce": "bandwidth of gloo's and NCCL's all-reduce by size",
    "launch": "from the command to the first all-reduce, beside torchrun",
    "step": "where a step's time goes, and what the runner adds to a bare loop",
    "loader": "images/s of each data source alone",
    "rendezvous": "how the ranks' meeting grows with their number",
}


def main(argv: list[str]) -> int:
    """Measure what `argv` names; 0, or the exit code of a job that failed: 1 or 2.

    Raises:
        UserError: bad input, found before anything was measured.
    """
    started_at = time.time()
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = argv
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise UserError(f'mpiddp bench: there is no "{name}" to measure. Known: {known}.')
    benchmark: Benchmark = import_module(f"mpiddp.bench.{name}").BENCHMARK
    options = parse(name, benchmark, rest)
    charts.need_matplotlib()
    started = time.strftime("%Y%m%d-%H%M%S", time.localtime(started_at))
    folder = Path(options.out or f"bench/{started}-{name}")
    _check_writable(folder)
    jobs = _jobs(options, benchmark, started_at)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the job as a Ctrl-C does
    try:
        results = benchmark.measure(options, jobs)
    except JobFailed as failure:
        print(failure, file=sys.stderr)
        say(f"bench {name} ends here: a job failed with exit code {failure.code}.")
        return 2 if failure.code == 2 else 1
    print(benchmark.table(results))
    environment = {"mpi": jobs.starter, "hosts": results.pop("hosts", None) or [machine()]}
    _write(
        folder,
        name,
        benchmark,
        {
            "benchmark": name,
            "command": shlex.join(["mpiddp", "bench", *without_secrets(argv)]),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started_at)),
            "environment": environment,
            "options": _shown(options),
            "results": results,
        },
    )
    return 0


def _shown(options: argparse.Namespace) -> dict[str, Any]:
    shown = vars(options).copy()
    if "x" in shown:
        shown["x"] = [without_secrets(["-x", export])[1] for export in options.x]
    return shown


def usage() -> str:
    lines = "\n".join(f"  {name:<12} {purpose}" for name, purpose in BENCHMARKS.items())
    return (
        f"usage: mpiddp bench NAME [options]\n\n{lines}\n\n"
        "Each prints a table and writes NAME.json and NAME.png. mpiddp bench NAME --help tells more."
    )


def _jobs(options: argparse.Namespace, benchmark: Benchmark, started_at: float) -> Jobs:
    """Look at the hosts as a launch would, once; what is wrong there ends it here."""
    where = launch_words(options, benchmark)
    ranks = ["-n", str(options.n)] if getattr(options, "n", None) else []
    if not benchmark.takes_hosts:
        ranks = ["-H", "localhost:1"]
    backend = getattr(options, "backend", None) or check_options(getattr(options, "training", []))
    if backend == "gloo":  # over which ranks need no GPU of their own
        where.append("--share-gpus")
    launch_options = parse_options([*where, *ranks, "-m", "mpiddp", "bench-rank"])
    plan = make_plan(replace(launch_options, backend=backend), started_at, os.environ)
    per_host = max(node.ranks for node in plan.request.nodes)
    slots = plan.request.world_size
    return Jobs(tuple(where), slots, per_host, plan.starter.name, options.timeout)


def _check_writable(folder: Path) -> None:
    """What has taken an hour to measure shall not be lost to a missing permission."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError:
        raise UserError(
            f"--out {folder}: {existing} cannot be written. Name another folder."
        ) from None


def _write(folder: Path, name: str, benchmark: Benchmark, record: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        figure = charts.new_figure(benchmark.size)
        benchmark.draw(record["results"], figure)
        hosts = record["environment"]["hosts"]
        others = f" and {len(hosts) - 1} more" if len(hosts) > 1 else ""
        machines = f"{one_line(hosts[0])}{others}, {record['environment']['mpi']}"
        charts.save(figure, folder / f"{name}.png", [machines, record["command"]])
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror}.") from None
    print(f"\n{folder / name}.json and {name}.png")
