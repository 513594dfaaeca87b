"""`mpiddp hosts`: check a hostfile or an allocation, and work on its hosts.

    mpiddp hosts check hostfiles/two_nodes

The modules of keys, push, pull and run have their own examples.
"""

from __future__ import annotations

import argparse
import os

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, UserError
from mpiddp.hosts import keys, pull, push, run_command, where
from mpiddp.hosts.hostfile import Hosts
from mpiddp.text import align_columns, counted, escaped

# verb: (module with add_arguments(parser) and main(options, hosts) -> int, its line in `mpiddp hosts --help`)
OVER_SSH = {
    "keys": (keys, "Make ssh reach every host without a password"),
    "push": (push, "Make a folder, with its environment, the same on every host"),
    "pull": (pull, "Bring the folder of a run home from every host"),
    "run": (run_command, "Run a command on every host"),
}


def main(argv: list[str]) -> int:
    """Run `mpiddp hosts ARGV`. Returns 1 if a host failed, else 0."""
    options = _parse(argv)
    hosts = where.named_hosts(options.hostfile, options.host_list, os.environ, options.login_s)
    if hosts is None:
        raise UserError(
            f"mpiddp hosts {options.verb}: on which hosts?",
            fix="FILE, --hostfile FILE or -H node1,node2",
        )
    if options.verb == "check":
        print(table(hosts))
        return DONE
    return int(OVER_SSH[options.verb][0].main(options, hosts))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = OneSentenceParser(
        prog="mpiddp hosts",
        allow_abbrev=False,
        description="Check hostfiles, and work on their hosts over ssh.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)

    def verb(name: str, purpose: str) -> OneSentenceParser:
        parser = verbs.add_parser(name, help=purpose, description=f"{purpose}.", allow_abbrev=False)
        where.add_options(parser)
        return parser

    where.add_file(verb("check", "Print a table of the hosts and their slots, or the first error"))
    for name, (module, purpose) in OVER_SSH.items():
        module.add_arguments(verb(name, purpose))
    before, command = argv, []
    if argv[:1] == ["run"] and "--" in argv:  # the command stands behind it
        before, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    if before[:1] and before[0] in OVER_SSH:  # options may stand between FILE and the folders
        values = argparse.Namespace(verb=before[0], command=command, file=None)
        options = verbs.choices[before[0]].parse_intermixed_args(before[1:], values)
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
