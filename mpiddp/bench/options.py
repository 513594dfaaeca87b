"""The options that several benchmarks share, and how their values are read."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from mpiddp.arguments import DefaultsShown, OneSentenceParser, whole
from mpiddp.bench.benchmark import Benchmark
from mpiddp.train.options import parse as parse_training

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


def parse(name: str, benchmark: Benchmark, argv: list[str]) -> argparse.Namespace:
    """The options of `mpiddp bench NAME`; `training` are the words that `mpiddp train` would get.

    Raises:
        UserError: unknown options, or values out of range.
    """
    others = " All other options are those of mpiddp train." if benchmark.takes_training else ""
    parser = OneSentenceParser(
        prog=f"mpiddp bench {name}",
        description=f"Measure, print a table, write {name}.json and {name}.png.{others}",
        allow_abbrev=False,
        formatter_class=DefaultsShown,
    )
    _add_shared(parser, benchmark)
    benchmark.add_options(parser)
    if not benchmark.takes_training:
        return parser.parse_args(argv)
    options, training = parser.parse_known_args(argv)
    parse_training(training)  # the ranks would only say it later
    options.training = training
    return options


def _add_shared(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    if benchmark.takes_hosts:
        add = parser.add_argument_group("where (default: this machine, or the Slurm allocation)")
        either = add.add_mutually_exclusive_group()
        either.add_argument("--hostfile", metavar="FILE", help="hosts and their slots, one a line")
        either.add_argument(
            "-H", dest="host_list", metavar="H1:2,H2:4", help="the same, right here"
        )
        add.add_argument("-n", type=whole(1), metavar="N", help="ranks (default: all slots)")
        add.add_argument("--interface", metavar="NAME", help="the network interface to use")
        add.add_argument(
            "-x",
            action="append",
            default=[],
            metavar="VAR[=VALUE]",
            help="a variable for the ranks",
        )
    parser.add_argument("--mpirun", metavar="PATH", help="of the MPI to use, its library included")
    parser.add_argument(
        "--timeout", type=whole(1), default=600, metavar="S", help="seconds that one job may take"
    )
    parser.add_argument("--out", metavar="DIR", help="default: bench/<time>-<name>")


def add_rounds(parser: argparse.ArgumentParser, default: int, low: int = 1) -> None:
    """`--rounds`: what is compared has its turn in every round, so that all meet the same weather."""
    parser.add_argument(
        "--rounds", type=whole(low), default=default, metavar="R", help="turns of each variant"
    )


def launch_words(options: argparse.Namespace, benchmark: Benchmark) -> list[str]:
    """The options of `mpiddp launch` that say where and with which MPI, but for the number of ranks."""
    words = ["--mpirun", options.mpirun] if options.mpirun else []
    if not benchmark.takes_hosts:
        return words
    if options.hostfile is not None:
        words += ["--hostfile", options.hostfile]
    if options.host_list is not None:
        words += ["-H", options.host_list]
    if options.interface is not None:
        words += ["--interface", options.interface]
    return words + [word for export in options.x for word in ("-x", export)]


def counts(low: int) -> Callable[[str], list[int]]:
    """A parser for ascending lists such as 1,2,4."""

    def several(text: str) -> list[int]:
        return sorted({whole(low)(each) for each in text.split(",")})

    return several


def seconds(text: str) -> float:
    """A parser for times greater than 0."""
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", text, re.ASCII) or not float(text) > 0:
        raise argparse.ArgumentTypeError(f"expected seconds, such as 0.5 or 3, not {text!r}")
    return float(text)


def size_bytes(text: str) -> int:
    """A parser for 4096, 64K, 16M and 1G, where K is 1024 bytes and the least there is."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)B?", text.upper(), re.ASCII)
    if match is None or int(match[1]) * _UNITS[match[2]] < 1024:
        raise argparse.ArgumentTypeError(
            f"expected a size from 1K on, such as 64K, 16M or 1G, not {text!r}"
        )
    return int(match[1]) * _UNITS[match[2]]
