"""The test cluster by hand.

python -m tests.support.cluster up 3                     runs until `down`
python -m tests.support.cluster shell node0
python -m tests.support.cluster run node0 -- ssh node1 hostname
python -m tests.support.cluster status
python -m tests.support.cluster down
apt-get install $(python -m tests.support.cluster packages)
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from tests.support import cluster
from tests.support.cluster import needs, slurm
from tests.support.cluster.layout import DECOY_ADDRESSES, Layout


def main() -> int:
    options = _parser().parse_args()
    try:
        code: int = options.verb(options)
    except (FileNotFoundError, RuntimeError, LookupError) as error:
        print(f"tests.support.cluster: {error}", file=sys.stderr)
        return 2
    return code


def up(options: argparse.Namespace) -> int:
    if reason := needs.why_no_slurm() if options.slurm else cluster.why_not():
        raise RuntimeError(reason)
    layout = Layout(
        interfaces=tuple(options.interfaces.split(",")),
        own_name_is_loopback=options.own_name_is_loopback,
        decoys=tuple(options.decoy),
        dead_network=options.dead_network,
    )
    began = time.perf_counter()
    standing = cluster.stand_up(options.count, layout=layout, name=options.name, detached=True)
    if options.slurm:
        slurm.start(standing)
    print(f"{options.count} hosts started in {time.perf_counter() - began:.2f} s")
    status(options)
    name = "" if options.name == _NAME else f" --name {options.name}"
    print(f"Log in:    python -m tests.support.cluster{name} shell node0")
    print(f"Stop:      python -m tests.support.cluster{name} down")
    return 0


def down(options: argparse.Namespace) -> int:
    cluster.take_down(options.name)
    for name in cluster.standing():
        if not cluster.alive(name):  # left by a killed process
            cluster.take_down(name)
    return 0


def status(options: argparse.Namespace) -> int:
    for name in cluster.standing():
        print(f"{name}:" if cluster.alive(name) else f"{name}: left by a killed process")
        for host in cluster.attach(name).hosts:
            print(f"  {host.name}  {host.address}  {host.interface}  pid {host.pid}")
    return 0


def shell(options: argparse.Namespace) -> int:
    host = cluster.attach(options.name)[options.host]
    command = host.shell(user=options.user, cwd=options.cwd)
    os.execvp(command[0], command)


def run(options: argparse.Namespace) -> int:
    host = cluster.attach(options.name)[options.host]
    program = host.popen(
        options.command,
        user=options.user,
        cwd=options.cwd,
        stdin=None,
        stdout=None,
        stderr=None,
    )
    while True:
        try:
            return program.wait()
        except KeyboardInterrupt:
            program.send_signal(signal.SIGINT)


def packages(options: argparse.Namespace) -> int:
    print(*needs.PACKAGES, *needs.SLURM_PACKAGES, *needs.GRID_ENGINE_PACKAGES)
    return 0


_NAME = "by-hand"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default=_NAME, help="which cluster (default: %(default)s)")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    verb = verbs.add_parser("up", help="start a cluster")
    verb.set_defaults(verb=up)
    verb.add_argument("count", type=int, nargs="?", default=3)
    verb.add_argument("--interfaces", default="eth0", help="names, used in turn: eth0,ens5,enp3s0")
    verb.add_argument("--own-name-is-loopback", action="store_true", help="Debian's 127.0.1.1")
    verb.add_argument("--decoy", action="append", default=[], choices=list(DECOY_ADDRESSES))
    verb.add_argument(
        "--dead-network", action="store_true", help="add a network that loses all packets"
    )
    verb.add_argument("--slurm", action="store_true", help="with srun, sbatch and salloc")

    for name, function, text in (
        ("down", down, "stop it, and remove what killed processes left"),
        ("status", status, "list all clusters of this machine"),
        ("packages", packages, "print the Debian packages that the clusters need"),
    ):
        verbs.add_parser(name, help=text).set_defaults(verb=function)

    for name, function, text in (
        ("shell", shell, "log in to a host"),
        ("run", run, "run a command on a host: run node0 -- hostname"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.set_defaults(verb=function)
        verb.add_argument("--user")
        verb.add_argument("--cwd", help="default: the user's home")
        verb.add_argument("host")
    verb.add_argument("command", nargs="+")
    return parser


if __name__ == "__main__":
    sys.exit(main())
