"""The jobs of a benchmark. `mpiddp launch` starts them, so they are as fast as a user's own jobs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from mpiddp.bench.figures import read_results
from mpiddp.errors import DONE, print_error
from mpiddp.hosts.processes import signal_at_parents_end
from mpiddp.text import counted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class BenchJobFailed(Exception):
    """A job failed. `code` is its exit code, and the text is its stderr or the reason."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Jobs:
    """The jobs of a benchmark.

    where: the options of `mpiddp launch` that choose the hosts. slots: the number of ranks on these hosts.
    per_host: the ranks of the fullest host. starter: the MPI. timeout_s: the limit of one job.
    out: the folder of the results. arguments: the script and its arguments, or the arguments that the ranks
    of a benchmark take besides its options.
    """

    where: tuple[str, ...]
    slots: int
    per_host: int
    starter: str
    timeout_s: float
    out: Path
    arguments: tuple[str, ...] = ()

    def run_job(self, *job: str, options: DataclassInstance, ranks: int) -> Any:
        """Run a job that takes `options` as JSON, and return the result that its rank 0 has sent.

        Raises:
            BenchJobFailed: it did not succeed within `timeout_s`.
        """
        command = [*self.command(ranks), *job, json.dumps(asdict(options)), *self.arguments]
        [result] = read_results(output_of(command, timeout_s=self.timeout_s))
        return result

    def command(self, ranks: int) -> list[str]:
        """The beginning of the command of a job on so many ranks."""
        # A rank has as many threads as in a job on all slots, or else a rank that has its host alone would be
        # faster.
        share = max(1, (os.cpu_count() or 1) // self.per_host)
        threads = os.environ.get("OMP_NUM_THREADS") or share
        command = launch_command("-x", f"OMP_NUM_THREADS={threads}", *self.where)
        return [*command, "-n", str(ranks)]


def launch_command(*options: str) -> list[str]:
    # A job whose time is over has nothing to save. The results come from rank 0's output.
    fixed = ("--grace", "1s", "--log-ranks", "default")
    return [sys.executable, "-m", "mpiddp", "launch", *fixed, *options]


def output_of(argv: Sequence[str], *, timeout_s: float) -> list[str]:
    """Run a command to its end, and return the lines of its stdout.

    Raises:
        BenchJobFailed: its exit code is not 0, or it did not end within `timeout_s`.
    """
    with started(argv, subprocess.PIPE) as (child, stderr):
        try:
            printed, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchJobFailed(1, f"mpiddp: a job did not end within {timeout_s:g} s.") from None
        if child.returncode != DONE:
            raise BenchJobFailed(child.returncode, text_of(stderr))
    return str(printed).splitlines()


@contextlib.contextmanager
def started(argv: Sequence[str], stdout: int) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start a command, and stop it at the end, also on Ctrl-C. Yield it, and the file of its stderr."""
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
        subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            encoding="utf-8",
            errors="replace",
            # The child ends with this process, even if a Ctrl-C comes before its number is known.
            preexec_fn=partial(signal_at_parents_end, signal.SIGTERM),
        ) as child,
    ):
        try:
            yield child, stderr
        finally:
            child.terminate()


def text_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()


def progress(name: str, ranks: int, round_number: int, rounds: int, measured: str) -> None:
    print_error(f"{name}: {counted(ranks, 'rank')}, round {round_number} of {rounds}: {measured}")
