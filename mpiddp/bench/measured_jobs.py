"""The parts that benchmarks share: options, jobs, results, and tables.

`mpiddp launch` starts the jobs, so they are as fast as a user's own jobs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mpiddp.arguments import OURS, OneSentenceParser, Option, as_arguments, duration
from mpiddp.errors import BAD_INPUT, DONE, FAILED, UserError, named_by, print_error
from mpiddp.hosts.facts import package_version
from mpiddp.hosts.gpus import read_gpus
from mpiddp.hosts.processes import child_process
from mpiddp.launch.plan.environment import without_values
from mpiddp.launch.plan.job_plan import make_plan
from mpiddp.launch.plan.options import LaunchOptions, add_options, parse_options
from mpiddp.text import align_columns, as_json, counted

Result = dict[str, Any]  # JSON

_MARK = "mpiddp-bench: "


class BenchJobFailed(Exception):
    """A job failed. `code` is its exit code, and the text is its stderr or the reason."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def new_parser(
    prog: str, purpose: str, options: Iterable[Option]
) -> tuple[OneSentenceParser, list[argparse.Action]]:
    """A parser with these options of a benchmark, and its options that are `mpiddp launch`'s."""
    parser = OneSentenceParser(
        prog=prog,
        description=f"Measure {purpose}; print a table and write {_name(prog)}.json.",
        conflict_handler="resolve",  # --timeout limits a job here
        record=LaunchOptions,
    )
    where = add_options(parser, "where", "how")
    group = parser.add_argument_group("the benchmark")
    limit, out = (
        "time limit of one job (default: 10m)",
        "folder of the results (default: bench/<time>-<name>)",
    )
    for option in (
        *options,
        Option("--timeout", value="TIME", parse=duration, default=600.0, help=limit),
        Option("--out", value="DIR", help=out),
    ):
        option.add_to(group)
    return parser, [action for action in where if action.option_strings]  # without a --timeout


def values_of(options: Iterable[Option], values: argparse.Namespace) -> dict[str, Any]:
    """The values of these options, by their names."""
    names = [option.names[0].removeprefix("--").replace("-", "_") for option in options]
    return {name: getattr(values, name) for name in names}


def _name(prog: str) -> str:
    return re.split(r"[ .]", prog)[-1]


class Jobs:
    """The jobs of a benchmark."""

    def __init__(
        self,
        prog: str,
        argv: Sequence[str],
        values: argparse.Namespace,
        where: Sequence[argparse.Action],
        job: Sequence[str],
        least_ranks: int = 1,
    ) -> None:
        """Check the hosts once, as a launch does, so that their faults end the benchmark at once."""
        plan = make_plan(parse_options([*as_arguments(where, values), *job], prog), os.environ)
        hosts = plan.request.hosts
        if hosts.world_size < least_ranks:
            least = counted(least_ranks, "rank")
            raise UserError(
                f"{prog}: it needs at least {least}.", fix=f"-H localhost:{least_ranks}"
            )
        self._name, self._mpi = _name(prog), plan.starter.name
        # Without the values of -x, which may be secrets.
        self._command_line = shlex.join([*prog.split(), *without_values(argv, values.exports)])
        # The options of `mpiddp launch` that choose the hosts, without -n: each job has its own.
        self.where = as_arguments([action for action in where if action.dest != "n"], values)
        self.slots = hosts.world_size
        self.per_host = max(host.ranks for host in hosts.hosts)  # ranks of the fullest host
        self.timeout_s: float = values.timeout  # of one job
        self.out = Path(values.out or f"bench/{time.strftime('%Y%m%d-%H%M%S')}-{self._name}")

    def command(self, ranks: int) -> list[str]:
        """The beginning of the command of a job on so many ranks."""
        # A rank has as many threads as in a job on all slots, or one that has its host alone would be faster.
        share = max(1, (os.cpu_count() or 1) // self.per_host)
        threads = os.environ.get("OMP_NUM_THREADS") or share
        command = launch_command("-x", f"OMP_NUM_THREADS={threads}", *self.where)
        return [*command, "-n", str(ranks)]

    def run(self, *job: str) -> Any:
        """The result that rank 0 of a job on all slots has sent. Raises BenchJobFailed, as `output_of`."""
        [result] = read_results(
            output_of([*self.command(self.slots), *job], timeout_s=self.timeout_s)
        )
        return result

    def report(
        self, options: Mapping[str, Any], measure: Callable[[], Any], table: Callable[[Any], str]
    ) -> int:
        """Measure, print and write; return 0, or the exit code of a failed job: 1 or 2.

        Raises UserError, before the first measurement, if --out cannot be used, and JobFailed for a bad disk.
        """
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the job as on Ctrl-C
        with named_by("--out"):  # checked first, because a measurement may take hours
            self.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.out).close()
        try:
            results = measure()
        except BenchJobFailed as failure:
            print(failure, file=sys.stderr)
            print_error(f"bench {self._name} stopped: a job failed with exit code {failure.code}.")
            return BAD_INPUT if failure.code == BAD_INPUT else FAILED
        print(table(results))
        record = {
            "benchmark": self._name,
            "command": self._command_line,
            "started": started,
            "environment": {"mpi": self._mpi, **machine()},
            "options": options,
            "results": results,
        }
        file = self.out / f"{self._name}.json"
        with named_by("--out"):
            file.write_text(as_json("bench", record) + "\n", encoding="utf-8")
        print(f"\n{file}")
        return DONE


def launch_command(*options: str) -> list[str]:
    # A job whose time is over has nothing to save. The results come from rank 0's output.
    fixed = ("--grace", "1s", "--log-ranks", "default")
    return [sys.executable, *OURS, "launch", *fixed, *options]


def output_of(argv: Sequence[str], *, timeout_s: float) -> list[str]:
    """The lines that a command prints. Raises BenchJobFailed if it failed, or did not end in `timeout_s`."""
    with started(argv, subprocess.PIPE) as child:
        try:
            printed, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchJobFailed(1, f"mpiddp: a job did not end within {timeout_s:g} s.") from None
    return str(printed).splitlines()


@contextlib.contextmanager
def started(argv: Sequence[str], stdout: int) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and stop it at the end, also on Ctrl-C. Raises BenchJobFailed if it failed before."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
        child_process(argv, stdout, stderr) as child,
    ):
        yield child
        if child.poll() not in (None, DONE):
            stderr.seek(0)
            raise BenchJobFailed(child.returncode, stderr.read().strip())


def emit(result: Mapping[str, Any]) -> None:
    """Send a rank's result: mpirun forwards stdout from every host, so no shared file system is needed."""
    print(_MARK + json.dumps(result), flush=True)


def read_results(lines: Iterable[str]) -> list[Result]:
    """The results among the lines of a job's stdout."""
    marked = (line.partition(_MARK) for line in lines)
    return [json.loads(text) for _, mark, text in marked if mark]


def spread(values: Sequence[float], form: str) -> str:
    """The median, the lowest and the highest of several measurements: "1.05 (0.98 to 1.11)"."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table with the first column aligned left and the others right."""
    return align_columns([head, *rows], right=range(1, len(head)))


def machine() -> Result:
    """This host, on which a figure is measured. It needs only the standard library."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "host": socket.gethostname(),
        "cpu": model[1] if model else platform.machine(),  # ARM has no such line
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 1024**3, 1),
        "gpus": [gpu.name for gpu in read_gpus() or ()],
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "mpi4py": package_version("mpi4py"),
    }
