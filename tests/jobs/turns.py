"""Several commands one after another in the same ranks, which saves their start-up.

    mpirun -np 4 python -m tests.jobs.turns

Rank 0 reads lines `[RANKS, FILE, COMMANDS]` of JSON from its stdin, until an empty one, for mpirun
does not pass the end of its stdin on. COMMANDS are argument lists, of `mpiddp train` or, where they
begin with -m, of the `main` of a module of tests. Each command has its turn on the first RANKS ranks,
as a job of that size with a store of its own, as if it had just been started. What its rank 0 saw of
each goes to FILE.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from mpiddp.cli import main
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.runtime.join import join
from mpiddp.runtime.session import current
from tests.patience import PATIENCE_S

LONGEST_WAIT_S = 2 * PATIENCE_S  # for the next line, while the tests look at what there is


def serve() -> None:
    with join() as everyone:
        turn = 0
        while True:
            line = sys.stdin.readline() if everyone.world.rank == 0 else ""
            line = everyone.all_gather_json(line, timeout_s=LONGEST_WAIT_S)[0]
            if not line.strip():
                return
            ranks, file, commands = json.loads(line)
            seen = []
            for command in commands:
                turn += 1
                seen.append(take_turn(everyone, command, ranks, turn))
            if everyone.world.rank == 0:
                written = Path(f"{file}.part")
                written.write_text(json.dumps(seen))
                written.rename(file)


def take_turn(
    everyone: Coordinator, command: list[str], ranks: int, turn: int
) -> tuple[int, str, str]:
    """Exit code and stdout of this rank; stderr of all."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    takes_part = everyone.world.rank < ranks
    if takes_part:
        with (
            job_of(everyone, ranks, turn),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                code = run(command)
            except SystemExit as exit:
                code = int(exit.code or 0)
    ends = everyone.all_gather_json((code, err.getvalue()), timeout_s=PATIENCE_S)
    assert len({each for each, _ in ends[:ranks]}) == 1, ends
    return code, out.getvalue(), "".join(said for _, said in ends)


def run(command: list[str]) -> int:
    if command[0] != "-m":
        return main(["train", *command])
    importlib.import_module(command[1]).main(*command[2:])
    return 0


@contextlib.contextmanager
def job_of(everyone: Coordinator, ranks: int, turn: int) -> Iterator[None]:
    """The first ranks of this job as a job of their own; all of them run on one host."""
    session = current()
    world = replace(everyone.world, world_size=ranks, local_world_size=ranks)
    job = Coordinator(world, everyone.store)
    job.store = dist.PrefixStore(f"turn{turn}", everyone.store)
    job.hostnames = everyone.hostnames[:ranks]
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    before = {name: os.environ[name] for name in sizes}
    os.environ.update(sizes)
    session.coordinator = job
    try:
        yield
    finally:
        session.coordinator = everyone
        os.environ.update(before)


if __name__ == "__main__":
    serve()
