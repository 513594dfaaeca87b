"""The jobs of a benchmark: each is one command, timed from outside, with the results of its ranks.

`mpiddp launch` starts them, so the figures are those of a user's jobs.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mpiddp.bench.figures import read_results
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
class Finished:
    """A command that has ended: its start (seconds since 1970) and its lines of stdout.

    `cpu_s` counts user and system time of all its processes on this host.
    """

    started_at: float
    cpu_s: float
    lines: list[str]


@dataclass(frozen=True)
class Jobs:
    """The hosts of a benchmark's jobs: options of `mpiddp launch`, and the number of slots.

    `per_host` is the number of ranks on the fullest host. `training` are options of `mpiddp train`.
    """

    where: tuple[str, ...]
    slots: int
    per_host: int
    starter: str
    timeout_s: float
    training: tuple[str, ...] = ()

    def run(self, name: str, options: DataclassInstance, *, ranks: int) -> Any:
        """Run the benchmark as every rank of a job, and return what rank 0 sent.

        A rank has at most as many threads as in a job on all slots. Otherwise a single rank would be
        faster because it uses the whole host.

        Raises:
            BenchJobFailed: it did not succeed within `timeout_s`.
        """
        job = ("-m", "mpiddp.bench.rank", str(self.per_host), name)
        return self.run_job(*job, options=options, ranks=ranks)

    def run_job(self, *job: str, options: DataclassInstance, ranks: int) -> Any:
        """The same for any job, which takes `options` as JSON, and those of the training."""
        command = [*launch_command(*self.where), "-n", str(ranks), *job]
        command += [json.dumps(asdict(options)), *self.training]
        [found] = read_results(time_command(command, timeout_s=self.timeout_s).lines)
        return found


def launch_command(*options: str) -> list[str]:
    # A job that has exceeded its time has nothing to save. The results come from rank 0's output.
    fixed = ("--grace", "1s", "--log-ranks", "default")
    return [sys.executable, "-m", "mpiddp", "launch", *fixed, *options]


def time_command(argv: Sequence[str], *, timeout_s: float) -> Finished:
    """Run a command to its end. It does not outlive this function.

    Raises:
        BenchJobFailed: its exit code is not 0, or it did not end within `timeout_s`.
    """
    before, started_at = _cpu_s(), time.time()
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        # A Ctrl-C may come before `child` is known here.
        preexec_fn=partial(signal_at_parents_end, signal.SIGTERM),
    ) as child:
        try:
            printed, said = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchJobFailed(1, f"it did not end within {timeout_s:g} s.") from None
        finally:
            child.terminate()  # if it has not ended: after this time, or on Ctrl-C
    if child.returncode != 0:
        raise BenchJobFailed(child.returncode, said.strip())
    return Finished(started_at, _cpu_s() - before, printed.splitlines())


def _cpu_s() -> float:
    """The CPU seconds of all ended children and their descendants."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def note(sentence: str) -> None:
    print(f"mpiddp: {sentence}", file=sys.stderr, flush=True)


def progress(name: str, ranks: int, round_number: int, rounds: int, measured: str) -> None:
    note(f"{name}: {counted(ranks, 'rank')}, round {round_number} of {rounds}: {measured}")
