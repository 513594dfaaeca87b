"""Several `mpiddp train` commands one after another in the same ranks, which saves their start-up.

    mpirun -np 2 python -m tests.jobs.turns COMMANDS.json

COMMANDS.json holds a list of argument lists. Each command has its turn on all ranks, with a store of
its own as if it had just been started. Its exit code goes to CODES.json beside the file, and a line
"turn N" on rank 0's stdout and stderr stands before all that it prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from mpiddp.cli import main
from mpiddp.group import assemble


def run(commands: list[list[str]]) -> list[int]:
    codes = []
    with assemble() as crew:
        store = crew.store
        for turn, command in enumerate(commands):
            crew.store = dist.PrefixStore(f"turn{turn}", store)
            if crew.world.rank == 0:
                print(f"turn {turn}", flush=True)
                print(f"turn {turn}", file=sys.stderr, flush=True)
            crew.exchange("ready", timeout_s=60)
            try:
                codes.append(main(["train", *command]))
            except SystemExit as exit:
                codes.append(int(exit.code or 0))
            crew.exchange("done", timeout_s=60)
        crew.store = store
        if crew.world.rank == 0:
            Path(sys.argv[1]).with_name("CODES.json").write_text(json.dumps(codes))
    return codes


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
