"""`mpiddp bench NAME`: measure one thing, print a table, write its numbers as JSON and a chart as PNG.

mpiddp bench scaling --hostfile hostfiles/two_nodes --arch resnet50
"""

from __future__ import annotations

from importlib import import_module

from mpiddp.bench.run import run_benchmark
from mpiddp.errors import DONE, UserError

BENCHMARKS = {
    "scaling": "images/s and efficiency against the number of ranks",
    "allreduce": "the bandwidth of gloo's and NCCL's all-reduce by size",
    "launch": "the time from the command to the first all-reduce, beside torchrun",
    "step": "where a step's time goes, and what the runner adds to a bare loop",
    "loader": "the images/s of each data source alone",
    "rendezvous": "how the time of the ranks' rendezvous grows with their number",
}


def main(argv: list[str]) -> int:
    """Measure what `argv` names; 0, or the exit code of a job that failed: 1 or 2.

    Raises:
        UserError: bad input, found before anything was measured.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return DONE
    name, *rest = argv
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise UserError(f'mpiddp bench: there is no "{name}" to measure. Known: {known}.')
    benchmark = import_module(f"mpiddp.bench.{name}").BENCHMARK
    return run_benchmark(f"mpiddp bench {name}", BENCHMARKS[name], benchmark, rest)


def usage() -> str:
    lines = "\n".join(f"  {name:<12}{purpose}" for name, purpose in BENCHMARKS.items())
    return (
        f"usage: mpiddp bench NAME [options]\n\n{lines}\n\n"
        "Each prints a table and writes NAME.json and NAME.png.\n"
        "mpiddp bench NAME --help lists the options of each."
    )
