"""`mpiddp bench-rank NAME`: one rank of a job that `mpiddp bench` has started.

A rank sends its results as a line of stdout, see `mpiddp.bench.result_lines`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib import import_module

from mpiddp.runtime.launcher.connected import connected
from mpiddp.runtime.log import RankParser
from mpiddp.runtime.start.run import prepare_process
from mpiddp.world import World

BENCHMARKS = ("scaling", "allreduce", "step", "loader", "rendezvous")


def main(argv: list[str]) -> int:
    """Run one rank of the benchmark that `argv` names.

    Raises:
        UserError, SystemExit: bad input, see `mpiddp.runtime.job.coordinator`.
    """
    parser = RankParser(
        prog="mpiddp bench-rank",
        description="(internal) One rank of a benchmark; mpiddp bench starts it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--share", type=int, default=1, help="share the threads of the host among this many ranks"
    )
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="options of the benchmark")
    options = parser.parse_args(argv)
    world = World.from_env()
    local_ranks = max(world.local_world_size or 1, options.share)
    prepare_process(replace(world, local_world_size=local_ranks))
    with connected(world):
        import_module(f"mpiddp.bench.ranks.{options.name}").run(world, options.rest)
    return 0
