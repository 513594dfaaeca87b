"""The jobs of a benchmark: each is one command, timed from outside, with the results of its ranks.

`mpiddp launch` starts them, so the figures are those of a user's jobs.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mpiddp.bench.result_lines import Result, read_results
from mpiddp.protocol.variables import PREFIX
from mpiddp.text import counted

OnLine = Callable[[int, str], None]  # gets the command's process id and a line of its stdout


class BenchJobFailed(Exception):
    """A job failed. `code` is its exit code, and the text is its stderr or the reason."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Finished:
    """A command that has ended: its start (seconds since 1970), its duration and its lines of stdout.

    `cpu_s` counts user and system time of all its processes on this host.
    """

    started_at: float
    wall_s: float
    cpu_s: float
    lines: list[str]

    @property
    def results(self) -> list[Result]:
        """The results that its ranks sent with `mpiddp.bench.result_lines.emit`."""
        return read_results(self.lines)


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

    def run(self, name: str, *arguments: str, ranks: int) -> Finished:
        """Run `mpiddp bench-rank NAME ARGUMENTS TRAINING…` as every rank of a job over the hosts.

        A rank has as many threads as in a job on all slots. Otherwise a single rank would be faster
        because it uses the whole host.

        Raises:
            BenchJobFailed: it did not succeed within `timeout_s`.
        """
        job = ["-m", "mpiddp", "bench-rank", "--share", str(self.per_host), name]
        return self.run_job(*job, *arguments, *self.training, ranks=ranks)

    def run_job(self, *job: str, ranks: int) -> Finished:
        """Run a job (`-m`, a module, or a script, and its arguments) over the hosts given.

        Raises:
            BenchJobFailed: it did not succeed within `timeout_s`.
        """
        command = [*launch_command(*self.where), "-n", str(ranks), *job]
        return run(command, timeout_s=self.timeout_s)

    def run_here(self, ranks: int, *job: str) -> Finished:
        """Run a job on this machine alone.

        Raises:
            BenchJobFailed: it did not succeed within `timeout_s`.
        """
        return run(self.command_here(ranks, *job), timeout_s=self.timeout_s)

    def command_here(self, ranks: int, *job: str) -> list[str]:
        timeout_s = f"{self.timeout_s:.0f}"
        where = [*self.where, "-H", f"localhost:{ranks}", "--timeout", timeout_s]
        return [*launch_command(*where), *job]


def launch_command(*options: str) -> list[str]:
    # A job that has exceeded its time has nothing to save. Every rank sends its results over stdout.
    fixed = ("--grace", "1s", "--log-ranks", "all")
    return [sys.executable, "-m", "mpiddp", "launch", *fixed, *options]


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    on_line: OnLine | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run a command to its end, in this process's environment and directory unless others are given.

    Raises:
        BenchJobFailed: its exit code is not 0, or it did not end within `timeout_s`.
    """
    before, started_at = _cpu_s(), time.time()
    lines: list[str] = []
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        _child(argv, errors.fileno(), env, cwd) as child,
        _alarm(timeout_s, child) as timed_out,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip("\n"))
            if on_line is not None:
                on_line(child.pid, line)
        code = child.wait()
        wall_s = time.time() - started_at
        errors.seek(0)
        text = errors.read().strip()
    if timed_out.is_set():
        raise BenchJobFailed(1, f"it did not end within {timeout_s:g} s.")
    if code != 0:
        raise BenchJobFailed(code, text)
    return Finished(started_at, wall_s, _cpu_s() - before, lines)


@contextmanager
def _alarm(seconds: float, child: subprocess.Popen[str]) -> Iterator[threading.Event]:
    """Terminate the child if the body takes longer, and set the event in that case."""
    timed_out = threading.Event()

    def terminate() -> None:
        timed_out.set()  # before the child ends, so that the reader of its end finds the cause
        child.terminate()

    alarm = threading.Timer(seconds, terminate)
    alarm.start()
    try:
        yield timed_out
    finally:
        alarm.cancel()


@contextmanager
def _child(
    argv: Sequence[str], stderr: int, env: Mapping[str, str] | None, cwd: Path | None
) -> Iterator[subprocess.Popen[str]]:
    """Run the command as a child that does not outlive the body."""
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        env={**(os.environ if env is None else env), PREFIX: "never"},
        cwd=cwd,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.wait()
        assert child.stdout is not None
        child.stdout.close()


def _cpu_s() -> float:
    """The CPU seconds of all ended children and their descendants."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def note(sentence: str) -> None:
    print(f"mpiddp: {sentence}", file=sys.stderr, flush=True)


def progress(name: str, ranks: int, round_number: int, rounds: int, measured: str) -> None:
    note(f"{name}: {counted(ranks, 'rank')}, round {round_number} of {rounds}: {measured}")
