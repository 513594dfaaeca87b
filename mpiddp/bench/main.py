"""`mpiddp bench NAME`: measure one thing, print a table, and write its numbers as JSON.

    mpiddp bench allreduce --hostfile hostfiles/two_nodes

Each benchmark is a module with `Options`, `measure(options, jobs)` and `table(results)`. They run in the
launching process, without torch, and start jobs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.arguments import OneSentenceParser, as_arguments, duration, examples
from mpiddp.bench.machine import machine
from mpiddp.bench.measured_jobs import BenchJobFailed, Jobs
from mpiddp.errors import BAD_INPUT, DONE, FAILED, UserError, named_by, print_error
from mpiddp.hosts.where import add_file, settle
from mpiddp.launch.plan.environment import without_values
from mpiddp.launch.plan.job_plan import make_plan
from mpiddp.launch.plan.options import add_help, parse_options
from mpiddp.launch.plan.options import add_options as add_launch_options
from mpiddp.text import as_json, counted


class Row(NamedTuple):
    """A benchmark.

    takes_hosts: it has the options of `mpiddp launch` that choose hosts. Otherwise it runs on this machine.
    takes_script: it measures a script, which ends the command line. check: if there is this function, further
    arguments are for the ranks, and it raises UserError if they are wrong.
    """

    purpose: str
    takes_hosts: bool = True
    takes_script: bool = False
    least_ranks: int = 1
    check: Callable[[str, list[str]], None] | None = None


BENCHMARKS = {
    "scaling": Row("the steps/s of a script by its number of ranks", takes_script=True),
    "allreduce": Row("the bandwidth of gloo's and NCCL's all-reduce by size", least_ranks=2),
}


def main(argv: list[str]) -> int:
    """Run the benchmark that `argv` names; return 0, or the exit code of a failed job: 1 or 2.

    Raises:
        UserError: bad input, found before the first measurement.
    """
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:<12}{row.purpose}" for name, row in BENCHMARKS.items())
        usage = f"usage: mpiddp bench NAME [options]\n\n{examples('mpiddp bench')}"
        print(f"{usage}\n\n{lines}\n\nSee: mpiddp bench NAME --help")
        return DONE
    name, *rest = argv
    if name not in BENCHMARKS:
        names = ", ".join(BENCHMARKS)
        raise UserError(f'mpiddp bench: unknown benchmark "{name}". Expected one of: {names}.')
    module = import_module(f"mpiddp.bench.{name}")
    return run_benchmark(f"mpiddp bench {name}", name, BENCHMARKS[name], module, rest)


def run_benchmark(prog: str, name: str, row: Row, module: Any, argv: list[str]) -> int:
    """Measure, print and write; return 0, or the exit code of a failed job: 1 or 2.

    Args:
        module: has `Options`, `measure` and `table`.

    Raises:
        UserError: bad input, found before the first measurement.
        JobFailed: a disk has failed or is full.
    """
    started = time.localtime()
    parser, where = _parser(prog, name, row, module)
    values, more = parser.parse_known_args(argv)
    if row.check:
        row.check(prog, more)  # before the ranks start
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if row.takes_script:
        more = [*(["-m", *values.module] if values.module else ()), *values.script]
    elif row.takes_hosts:
        settle(values)
    names = [field.name for field in fields(module.Options)]
    options = module.Options(**{name: getattr(values, name) for name in names})
    out = Path(values.out or f"bench/{time.strftime('%Y%m%d-%H%M%S', started)}-{name}")
    jobs = _jobs(prog, row, values, where, more, out)
    if jobs.slots < row.least_ranks:
        least = counted(row.least_ranks, "rank")
        raise UserError(
            f"{prog}: it needs at least {least}. Example: -H localhost:{row.least_ranks}"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the job as on Ctrl-C
    file = out / f"{name}.json"
    with named_by("--out"):  # checked first, because a measurement may take hours
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    try:
        results = module.measure(options, jobs)
    except BenchJobFailed as failure:
        print(failure, file=sys.stderr)
        print_error(f"bench {name} stopped: a job failed with exit code {failure.code}.")
        return BAD_INPUT if failure.code == BAD_INPUT else FAILED
    print(module.table(results))
    exports = getattr(values, "exports", [])  # the values of -x may be secrets
    record = {
        "benchmark": name,
        "command": shlex.join([*prog.split(), *without_values(argv, exports)]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", started),
        "environment": {"mpi": jobs.starter, **machine()},
        "options": {**asdict(options), "arguments": more},
        "results": results,
    }
    with named_by("--out"):
        file.write_text(as_json("bench", record) + "\n", encoding="utf-8")
    print(f"\n{file}")
    return DONE


def _parser(
    prog: str, name: str, row: Row, module: Any
) -> tuple[OneSentenceParser, Sequence[argparse.Action]]:
    """The parser, and its options that are `mpiddp launch`'s."""
    parser = OneSentenceParser(
        prog=prog,
        usage=f"%(prog)s [options] {'(SCRIPT | -m MODULE) [ARGS ...]' if row.takes_script else '[FILE]'}",
        description=f"Measure {row.purpose}; print a table and write {name}.json.",
        allow_abbrev=False,
        conflict_handler="resolve",  # --timeout limits a job here
        add_help=False,
    )
    add_help(parser)
    where = add_launch_options(parser, "where", "how") if row.takes_hosts else []
    if row.takes_hosts and not row.takes_script:
        add_file(parser)
    group = parser.add_argument_group("the benchmark")
    for field in fields(module.Options):
        keywords = dict(field.metadata)
        if "default" in keywords:
            keywords["help"] += f" (default: {keywords['default']})"
        group.add_argument(f"--{field.name.replace('_', '-')}", **keywords)
    limit = "time limit of one job (default: 600)"
    group.add_argument("--timeout", type=duration, default=600.0, metavar="S", help=limit)
    out = "folder of the results (default: bench/<time>-<name>)"
    group.add_argument("--out", metavar="DIR", help=out)
    if row.takes_script:
        parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser, [action for action in where if action.option_strings]  # without a --timeout


def _jobs(
    prog: str,
    row: Row,
    values: argparse.Namespace,
    where: Sequence[argparse.Action],
    arguments: list[str],
    out: Path,
) -> Jobs:
    """Check the hosts once, as a launch does, so that their faults end the benchmark at once."""
    options = as_arguments(where, values) if where else ["-H", "localhost:1"]
    job = arguments if row.takes_script else ["-m", "mpiddp.bench.allreduce"]
    plan = make_plan(parse_options([*options, *job], prog), os.environ)
    hosts = plan.request.hosts
    return Jobs(
        # Without -n: each job has its own.
        tuple(as_arguments([action for action in where if action.dest != "n"], values)),
        hosts.world_size,
        max(host.ranks for host in hosts.hosts),
        plan.starter.name,
        values.timeout,
        out,
        tuple(arguments),
    )
