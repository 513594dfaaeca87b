"""Runs of `mpiddp train` under the real mpirun, for tests: start them, and read their files."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpiddp.checkpoints.state import unpacked
from mpiddp.train.config import resolve
from mpiddp.train.options import parse
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, mpirun, mpirun_command, own_lines

Command = list[str | Path]  # the options of `mpiddp train`


@dataclass(frozen=True)
class Turn:
    """The result of one of several commands on the same ranks: rank 0's stdout, the stderr of all."""

    code: int
    stdout: str
    stderr: str


def configured(*options: str, ranks: int = 1) -> Namespace:
    """The configuration of `mpiddp train OPTIONS…` on the CPUs of so many ranks."""
    return resolve(parse(list(options)), ranks, torch.device("cpu"))


def train(
    ranks: int, *options: str | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`mpirun -np RANKS python -m mpiddp train OPTIONS…`"""
    return mpirun(ranks, "-m", "mpiddp", "train", *map(str, options), cwd=cwd)


@dataclass
class Ranks:
    """Ranks of one mpirun that run one job after another, see `tests.jobs.turns`."""

    process: subprocess.Popen[str]
    stderr: Path

    def run(self, ranks: int, folder: Path, commands: list[Command]) -> list[Turn]:
        """Run the commands one after another, each as a job of this many ranks."""
        file = folder / "TURNS.json"
        file.unlink(missing_ok=True)
        texts = [[str(argument) for argument in command] for command in commands]
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([ranks, str(file), texts]) + "\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + PATIENCE_S
        while not file.exists():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline, "the ranks take too long"
            time.sleep(0.05)
        return [Turn(*turn) for turn in json.loads(file.read_text())]


def _stop_with_parent() -> None:
    """Stop the waiting ranks when pytest is killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


def waiting_ranks(ranks: int, folder: Path) -> Iterator[Ranks]:
    """This many ranks. Afterwards they must end with code 0 and without output on stderr."""
    stderr = folder / "stderr"
    with (
        stderr.open("w") as file,
        subprocess.Popen(
            mpirun_command(ranks, "-m", "tests.jobs.turns"),
            env=clean_env(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=file,
            text=True,
            preexec_fn=_stop_with_parent,
        ) as process,
    ):
        try:
            yield Ranks(process, stderr)
            process.communicate("\n", timeout=PATIENCE_S)  # the line that ends them
        finally:
            process.kill()  # nothing, if it has ended
    assert (process.returncode, own_lines(stderr.read_text())) == (0, [])


def contents(run: Path, step: int) -> dict[str, Any]:
    """All tensors of a checkpoint, by the names of its files."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    files = {
        name: torch.load(folder / f"{name}.pt")
        for name in ("model", "optimizer", "scaler", "ranks")
    }
    return {**files, "ranks": [unpacked(own) for own in files["ranks"]]}


def unequal(a: Any, b: Any, where: str = "") -> list[str]:
    """The paths at which two nested structures of tensors differ in any bit; [] if they are equal."""
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [where]
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        return [path for key in a for path in unequal(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, (list, tuple)):
        pairs = enumerate(zip(a, b, strict=True))
        return [path for i, (x, y) in pairs for path in unequal(x, y, f"{where}/{i}")]
    return [] if a == b else [where]


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded
