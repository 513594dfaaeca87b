"""Runs of `mpiddp train` under the real mpirun, for tests: start them, and hold what they left."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpiddp.train.config import TrainConfig, resolve_defaults
from mpiddp.train.options import parse
from mpiddp.world import World
from tests.ranks import mpirun, own_lines

Command = list[str | Path]  # the options of `mpiddp train`


@dataclass(frozen=True)
class Turn:
    """One command of several that the same ranks ran: stdout is rank 0's, stderr everyone's."""

    code: int
    stdout: str
    stderr: str


def configured(
    *options: str, ranks: int = 1, on_gpu: bool = False, bf16: bool = False
) -> TrainConfig:
    """The configuration that `mpiddp train OPTIONS…` would have on such machines."""
    world = World(rank=0, world_size=ranks, local_rank=0, local_world_size=ranks)
    return resolve_defaults(parse(list(options)), world, on_gpu=on_gpu, has_bf16=bf16)


def train(
    ranks: int, *options: str | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`mpirun -np RANKS python -m mpiddp train OPTIONS…`"""
    return mpirun(ranks, "-m", "mpiddp", "train", *map(str, options), cwd=cwd)


def turns(ranks: int, folder: Path, commands: list[Command]) -> list[Turn]:
    """The commands one after another in the same ranks, see `tests.jobs.turns`."""
    file = folder / "commands.json"
    file.write_text(json.dumps([[str(word) for word in command] for command in commands]))
    job = mpirun(ranks, "-m", "tests.jobs.turns", str(file))
    assert job.returncode == 0, job.stdout + job.stderr
    assert own_lines(job.stderr) == []
    return [Turn(*turn) for turn in json.loads(file.with_name("TURNS.json").read_text())]


def contents(run: Path, step: int) -> dict[str, Any]:
    """All tensors of a checkpoint, by the name of its file."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    return {name: torch.load(folder / f"{name}.pt") for name in ("model", "trainer", "ranks")}


def unequal(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two nestings of tensors differ in a bit; [] if they are the same."""
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [where]
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        return [place for key in a for place in unequal(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list):
        pairs = enumerate(zip(a, b, strict=True))
        return [place for i, (x, y) in pairs for place in unequal(x, y, f"{where}/{i}")]
    return [] if a == b else [where]


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded
