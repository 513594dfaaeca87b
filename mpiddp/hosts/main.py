"""`mpiddp hosts`: check a hostfile or an allocation, and work on its hosts. VERBS has what it can do."""

from __future__ import annotations

import argparse
import os

from mpiddp.arguments import OneSentenceParser, Verb, add_verbs
from mpiddp.errors import DONE, UserError
from mpiddp.hosts import keys, pull, push, run_command, where
from mpiddp.hosts.hostfile import Hosts
from mpiddp.text import align_columns, counted, escaped


def main(argv: list[str]) -> int:
    """Run `mpiddp hosts ARGV`. Returns 1 if a host failed, else 0."""
    options = _parse(argv)
    hosts = where.named_hosts(options.hostfile, options.host_list, os.environ, options.login_s)
    if hosts is None:
        raise UserError(
            f"mpiddp hosts {options.verb}: on which hosts?",
            fix="FILE, --hostfile FILE or -H node1,node2",
        )
    return VERBS[options.verb].run(options, hosts)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = OneSentenceParser(
        prog="mpiddp hosts", description="Check hostfiles, and work on their hosts over ssh."
    )
    parsers = add_verbs(parser, VERBS)
    for verb, of_verb in parsers.items():
        where.add_options(of_verb, logs_in=verb != "check")
    parsers["run"].elsewhere = {"[^-].*": "write -- before the command"}
    before, command = argv, []
    if argv[:1] == ["run"] and "--" in argv:  # the command stands behind it
        before, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    if before[:1] and before[0] in VERBS:  # options may stand between FILE and the folders
        values = argparse.Namespace(verb=before[0], command=command, file=None)
        options: argparse.Namespace = parsers[before[0]].parse_intermixed_args(before[1:], values)
    else:
        options = parser.parse_args(argv)
    if hasattr(options, "folders"):
        _take_file(options)
    where.settle(options)
    return options


def _take_file(options: argparse.Namespace) -> None:
    """Take FILE from the front of the folders of push and pull.

    The first word is FILE, unless the hosts are named, the word is a folder, or pull has no other word.
    """
    folders = options.folders
    are_named = (options.hostfile, options.host_list) != (None, None)
    is_only = options.verb == "pull" and len(folders) < 2
    if folders and not (are_named or is_only or os.path.isdir(folders[0])):  # noqa: PTH112
        options.file = folders.pop(0)


def _check(_: argparse.Namespace, hosts: Hosts) -> int:
    print(table(hosts))
    return DONE


def table(hosts: Hosts) -> str:
    """The hosts in the order of their ranks, the totals, and the lines #: of the file."""
    rows = [("host", " slots", "user", "port")]  # " slots" is as wide as the largest count
    for host in hosts.hosts:
        slots = "GPUs" if host.slots is None else str(host.slots)
        port = str(host.port or "-")
        if host.gpus is not None:
            port = f"{port:<5}  GPUs {', '.join(map(str, host.gpus))}"
        rows.append((host.name, slots, host.user or "-", port))
    count = sum(host.slots or 0 for host in hosts.hosts)
    total = f"{counted(len(hosts.hosts), 'host')}, {counted(count, 'slot')}"
    if without := [host.name for host in hosts.hosts if host.slots is None]:
        total += f", and one per GPU of {', '.join(without)} (1 on a CPU host)"
    options = [f"{hosts.source}:{number}: #: {escaped(text)}" for number, text in hosts.options]
    return "\n".join([align_columns(rows, right=(1,)), total, *options])


VERBS = {
    "check": Verb(
        "Print a table of the hosts and their slots, or the first error", _check, [where.FILE]
    ),
    "keys": Verb("Make ssh reach every host without a password", keys.main, [where.FILE]),
    "push": Verb(push.PURPOSE, push.main, push.OPTIONS, "[FILE] [FOLDER ...]"),
    "pull": Verb(
        "Bring the folder of a run home from every host", pull.main, pull.OPTIONS, "[FILE] FOLDER"
    ),
    "run": Verb(
        "Run a command on every host",
        run_command.main,
        run_command.OPTIONS,
        "[FILE] -- COMMAND [ARGS ...]",
    ),
}
