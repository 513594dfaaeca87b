"""Several `mpiddp train` commands one after another in the same ranks, which saves their start-up.

    mpirun -np 2 python -m tests.jobs.turns COMMANDS.json

COMMANDS.json holds a list of argument lists. Each command has its turn on all ranks, with a store of
its own as if it had just been started. What rank 0 saw of it goes to TURNS.json beside the file.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import torch.distributed as dist

from mpiddp.cli import main
from mpiddp.runtime.join import join


def take_turns(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command on this rank."""
    seen = []
    with join() as coordinator:
        store = coordinator.store
        for turn, command in enumerate(commands):
            coordinator.store = dist.PrefixStore(f"turn{turn}", store)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    code = main(["train", *command])
                except SystemExit as exit:
                    code = int(exit.code or 0)
            everyone = coordinator.all_gather_json((code, err.getvalue()), timeout_s=60)
            assert len({each for each, _ in everyone}) == 1, everyone
            seen.append((code, out.getvalue(), "".join(said for _, said in everyone)))
        coordinator.store = store
        if coordinator.world.rank == 0:
            Path(sys.argv[1]).with_name("TURNS.json").write_text(json.dumps(seen))
    return seen


if __name__ == "__main__":
    take_turns(json.loads(Path(sys.argv[1]).read_text()))
