"""`mpiddp bench NAME`: measure one thing, print a table, and write its numbers as JSON.

    mpiddp bench scaling --hostfile hostfiles/two_nodes --arch resnet50

Each benchmark is a module of this package. Its `Options` and `table(results)` run in the launching process,
without torch, and its `rank(options, training)` in every rank. Its jobs are those of its `measure(options,
jobs)`, else one job on all slots.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.arguments import OneSentenceParser, as_arguments, duration, examples
from mpiddp.bench.jobs import BenchJobFailed, Jobs, note
from mpiddp.bench.machine import machine
from mpiddp.errors import BAD_INPUT, DONE, FAILED, UserError, named_by
from mpiddp.hosts.where import add_file, settle
from mpiddp.launch.options import add_help, parse_options
from mpiddp.launch.options import add_options as add_launch_options
from mpiddp.launch.plan import make_plan
from mpiddp.launch.variables import without_values
from mpiddp.text import as_json, counted
from mpiddp.train.config import OF_RUN
from mpiddp.train.config import parse as parse_training


class Row(NamedTuple):
    """A benchmark. With `takes_training` it accepts the options of `mpiddp train` too."""

    purpose: str
    takes_hosts: bool = True  # otherwise its jobs run on this machine
    takes_training: bool = False
    least_ranks: int = 1


_NOT_APPLICABLE = {
    f"--{name}".replace("_", "-") for name in (*OF_RUN, "out", "log_every", "parallel")
}
BENCHMARKS = {
    "scaling": Row("images/s and efficiency by number of ranks", takes_training=True),
    "allreduce": Row("the bandwidth of gloo's and NCCL's all-reduce by size", least_ranks=2),
    "start": Row("the time from the command to the first all-reduce, beside torchrun", False),
    "restart": Row(
        "the time from the kill of a rank to the first all-reduce after it", least_ranks=2
    ),
    "step": Row(
        "the loop of mpiddp train beside a bare loop, and the phases of a step", takes_training=True
    ),
    "loader": Row("the images/s of a data source, beside those of the model", takes_training=True),
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
        known = ", ".join(BENCHMARKS)
        raise UserError(f'mpiddp bench: unknown benchmark "{name}". Expected one of: {known}.')
    module = import_module(f"mpiddp.bench.{name}")
    return run_benchmark(f"mpiddp bench {name}", name, BENCHMARKS[name], module, rest)


def run_benchmark(prog: str, name: str, row: Row, module: Any, argv: list[str]) -> int:
    """Measure, print and write; return 0, or the exit code of a failed job: 1 or 2.

    Args:
        module: has `Options` and `table`, and `measure` or `rank`.

    Raises:
        UserError: bad input, found before the first measurement.
        JobFailed: a disk has failed or is full.
    """
    started = time.localtime()
    parser, where = _parser(prog, name, row, module)
    values, training = parser.parse_known_args(argv)
    if row.takes_training:
        _check_training(prog, training)  # before the ranks start
    elif training:
        parser.error(f"unrecognized arguments: {' '.join(training)}")
    elif row.takes_hosts:
        settle(values)
    own = {each.name: getattr(values, each.name) for each in fields(module.Options)}
    options = module.Options(**own)
    out = Path(values.out or f"bench/{time.strftime('%Y%m%d-%H%M%S', started)}-{name}")
    jobs = _jobs(values, where, training)
    if jobs.slots < row.least_ranks:
        least = counted(row.least_ranks, "rank")
        raise UserError(f"{prog} needs at least {least}. Example: -H localhost:{row.least_ranks}")
    measure = getattr(module, "measure", partial(_on_all_slots, name))

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the job as on Ctrl-C
    file = out / f"{name}.json"
    with named_by("--out"):  # now: a measurement may take hours
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    try:
        results = measure(options, jobs)
    except BenchJobFailed as failure:
        print(failure, file=sys.stderr)
        note(f"bench {name} stopped: a job failed with exit code {failure.code}.")
        return BAD_INPUT if failure.code == BAD_INPUT else FAILED
    print(module.table(results))
    exports = getattr(values, "exports", [])  # of -x, whose values are not recorded
    record = {
        "benchmark": name,
        "command": shlex.join([*prog.split(), *without_values(argv, exports)]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", started),
        "environment": {"mpi": jobs.starter, **machine()},
        "options": {**asdict(options), "training": training},
        "results": results,
    }
    with named_by("--out"):
        file.write_text(as_json("bench", record) + "\n", encoding="utf-8")
    print(f"\n{file}")
    return DONE


def _on_all_slots(name: str, options: Any, jobs: Jobs) -> Any:
    note(f"{name}: {counted(jobs.slots, 'rank')}")
    return jobs.run(name, options, ranks=jobs.slots)


def _check_training(prog: str, training: list[str]) -> None:
    """Raise UserError for options of the training that are wrong, or mean nothing to a benchmark."""
    parse_training(training)
    for argument in training:
        if argument.partition("=")[0].replace("_", "-") in _NOT_APPLICABLE:
            raise UserError(
                f"{argument} does not apply to {prog}, which runs a fixed number of steps of "
                "DistributedDataParallel and keeps no checkpoint. Leave it out."
            )


def _parser(
    prog: str, name: str, row: Row, module: Any
) -> tuple[OneSentenceParser, Sequence[argparse.Action]]:
    """The parser, and its options that are `mpiddp launch`'s."""
    training = " Takes the options of mpiddp train too." if row.takes_training else ""
    parser = OneSentenceParser(
        prog=prog,
        description=f"Measure {row.purpose}; print a table and write {name}.json.{training}",
        allow_abbrev=False,
        conflict_handler="resolve",  # --timeout is the job's here
        add_help=False,
        usage=f"%(prog)s [options]{'' if row.takes_training else ' [FILE]'}",
    )
    add_help(parser)
    where = add_launch_options(parser, "where", "how") if row.takes_hosts else []
    if row.takes_hosts and not row.takes_training:  # whose words may be values of its options
        add_file(parser)
    group = parser.add_argument_group("the benchmark")
    for each in fields(module.Options):
        keywords = dict(each.metadata)
        if "default" in keywords:
            keywords["help"] += f" (default: {keywords['default']})"
        group.add_argument(f"--{each.name.replace('_', '-')}", **keywords)
    limit = "time limit of one job (default: 600)"
    group.add_argument("--timeout", type=duration, default=600.0, metavar="S", help=limit)
    out = "folder of the results (default: bench/<time>-<name>)"
    group.add_argument("--out", metavar="DIR", help=out)
    return parser, [each for each in where if each.option_strings]  # without a --timeout


def _jobs(
    values: argparse.Namespace, where: Sequence[argparse.Action], training: list[str]
) -> Jobs:
    """Check the hosts once, as a launch does, so that their faults end the benchmark at once."""
    options = as_arguments(where, values) if where else ["-H", "localhost:1"]
    plan = make_plan(parse_options([*options, "-m", "mpiddp.bench.rank"]), os.environ)
    hosts = plan.request.hosts
    return Jobs(
        # Without -n: each job has its own.
        tuple(as_arguments([each for each in where if each.dest != "n"], values)),
        hosts.world_size,
        max(host.ranks for host in hosts.hosts),
        plan.starter.name,
        values.timeout,
        tuple(training),
    )
