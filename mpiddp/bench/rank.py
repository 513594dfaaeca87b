"""`mpiddp bench-rank NAME OPTIONS TRAINING…`: one rank of a job that `mpiddp bench` has started.

OPTIONS are those of the benchmark as JSON. Rank 0 sends the results.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module

import torch

from mpiddp.arguments import OneSentenceParser
from mpiddp.bench.figures import emit
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
    share = max(1, (os.cpu_count() or 1) // values.share)
    torch.set_num_threads(min(torch.get_num_threads(), share))
    keep_freed_memory(os.environ)
    module = import_module(f"mpiddp.bench.{values.name}")
    result = module.rank(world, module.Options(**values.options), values.training)
    if world.rank == 0:
        emit(result)
    return 0
