"""`mpiddp hosts`: check a hostfile, and work on its hosts.

    mpiddp hosts check hostfiles/two_nodes

The modules of keys, push, pull and run have their own examples.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from mpiddp.arguments import OneSentenceParser, duration
from mpiddp.errors import DONE
from mpiddp.hosts import keys, pull, push, run
from mpiddp.hosts.hostfile import Hosts, read_hostfile
from mpiddp.hosts.transport import SSH
from mpiddp.text import align_columns, counted

# verb: (module with add_arguments(parser) and main(options, hosts) -> int, its line in `mpiddp hosts --help`)
OVER_SSH = {
    "keys": (keys, "Make ssh reach every host without a password"),
    "push": (push, "Make a folder, with its environment, the same on every host"),
    "pull": (pull, "Bring the folder of a run home from every host"),
    "run": (run, "Run a command on every host"),
}


def main(argv: list[str]) -> int:
    """Run `mpiddp hosts ARGV`. Returns 1 if a host failed, else 0."""
    options = _parse(argv)
    if options.verb in OVER_SSH:
        hosts = read_hostfile(options.file)
        transport = hosts.transport._replace(login_s=options.login_s)
        return int(OVER_SSH[options.verb][0].main(options, replace(hosts, transport=transport)))
    print(table(read_hostfile(options.file)))
    return DONE


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = OneSentenceParser(
        prog="mpiddp hosts",
        allow_abbrev=False,
        description="Check hostfiles, and work on their hosts over ssh.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)

    def verb(name: str, purpose: str) -> OneSentenceParser:
        parser = verbs.add_parser(name, help=purpose, description=f"{purpose}.", allow_abbrev=False)
        parser.add_argument("file", help="a hostfile, in Open MPI's or MPICH's syntax")
        return parser

    verb("check", "Print a table of the hosts and their slots, or the first error in the file")
    for name, (module, purpose) in OVER_SSH.items():
        with_file = verb(name, purpose)
        with_file.add_argument(
            "--login-timeout",
            dest="login_s",
            type=duration,
            default=SSH.login_s,
            metavar="TIME",
            help=f"time that a login over ssh may take (default: {SSH.login_s:g} s)",
        )
        if module is not keys:  # it has no option
            module.add_arguments(with_file)
    own, command = argv, []
    if argv[:1] == ["run"] and "--" in argv:  # all that follows is the command's
        own, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    if own[:1] and own[0] in OVER_SSH:  # options may stand between the hostfile and the folders
        known = argparse.Namespace(verb=own[0], command=command)
        return verbs.choices[own[0]].parse_intermixed_args(own[1:], known)
    return parser.parse_args(argv)


def table(hosts: Hosts) -> str:
    """The hosts, one per line in the order of their ranks, and the totals below."""
    rows = [("host", " slots", "user", "port")]  # as wide as the longest count
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
    return f"{align_columns(rows, right=(1,))}\n{total}"
