"""Run several commands in the same ranks, which saves their start-up.

    mpirun -np 4 python -m tests.jobs.turns

Rank 0 reads lines `[RANKS, FILE, COMMANDS]` of JSON from its stdin. An empty line ends the job, because
mpirun does not forward the end of its stdin. COMMANDS are argument lists, of `mpiddp train` or, after -m
MODULE, of the `main` of a module of the tests. Each command runs on the first RANKS ranks, as a new job of
that size with its own channel. Rank 0 writes exit codes and outputs into FILE.
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

from mpiddp.cli import main
from mpiddp.runtime.job.channel import JobChannel
from mpiddp.runtime.job.connect import Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import current
from mpiddp.runtime.join import join
from tests.support.channels import member, serving
from tests.support.patience import PATIENCE_S

LONGEST_WAIT_S = 2 * PATIENCE_S  # for the next line, while tests without ranks run


def serve() -> None:
    with join() as everyone:
        turn = 0
        while True:
            line = sys.stdin.readline() if everyone.world.rank == 0 else ""
            line = everyone.all_gather_json(line, timeout_s=LONGEST_WAIT_S)[0]
            if not line.strip():
                return
            ranks, file, commands = json.loads(line)
            results = []
            for command in commands:
                turn += 1
                results.append(take_turn(everyone, command, ranks, turn))
            if everyone.world.rank == 0:
                written = Path(f"{file}.part")
                written.write_text(json.dumps(results))
                written.rename(file)


def take_turn(
    everyone: Coordinator, command: list[str], ranks: int, turn: int
) -> tuple[int, str, str]:
    """The exit code and stdout of this rank, and the stderr of all ranks."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    rank = everyone.world.rank
    with serving(ranks) if rank == 0 else contextlib.nullcontext() as own:
        address = everyone.all_gather_json(own or ("", ""), timeout_s=PATIENCE_S)
        if rank < ranks:
            channel = member(Server(*address[0]), rank, ranks)
            channel.group = turn  # so that its process groups have keys of their own
            with (
                job_of(everyone, channel),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                try:
                    code = run(command)
                except SystemExit as exit:
                    code = int(exit.code or 0)
        ends = everyone.all_gather_json((code, err.getvalue()), timeout_s=PATIENCE_S)
    assert len({each for each, _ in ends[:ranks]}) == 1, ends
    return code, out.getvalue(), "".join(text for _, text in ends)


def run(command: list[str]) -> int:
    if command[0] != "-m":
        return main(["train", *command])
    importlib.import_module(command[1]).main(*command[2:])
    return 0


@contextlib.contextmanager
def job_of(everyone: Coordinator, channel: JobChannel) -> Iterator[None]:
    """Make the ranks of the channel a job of their own. All of them run on one host."""
    session, ranks = current(), channel.world_size
    world = replace(everyone.world, world_size=ranks, local_world_size=ranks)
    job = Coordinator(world, channel, hostnames=everyone.hostnames[:ranks])
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
