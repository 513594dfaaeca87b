"""The parser of `mpiddp launch`: everything before the script; all behind it is the script's own."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import UserError


def option_parser() -> argparse.ArgumentParser:
    """The parser. `module` and `script` get the job's command line, one of them None or empty."""
    parser = OneSentenceParser(
        prog="mpiddp launch",
        usage="%(prog)s [options] (SCRIPT | -m MODULE) [ARGS ...]",
        description="Start a script on every slot of a hostfile, with one mpirun.",
        epilog="Exit codes: 0 done, 1 the job failed, 2 bad input, 75 stopped on request after a "
        "checkpoint, 130 interrupted.",
        allow_abbrev=False,
    )
    for add_group in (_add_where, _add_how, _add_failures, _add_ends, _add_output):
        add_group(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_where(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("where (default: this machine, or the Slurm allocation)")
    either = add.add_mutually_exclusive_group()
    either.add_argument("--hostfile", metavar="FILE", help="hosts and their slots, one a line")
    either.add_argument("-H", dest="host_list", metavar="H1:2,H2:4", help="the same, right here")
    add.add_argument("-n", type=_whole("-n", 1), metavar="N", help="ranks (default: all slots)")
    add.add_argument(
        "--npernode", type=_whole("--npernode", 1), metavar="K", help="ranks on each host"
    )
    add.add_argument("--exclude", metavar="HOST,HOST", help="hosts to leave out")
    add.add_argument(
        "--share-gpus", action="store_true", help="more ranks than GPUs on a host, as gloo allows"
    )
    add.add_argument(
        "--bind", choices=("none", "numa", "core"), default="none", help="what a rank is bound to"
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how")
    add.add_argument("--mpirun", metavar="PATH", help="of the MPI to use, its library included")
    add.add_argument("--master-addr", metavar="ADDR", help="where the ranks meet")
    add.add_argument("--interface", metavar="NAME", help="the network interface to use")
    add.add_argument(
        "-x",
        dest="exports",
        action="append",
        default=[],
        metavar="VAR[=VALUE]",
        help="a variable for the ranks",
    )
    add.add_argument(
        "--no-check", dest="check", action="store_false", help="start without a look at the hosts"
    )
    add.add_argument(
        "--timeout",
        dest="timeout_s",
        type=_whole("--timeout", 1),
        metavar="S",
        help="seconds the ranks have to meet",
    )


def _add_failures(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("when something fails")
    add.add_argument(
        "--max-restarts",
        type=_whole("--max-restarts", 0),
        default=0,
        metavar="K",
        help="start a job that failed again, from its newest checkpoint (default 0 times)",
    )
    add.add_argument(
        "--min-hosts",
        type=_whole("--min-hosts", 1),
        metavar="H",
        help="go without hosts that are broken, as long as so many are left",
    )
    add.add_argument(
        "--min-ranks",
        type=_whole("--min-ranks", 1),
        metavar="N",
        help="the same, as long as so many ranks are left",
    )


def _add_ends(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("when to end")
    add.add_argument(
        "--stop-after",
        dest="stop_after_s",
        type=duration("--stop-after"),
        metavar="55m",
        help="then stop as after a Ctrl-C: save, leave with code 75",
    )
    add.add_argument(
        "--grace",
        dest="grace_s",
        type=duration("--grace"),
        default=30.0,
        metavar="S",
        help="how long the ranks may take to stop (default 30)",
    )
    add.add_argument(
        "--hang-timeout",
        dest="hang_timeout_s",
        type=duration("--hang-timeout"),
        metavar="S",
        help="end the job when no rank makes a step for so long (default: never)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to show")
    add.add_argument("--dry-run", action="store_true", help="explain the command, start nothing")
    add.add_argument("--report", action="store_true", help="print which ranks run where")
    add.add_argument("-v", "--verbose", action="store_true", help="say what was chosen, and why")


def duration(option: str) -> Callable[[str], float]:
    """Reads "90", "90s", "55m" and "1.5h", and returns seconds."""

    def parse(text: str) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
        seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
        if not seconds > 0:
            raise UserError(f"{option} {text}: expected a time, as in 90, 90s, 55m or 1.5h.")
        return seconds

    return parse


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def _whole(option: str, low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # Open MPI 5 takes `-n abc` and `-n 0`, and launches something all the same.
        if not (text.isascii() and text.isdigit() and int(text) >= low):
            raise UserError(f"{option} {text}: expected a whole number, {low} or more.")
        return int(text)

    return parse
