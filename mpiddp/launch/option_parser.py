"""The parser of `mpiddp launch`. It reads the options before the script; those after it are the script's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from mpiddp.arguments import OneSentenceParser, duration, whole
from mpiddp.errors import UserError
from mpiddp.protocol.messages import DEFAULT_RANKS
from mpiddp.protocol.variables import LOG_RANKS, PREFIX
from mpiddp.text import parse_whole, shown


def option_parser() -> argparse.ArgumentParser:
    """The parser, for `parse_values`."""
    parser = OneSentenceParser(
        prog="mpiddp launch",
        usage="%(prog)s [options] (SCRIPT | -m MODULE | -- COMMAND) [ARGS ...]",
        description="Start a script, or any command, on every slot of a hostfile, with one mpirun.",
        epilog="Exit codes: 0 done, 1 the job failed, 2 bad input, 75 stopped on request, 130 "
        "interrupted.",
        allow_abbrev=False,
    )
    for add_group in (add_where, add_how, _add_failures, _add_ends, _add_output):
        add_group(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse_values(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The options. `module` or `script` holds the job's command line; the other is None or empty."""
    values = parser.parse_args(argv)
    if values.module is not None:  # argparse gives no option a "--", nor what follows it
        values.module, values.script = [*values.module, *values.script], []
    return values


def add_where(parser: argparse.ArgumentParser) -> None:
    """The hosts, for every verb that starts ranks."""
    add = parser.add_argument_group("where (default: the scheduler's allocation, or this machine)")
    either = add.add_mutually_exclusive_group()
    either.add_argument(
        "--hostfile", metavar="FILE", help="file of hosts and slots, one host per line"
    )
    either.add_argument(
        "-H", dest="host_list", metavar="H1:2,H2:4", help="hosts and slots on the command line"
    )
    either.add_argument(
        "--local", action="store_true", help="this machine alone, also inside an allocation"
    )
    add.add_argument("-n", type=whole(1), metavar="N", help="number of ranks (default: all slots)")
    add.add_argument(
        "--npernode",
        type=whole(1),
        metavar="K",
        help="number of ranks on each host (default: all slots)",
    )
    add.add_argument("--exclude", metavar="HOST,HOST", help="hosts to leave out")
    add.add_argument(
        "--push",
        action="store_true",
        help="first make this folder and its environment the same on every host, as mpiddp hosts push does",
    )
    add.add_argument(
        "--share-gpus",
        action="store_true",
        help="allow more ranks than GPUs on a host, for a script that uses gloo",
    )
    add.add_argument(
        "--bind",
        choices=("none", "numa", "core", "gpu"),
        default="none",
        help="bind each rank to nothing, a NUMA node, a core, or the cores near its GPU (default: none)",
    )


def add_how(parser: argparse.ArgumentParser) -> None:
    """How the ranks start, for the same verbs."""
    add = parser.add_argument_group("how")
    add.add_argument(
        "--mpirun", metavar="PATH", help="mpirun of the MPI to use (its library is used too)"
    )
    add.add_argument(
        "--master-addr", metavar="ADDR", help="rank 0's address, as the other ranks reach it"
    )
    add.add_argument(
        "--interface",
        metavar="NAME",
        help="network interface for the job: a name, an address or a network",
    )
    add.add_argument(
        "-x",
        dest="exports",
        action="append",
        default=[],
        metavar="VAR[=VALUE]",
        help="pass this environment variable to the ranks, or those of a pattern such as 'WANDB_*' "
        "(repeatable)",
    )
    add.add_argument(
        "--env-file",
        dest="env_files",
        action="append",
        default=[],
        metavar="FILE",
        help="pass the variables of this file: a line NAME=VALUE for each (repeatable)",
    )
    add.add_argument(
        "--mpi-args",
        action="append",
        default=[],
        metavar="='ARGS'",
        help="options for mpirun itself, such as --mpi-args='--mca pml ucx' (repeatable)",
    )
    add.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="skip the preflight checks of the hosts",
    )
    add.add_argument(
        "--wait-for-hosts",
        dest="wait_s",
        type=duration,
        metavar="10m",
        help="wait up to this long until all names resolve and all hosts answer (default: not at all)",
    )
    add.add_argument(
        "--timeout",
        dest="timeout_s",
        type=duration,
        metavar="S",
        help="time in which all ranks must join (default: 60)",
    )


