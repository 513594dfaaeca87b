"""`mpiddp hosts run`: one command on every host at once; equal outputs are printed once.

mpiddp hosts run hostfiles/two_nodes -- nvidia-smi -L
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from mpiddp.arguments import OneSentenceParser, duration, whole
from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.hosts.cluster import run_agent
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import resolve_all
from mpiddp.hosts.slurm import compress_names
from mpiddp.hosts.ssh import NO_PROGRAM, Answer, run_on_hosts
from mpiddp.hosts.ssh_complaints import ssh_complaint
from mpiddp.text import duration as duration_text
from mpiddp.text import escaped, names_by_value

_PROOF = "mpiddp-hosts-run"  # the first line of a login; the start-up files of a shell may print before it


class Outcome(NamedTuple):
    """What the command did on a host. `failure` is "" where it ended with exit code 0."""

    stdout: str
    stderr: str
    failure: str


def add_arguments(parser: OneSentenceParser) -> None:
    parser.usage = "mpiddp hosts run [options] FILE -- COMMAND [ARGS ...]"
    parser.add_argument("file", help="the hostfile")
    parser.add_argument(
        "--parallel",
        type=whole(1),
        metavar="K",
        help="run on K hosts at a time (default: on all at once)",
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        type=duration,
        metavar="30s",
        help="end the command after this time (default: wait for it)",
    )


def main(options: argparse.Namespace, hosts: Hosts) -> int:
    """Run `options.command` on all hosts. Returns 1 if it failed on any, else 0.

    Raises:
        UserError: no command.
    """
    if not options.command:
        raise UserError(
            "mpiddp hosts run: no command. Example: mpiddp hosts run FILE -- nvidia-smi -L"
        )
    resolve_all([host.name for host in hosts.hosts])
    outcomes = run(
        hosts.hosts, options.command, timeout_s=options.timeout_s, parallel=options.parallel
    )
    show(outcomes)
    return FAILED if any(outcome.failure for outcome in outcomes.values()) else DONE


def run(
    hosts: Sequence[Host],
    command: Sequence[str],
    *,
    timeout_s: float | None = None,
    parallel: int | None = None,
) -> dict[Host, Outcome]:
    """Run the command on all hosts at once, or on `parallel` at a time. Ctrl-C ends it everywhere.

    It starts in this folder where a host has it, else in the home folder.
    """
    source = Path(run_agent.__file__).read_text()
    # The literals of Python are the only form in which the command travels: no shell reads it.
    call = f"main({_PROOF!r}, {str(Path.cwd())!r}, {list(command)!r})"
    answers = run_on_hosts(
        hosts,
        "python3",
        f"{source}\n{call}\n",
        timeout_s=math.inf if timeout_s is None else timeout_s,
        most_at_once=parallel,
    )
    return {host: _outcome(host, answer, timeout_s) for host, answer in answers.items()}


def _outcome(host: Host, answer: Answer, timeout_s: float | None) -> Outcome:
    _, proof, stdout = answer.stdout.partition(f"{_PROOF}\n")
    code = answer.exit_code
    if code is None and timeout_s is not None:
        return Outcome(stdout, answer.stderr, f"no end in {duration_text(timeout_s)}; stopped")
    if proof:
        failure = f"exit code {code}" if code else ""
        if code == 255 and "onnection" in answer.stderr:
            failure = "the connection was lost"
        return Outcome(stdout, answer.stderr, failure)
    if code == NO_PROGRAM:
        return Outcome("", "", "python3 is missing. Install it there: mpiddp needs no more")
    return Outcome("", answer.stderr, ssh_complaint(host, answer.stderr))


def show(outcomes: dict[Host, Outcome]) -> None:
    """Print each output once, with the hosts that gave it in front of each line; failures at the end."""
    for stream, field in ((sys.stdout, "stdout"), (sys.stderr, "stderr"), (sys.stderr, "failure")):
        texts = {host.name: getattr(outcome, field) for host, outcome in outcomes.items()}
        for text, names in names_by_value(texts).items():
            _print_lines(compress_names(names), text.splitlines(), stream)


def _print_lines(hosts: str, lines: Iterable[str], stream: TextIO) -> None:
    for line in lines:
        print(f"{hosts}: {escaped(line)}", file=stream)
    stream.flush()
