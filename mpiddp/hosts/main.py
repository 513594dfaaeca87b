"""`mpiddp hosts`: check a hostfile, convert it for another MPI, compare two; work on its hosts.

    mpiddp hosts check hostfiles/two_nodes --mpi openmpi
    mpiddp hosts convert hostfiles/mixed --to mpich > hosts.mpich
    mpiddp hosts diff old_hosts new_hosts
    mpiddp hosts keys hostfiles/two_nodes
    mpiddp hosts push hostfiles/two_nodes
    mpiddp hosts pull hostfiles/two_nodes runs/x
    mpiddp hosts run hostfiles/two_nodes -- nvidia-smi -L
    mpiddp hosts history hostfiles/two_nodes

The verbs of `OVER_SSH` and `check --network` connect to the hosts; the others do not.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import UserError
from mpiddp.hosts import history_verbs
from mpiddp.hosts.cluster import keys, network, pull, push, run
from mpiddp.hosts.formats import MPI_NAMES, Form, MpiName, diff, render, render_host
from mpiddp.hosts.hostfile import Host, Hosts, read_hostfile
from mpiddp.text import align_columns, counted

# verb: (module with add_arguments(parser) and main(options, hosts) -> int, its line in `mpiddp hosts --help`)
OVER_SSH = {
    "keys": (keys, "Make ssh reach every host without a password"),
    "push": (push, "Make a folder, with its environment, the same on every host"),
    "pull": (pull, "Bring the folder of a run home from every host"),
    "run": (run, "Run a command on every host"),
}


def main(argv: list[str]) -> int:
    """Run `mpiddp hosts ARGV`. Returns 1 if `diff` found a difference or a host failed, else 0.

    Raises:
        UserError: bad input.
    """
    options = _parse(argv)
    if options.verb in OVER_SSH:
        code: int = OVER_SSH[options.verb][0].main(options, _read(options, options.file))
        return code
    if options.verb in history_verbs.VERBS:
        return history_verbs.main(options)
    if options.verb == "check":
        return _check(_read(options, options.file), options.mpi, with_network=options.network)
    if options.verb == "convert":
        return _convert(_read(options, options.file), options.to)
    return _diff(_read(options, options.a), _read(options, options.b))


def _parse(argv: list[str]) -> argparse.Namespace:
    keep = OneSentenceParser(add_help=False, allow_abbrev=False)
    keep.add_argument(
        "--keep-fqdn",
        action="store_true",
        help="accept names that differ only after their first dot, where Open MPI cuts them",
    )
    parser = OneSentenceParser(
        prog="mpiddp hosts",
        allow_abbrev=False,
        description="Check, convert and compare hostfiles, and work on their hosts over ssh.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, purpose: str, more: str = "") -> OneSentenceParser:
        return verbs.add_parser(
            name, help=purpose, description=f"{purpose}. {more}", parents=[keep], allow_abbrev=False
        )

    check = verb(
        "check",
        "Print a table of the hosts and their slots, or the first error in the file",
        "A host without a slot count gets one slot per GPU when the job starts.",
    )
    check.add_argument("file", help="the hostfile, in Open MPI's or MPICH's syntax")
    check.add_argument(
        "--mpi",
        choices=list(MPI_NAMES),
        help="also reject lines that this MPI's own mpirun cannot read",
    )
    check.add_argument(
        "--network",
        action="store_true",
        help="also print each host's links, what NCCL and gloo would use of them, and what differs",
    )
    convert = verb("convert", "Print the hostfile in the syntax of another MPI or of Slurm")
    convert.add_argument("file", help="the hostfile, in Open MPI's or MPICH's syntax")
    convert.add_argument(
        "--to",
        choices=["mpich", "openmpi", "slurm"],
        required=True,
        help="the syntax to print: mpich is also Intel MPI's, and slurm a file for SLURM_HOSTFILE",
    )
    compare = verb(
        "diff",
        "Print the differences between two hostfiles",
        "The exit code is 0 when they place ranks identically, 1 when they differ.",
    )
    compare.add_argument("a", help="the first hostfile")
    compare.add_argument("b", help="the second hostfile")
    for name, (module, purpose) in OVER_SSH.items():
        module.add_arguments(verb(name, purpose))
    for name, purpose in history_verbs.VERBS.items():
        history_verbs.add_arguments(verb(name, purpose))
    own, command = argv, []
    if argv[:1] == ["run"] and "--" in argv:  # all that follows is the command's
        own, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    if own[:1] and own[0] in OVER_SSH:  # options may stand between the hostfile and the folders
        known = argparse.Namespace(verb=own[0], command=command)
        return verbs.choices[own[0]].parse_intermixed_args(own[1:], known)
    return parser.parse_args(argv)


def _read(options: argparse.Namespace, file: str) -> Hosts:
    return read_hostfile(file, keep_fqdn=options.keep_fqdn)


def _check(hosts: Hosts, mpi: MpiName | None, *, with_network: bool) -> int:
    if mpi is not None:
        for host in hosts.hosts:
            refuse_foreign_syntax(hosts, host, mpi)
    print(table(hosts))
    if with_network:
        print(network.report(network.ask(hosts.hosts)))
    return 0


def _convert(hosts: Hosts, form: Form) -> int:
    print(render(hosts, form), end="")
    for host in hosts.without_slots:
        print(
            f"note: {hosts.where(host)}: {host.name} has no slot count. mpiddp launch starts one "
            "rank per GPU, Open MPI's mpirun one per core, MPICH's one per host.",
            file=sys.stderr,
        )
    return 0


def _diff(a: Hosts, b: Hosts) -> int:
    differences = diff(a, b)
    for line in differences:
        print(line)
    return 1 if differences else 0


def refuse_foreign_syntax(hosts: Hosts, host: Host, mpi: MpiName) -> None:
    """Raise UserError for a line that `mpiddp launch` accepts but this MPI's own mpirun cannot parse."""
    right = render_host(hosts, host, mpi)
    if host.gpus is not None:
        raise UserError(
            f"{hosts.where(host)}: gpus= is read by mpiddp launch alone, and {MPI_NAMES[mpi]}'s mpirun "
            f"has no key for it. Write: {right}"
        )
    if host.text.endswith("\r"):
        raise UserError(
            f"{hosts.where(host)}: Windows line endings, which {MPI_NAMES[mpi]}'s mpirun cannot parse. "
            rf"Run: sed -i 's/\r$//' {shlex.quote(hosts.source)}"
        )
    written, comment, _ = host.text.partition("#")
    first, *rest = written.split()
    if any("@" in token for token in rest):
        theirs, foreign = "Grid Engine", rest[1:2]
    elif mpi == "openmpi":
        theirs = "MPICH"
        with_count = first.count(":") == 1 or "[" in first
        foreign = [first] if with_count else [token for token in rest if token.startswith("user")]
    else:
        theirs = "Open MPI"
        foreign = [first] if "@" in first else []
        foreign += [token for token in rest if not token.startswith("user")]
    if foreign:
        raise UserError(
            f'{hosts.where(host)}: "{foreign[0]}" is {theirs}\'s syntax and mpirun here is '
            f"{MPI_NAMES[mpi]}. Write: {right}"
        )
    if mpi == "mpich" and comment and written[-1].isspace():
        raise UserError(
            f"{hosts.where(host)}: a comment after a host, which MPICH cannot parse. "
            "Give it a line of its own."
        )


def table(hosts: Hosts) -> str:
    """The hosts, one per line in the order of their ranks, and the totals below."""
    rows = [("host", " slots", "user", "port")]  # as wide as the longest count
    for host in hosts.hosts:
        slots = "GPUs" if host.slots is None else str(host.slots)
        port = str(host.port or "-")
        if host.gpus is not None:
            port = f"{port:<5}  GPUs {', '.join(map(str, host.gpus))}"
        rows.append((host.name, slots, host.user or "-", port))
    return f"{align_columns(rows, right=(1,))}\n{_totals(hosts)}"


def _totals(hosts: Hosts) -> str:
    slots = sum(host.slots or 0 for host in hosts.hosts)
    total = f"{counted(len(hosts.hosts), 'host')}, {counted(slots, 'slot')}"
    if hosts.without_slots:
        names = ", ".join(host.name for host in hosts.without_slots)
        total += f", and one per GPU of {names} (1 on a CPU host)"
    return total
