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
    "launch": "the time from the command to the first all-reduce, compared with torchrun",
    "step": "time of each part of a step, and the runner's overhead over a bare loop",
    "loader": "the images/s of each data source, compared with the speed of the model",
    "rendezvous": "time to join, by number of ranks",
}


def main(argv: list[str]) -> int:
    """Run the benchmark that `argv` names; return 0, or the exit code of a failed job: 1 or 2.

    Raises:
        UserError: bad input, found before the first measurement.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return DONE
    name, *rest = argv
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise UserError(f'mpiddp bench: unknown benchmark "{name}". Expected one of: {known}.')
    benchmark = import_module(f"mpiddp.bench.{name}").BENCHMARK
    return run_benchmark(f"mpiddp bench {name}", BENCHMARKS[name], benchmark, rest)


def usage() -> str:
    lines = "\n".join(f"  {name:<12}{purpose}" for name, purpose in BENCHMARKS.items())
    return (
        f"usage: mpiddp bench NAME [options]\n\n{lines}\n\n"
        "Each benchmark prints a table and writes NAME.json and NAME.png.\n"
        "See: mpiddp bench NAME --help"
    )
