"""The options that several benchmarks share, and the parsers of their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

from mpiddp.arguments import DefaultsShown, OneSentenceParser, duration, whole
from mpiddp.bench.benchmark import Benchmark, Options
from mpiddp.errors import UserError
from mpiddp.launch.starters.environment import forwarded
from mpiddp.text import shown
from mpiddp.train.options import OF_RUN
from mpiddp.train.options import parse as parse_training

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}

# Every benchmark runs its own number of steps from a fresh start, and keeps no checkpoint.
_NOT_APPLICABLE = {f"--{name.replace('_', '-')}" for name in OF_RUN}


@dataclass(frozen=True)
class SharedOptions:
    """The hosts of a benchmark's jobs, and its output folder. `x` are exports to the ranks."""

    mpirun: str | None
    timeout: float
    out: str | None
    hostfile: str | None = None
    host_list: str | None = None
    n: int | None = None
    interface: str | None = None
    x: Sequence[str] = ()

    def launch_options(self) -> list[str]:
        """The hosts and the MPI as options of `mpiddp launch`, without the number of ranks."""
        options = ["--mpirun", self.mpirun] if self.mpirun else []
        if self.hostfile is not None:
            options += ["--hostfile", self.hostfile]
        if self.host_list is not None:
            options += ["-H", self.host_list]
        if self.interface is not None:
            options += ["--interface", self.interface]
        return options + [option for export in self.x for option in ("-x", self._hidden(export))]

    def hidden_values(self) -> dict[str, str]:
        """The variables of `x` that `launch_options` names without their values, for the environment.

        A command line shows them to every user of this machine.
        """
        pairs = (export.partition("=") for export in self.x if self._hidden(export) != export)
        return {name: value for name, _, value in pairs}

    def _hidden(self, export: str) -> str:
        """`NAME` for `NAME=VALUE`, unless the variable might change the launcher as well."""
        name = export.partition("=")[0]
        return export if forwarded({name: ""}) else name


def parse(
    prog: str, purpose: str, benchmark: Benchmark[Options], argv: list[str]
) -> tuple[SharedOptions, Options, list[str]]:
    """Parse the options of a benchmark: shared ones, its own, and those for `mpiddp train`.

    Raises:
        UserError: unknown options, or values out of range.
    """
    parser = OneSentenceParser(
        prog=prog,
        description=_description(prog, purpose, benchmark),
        epilog=f"Example: {prog} {benchmark.example}" if benchmark.example else None,
        allow_abbrev=False,
        formatter_class=DefaultsShown,
    )
    benchmark.add_options(parser)
    _add_shared(parser, benchmark)
    training: list[str] = []
    if benchmark.takes_training:
        values, training = parser.parse_known_args(argv)
        _check_training(prog, training)
    else:
        values = parser.parse_args(argv)
    return picked(SharedOptions, values), picked(benchmark.options, values), training


def parse_rank_options(
    prog: str,
    record: type[Record],
    add_options: Callable[[argparse.ArgumentParser], None],
    argv: list[str],
) -> tuple[Record, list[str]]:
    """Parse the options of a job's ranks. Returns the remaining ones for the training."""
    parser = OneSentenceParser(prog=prog, allow_abbrev=False)
    add_options(parser)
    values, training = parser.parse_known_args(argv)
    return picked(record, values), training


def picked(record: type[Record], values: object) -> Record:
    """Build the record from the attributes of `values` with the names of its fields."""
    named = vars(values)
    return record(**{each.name: named[each.name] for each in fields(record) if each.name in named})


def as_arguments(options: DataclassInstance) -> list[str]:
    """The options as command-line arguments, for the ranks of a job."""
    arguments = []
    for field in fields(options):
        name, value = f"--{field.name.replace('_', '-')}", getattr(options, field.name)
        if value is True:
            arguments.append(name)
        elif isinstance(value, (list, tuple)):
            arguments += [name, ",".join(map(str, value))]
        elif value is not None and value is not False:
            arguments += [name, str(value)]
    return arguments


def _description(prog: str, purpose: str, benchmark: Benchmark[Options]) -> str:
    name = name_of(prog)
    files = f"{name}.json" + (f" and {name}.png" if benchmark.chart else "")
    others = ""
    if benchmark.takes_training:
        others = (
            " Accepts the options of mpiddp train too, except those of its length, its checkpoints, its "
            "checks and its shards."
        )
    return f"Measure {purpose}; print a table and write {files}.{others}"


def name_of(prog: str) -> str:
    """ "scaling" of "mpiddp bench scaling", "curves" of "python -m benchmarks.curves"."""
    return re.split("[ .]", prog)[-1]


def _check_training(prog: str, training: list[str]) -> None:
    """Check the training options before the ranks start."""
    if (parallel := parse_training(training).parallel) != "ddp":
        raise UserError(
            f"--parallel {parallel} does not apply to {prog}, which measures DistributedDataParallel. "
            "Leave it out."
        )
    for argument in training:
        if argument.partition("=")[0].replace("_", "-") in _NOT_APPLICABLE:
            raise UserError(
                f"{argument} does not apply to {prog}, which runs a fixed number of steps and keeps "
                "no checkpoint. Leave it out."
            )


def _add_shared(parser: argparse.ArgumentParser, benchmark: Benchmark[Options]) -> None:
    if benchmark.takes_hosts:
        add = parser.add_argument_group(
            "where (default: the scheduler's allocation, or this machine)"
        )
        either = add.add_mutually_exclusive_group()
        either.add_argument(
            "--hostfile", metavar="FILE", help="file of hosts and slots, one host per line"
        )
        either.add_argument(
            "-H",
            dest="host_list",
            metavar="H1:2,H2:4",
            help="hosts and slots on the command line",
        )
        add.add_argument(
            "-n", type=whole(1), metavar="N", help="number of ranks (default: all slots)"
        )
        add.add_argument(
            "--interface",
            metavar="NAME",
            help="network interface for the job: a name, an address or a network",
        )
        add.add_argument(
            "-x",
            action="append",
            default=[],
            metavar="VAR[=VALUE]",
            help="pass this environment variable to the ranks (repeatable)",
        )
    add = parser.add_argument_group("how")
    add.add_argument(
        "--mpirun", metavar="PATH", help="mpirun of the MPI to use (its library is used too)"
    )
    add.add_argument(
        "--timeout",
        type=duration,
        default=600.0,
        metavar="S",
        help="time limit of one job",
    )
    add.add_argument(
        "--out", metavar="DIR", help="folder of the results (default: bench/<time>-<name>)"
    )


def add_rounds(parser: argparse.ArgumentParser, default: int, low: int = 1) -> None:
    """`--rounds`: see `mpiddp.bench.rounds`."""
    parser.add_argument(
        "--rounds",
        type=whole(low),
        default=default,
        metavar="R",
        help="rounds; each variant runs once in every round",
    )


def counts(low: int) -> Callable[[str], tuple[int, ...]]:
    """A parser for ascending lists such as 1,2,4."""

    def several(text: str) -> tuple[int, ...]:
        return tuple(sorted({whole(low)(each) for each in text.split(",")}))

    return several


def size_bytes(text: str) -> int:
    """A parser for 4096, 64K, 16M and 1G, where K is 1024 bytes. The minimum is 1K."""
    match = re.fullmatch(r"([0-9]{1,16})([KMG]?)B?", text.upper(), re.ASCII)
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1024 <= size < 1 << 50:
        raise argparse.ArgumentTypeError(
            f"expected a size of at least 1K, such as 64K, 16M or 1G, not {shown(text)!r}"
        )
    return size