def _add_failures(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("when something fails")
    add.add_argument(
        "--max-restarts",
        type=whole(0),
        default=0,
        metavar="K",
        help="restart a failed job up to K times, from its newest checkpoint (default: 0)",
    )
    add.add_argument(
        "--min-hosts",
        type=whole(1),
        metavar="H",
        help="leave out hosts that fail the preflight, as long as H hosts remain",
    )
    add.add_argument(
        "--min-ranks",
        type=whole(1),
        metavar="N",
        help="the same, as long as N ranks remain",
    )
    add.add_argument(
        "--spares",
        type=whole(0),
        default=0,
        metavar="K",
        help="keep the last K hosts in reserve; each takes the place of a host that fails the preflight",
    )
    add.add_argument(
        "--avoid-flaky",
        action="store_true",
        help="leave out hosts that failed in 2 of their last 5 jobs, or were slow, as far as --min-hosts or "
        "--spares allow it, else place ranks there last (see: mpiddp hosts history)",
    )
    add.add_argument(
        "--grow",
        dest="grow_s",
        type=duration,
        metavar="10m",
        help="how often to look for hosts that are back or new in the hostfile, to save and restart on them "
        "(default: they join at the next restart)",
    )


def _add_ends(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("when to stop")
    add.add_argument(
        "--stop-after",
        dest="stop_after_s",
        type=duration,
        metavar="55m",
        help="after this time, stop as on Ctrl-C: a script that calls should_stop may save, and the exit "
        "code is 75",
    )
    add.add_argument(
        "--grace",
        dest="grace_s",
        type=duration,
        default=30.0,
        metavar="S",
        help="time that the ranks have to stop before they are killed (default: 30 s)",
    )
    add.add_argument(
        "--save-grace",
        dest="save_grace_s",
        type=duration,
        default=600.0,
        metavar="S",
        help="the same while a rank is saving (default: 10m)",
    )
    add.add_argument(
        "--hang-timeout",
        dest="hang_timeout_s",
        type=duration,
        metavar="S",
        help="end the job if no rank makes a step for this long (default: never)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output")
    add.add_argument(
        "--log-ranks",
        type=_ranks,
        default=os.environ.get(LOG_RANKS) or DEFAULT_RANKS,
        metavar="0,5",
        help="the ranks whose output is shown: all, none, or numbers (default: stdout of rank 0, "
        "stderr of all ranks)",
    )
    add.add_argument(
        "--prefix",
        type=_prefix,
        default=os.environ.get(PREFIX) or "auto",
        metavar="auto|always|never",
        help='"[rank 3 node2]" in front of each line (default: auto, with more than one rank)',
    )
    add.add_argument(
        "--log-dir",
        type=_folder,
        metavar="DIR",
        help="write all that each rank prints to rank_00003.out and rank_00003.err in DIR on its host",
    )
    add.add_argument(
        "--dry-run",
        action="store_true",
        help="print the command with a reason for each flag; start nothing",
    )
    add.add_argument(
        "--report", action="store_true", help="print the host and device of every rank"
    )
    either = add.add_mutually_exclusive_group()
    either.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="of the launcher itself, print errors only: no hints, no status",
    )
    either.add_argument(
        "-v", "--verbose", action="store_true", help="print each choice and its reason"
    )


def _ranks(text: str) -> str:
    """The ranks of --log-ranks, for `mpiddp.protocol.messages.is_shown`."""
    if text in ("all", "none", DEFAULT_RANKS):
        return text
    try:
        return ",".join(str(parse_whole(each)) for each in text.split(","))
    except ValueError:
        raise UserError(
            f"--log-ranks {shown(text)}: expected all, none, or ranks such as 0,5."
        ) from None


def _prefix(text: str) -> str:
    if text not in ("auto", "always", "never"):
        raise UserError(f"--prefix {shown(text)}: expected auto, always or never.")
    return text


def _folder(text: str) -> str:
    if not text:
        raise UserError('--log-dir "": expected a folder.')
    return text
