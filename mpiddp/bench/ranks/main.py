"""`mpiddp bench-rank NAME OPTIONS TRAINING…`: one rank of a job that `mpiddp bench` has started.

OPTIONS are those of the benchmark as JSON. Rank 0 sends the results.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from importlib import import_module

from mpiddp.arguments import OneSentenceParser
from mpiddp.bench.figures import emit
from mpiddp.runtime.gpu import prepare
from mpiddp.runtime.script import keep_freed_memory
from mpiddp.world import World


def main(argv: list[str]) -> int:
    """Run one rank of the benchmark that `argv` names.

    Raises:
        UserError, SystemExit: bad input, see `mpiddp.runtime.job.coordinator`.
    """
    parser = OneSentenceParser(
        prog="mpiddp bench-rank",
        description="(internal) One rank of a benchmark; mpiddp bench starts it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--share", type=int, default=1, help="share the threads of the host among this many ranks"
    )
    parser.add_argument("name", choices=("scaling", "allreduce", "step", "loader"))
    parser.add_argument("options", type=json.loads, help="those of the benchmark")
    parser.add_argument("training", nargs=argparse.REMAINDER, help="options of mpiddp train")
    values = parser.parse_args(argv)
    world = World.from_env()
    local_ranks = max(world.local_world_size or 1, values.share)
    prepare(replace(world, local_world_size=local_ranks))
    keep_freed_memory(os.environ)
    options = import_module(f"mpiddp.bench.{values.name}").Options(**values.options)
    rank = import_module(f"mpiddp.bench.ranks.{values.name}").rank
    result = rank(world, options, values.training)
    if world.rank == 0:
        emit(result)
    return 0
