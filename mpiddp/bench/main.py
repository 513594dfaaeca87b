"""`mpiddp bench NAME`: measure one thing, print a table, and write its numbers as JSON.

    mpiddp bench allreduce --hostfile hostfiles/two_nodes

Each benchmark is a module with `main(argv)`. It runs in the launching process, without torch, and starts jobs.
"""

from __future__ import annotations

from importlib import import_module

from mpiddp.arguments import examples
from mpiddp.errors import DONE, UserError

BENCHMARKS = {
    "scaling": "the steps/s of a script by its number of ranks",
    "allreduce": "the bandwidth of gloo's and NCCL's all-reduce by size",
}


def main(argv: list[str]) -> int:
    """Run the benchmark that `argv` names; return 0, or the exit code of a failed job: 1 or 2.

    Raises UserError for bad input, before the first measurement, and JobFailed if a disk fails or is full.
    """
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:<12}{purpose}" for name, purpose in BENCHMARKS.items())
        usage = f"usage: mpiddp bench NAME [options]\n\n{examples('mpiddp bench')}"
        print(f"{usage}\n\n{lines}\n\nSee: mpiddp bench NAME --help")
        return DONE
    name, *rest = argv
    if name not in BENCHMARKS:
        names = ", ".join(BENCHMARKS)
        raise UserError(f'mpiddp bench: unknown benchmark "{name}". Expected one of: {names}.')
    return int(import_module(f"mpiddp.bench.{name}").main(rest))
