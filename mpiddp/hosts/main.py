"""`mpiddp hosts`: look at a hostfile, write it for another MPI, compare two.

    mpiddp hosts check hostfiles/two_nodes --mpi openmpi
    mpiddp hosts convert hostfiles/mixed --to mpich > hosts.mpich
    mpiddp hosts diff old_hosts new_hosts

Nothing here touches a host.
"""

from __future__ import annotations

import argparse
import sys

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import UserError
from mpiddp.hosts.formats import MPI_NAMES, MpiName, diff, render, render_host
from mpiddp.hosts.hostfile import Host, Hosts, read_hostfile
from mpiddp.text import counted


def main(argv: list[str]) -> int:
    """Run `mpiddp hosts ARGV`: 0, or 1 when `diff` found a difference; UserError for bad input."""
    options = _parse(argv)
    if options.verb == "check":
        hosts = read_hostfile(options.file, keep_fqdn=options.keep_fqdn)
        if options.mpi is not None:
            for host in hosts.hosts:
                refuse_foreign_syntax(hosts, host, options.mpi)
        print(table(hosts))
        return 0
    if options.verb == "convert":
        hosts = read_hostfile(options.file, keep_fqdn=options.keep_fqdn)
        print(render(hosts, options.to), end="")
        for host in hosts.without_slots:
            print(
                f"note: {hosts.where(host)}: {host.name} has no slot count. mpiddp launch takes one "
                "per GPU, Open MPI's mpirun one per core, MPICH's one.",
                file=sys.stderr,
            )
        return 0
    a, b = (read_hostfile(file, keep_fqdn=options.keep_fqdn) for file in (options.a, options.b))
    differences = diff(a, b)
    for line in differences:
        print(line)
    return 1 if differences else 0


def _parse(argv: list[str]) -> argparse.Namespace:
    keep = OneSentenceParser(add_help=False, allow_abbrev=False)
    keep.add_argument(
        "--keep-fqdn", action="store_true", help="allow names that are equal up to the first dot"
    )
    parser = OneSentenceParser(
        prog="mpiddp hosts", allow_abbrev=False, description="Check, convert and compare hostfiles."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, purpose: str) -> OneSentenceParser:
        return verbs.add_parser(
            name, help=purpose, description=purpose, parents=[keep], allow_abbrev=False
        )

    check = verb("check", "print the hosts and their slots, or what is wrong with the file")
    check.add_argument("file")
    check.add_argument(
        "--mpi", choices=list(MPI_NAMES), help="also refuse what this MPI's own mpirun cannot read"
    )
    convert = verb("convert", "print the hostfile as another program wants it")
    convert.add_argument("file")
    convert.add_argument("--to", choices=["mpich", "openmpi", "slurm"], required=True)
    compare = verb("diff", "print what differs; the exit code is 0 when nothing does, else 1")
    compare.add_argument("a")
    compare.add_argument("b")
    return parser.parse_args(argv)


def refuse_foreign_syntax(hosts: Hosts, host: Host, mpi: MpiName) -> None:
    """UserError for a line that `mpiddp launch` understands but this MPI's own mpirun does not."""
    right = render_host(hosts, host, mpi)
    words, comment, _ = host.text.partition("#")
    first, *rest = words.split()
    if mpi == "openmpi":
        theirs = "MPICH"
        with_count = first.count(":") == 1 or "[" in first
        foreign = [first] if with_count else [word for word in rest if word.startswith("user")]
    else:
        theirs = "Open MPI"
        foreign = [first] if "@" in first else []
        foreign += [word for word in rest if not word.startswith("user")]
    if foreign:
        raise UserError(
            f'{hosts.where(host)}: "{foreign[0]}" is {theirs}\'s syntax and mpirun here is '
            f"{MPI_NAMES[mpi]}. Write: {right}"
        )
    if mpi == "mpich" and comment and words[-1].isspace():
        raise UserError(
            f"{hosts.where(host)}: a comment after a host, which MPICH cannot parse. "
            "Give it a line of its own."
        )


def table(hosts: Hosts) -> str:
    """The hosts a line each, in the order of their ranks, and the totals under them."""
    rows = [("host", "slots", "user", "port")]
    for host in hosts.hosts:
        slots = "GPUs" if host.slots is None else str(host.slots)
        rows.append((host.name, slots, host.user or "-", str(host.port or "-")))
    names, users = (max(len(row[column]) for row in rows) for column in (0, 2))
    lines = [
        f"{name:<{names}}  {slots:>6}  {user:<{users}}  {port}" for name, slots, user, port in rows
    ]
    return "\n".join([*lines, _totals(hosts)])


def _totals(hosts: Hosts) -> str:
    slots = sum(host.slots or 0 for host in hosts.hosts)
    total = f"{counted(len(hosts.hosts), 'host')}, {counted(slots, 'slot')}"
    if hosts.without_slots:
        names = ", ".join(host.name for host in hosts.without_slots)
        total += f", and one per GPU of {names} (1 on a CPU host)"
    return total
