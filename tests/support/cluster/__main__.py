"""The test cluster by hand.

python -m tests.support.cluster up 3                     runs until `down`; with --slurm, also srun and sbatch
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

from tests.support import cluster
from tests.support.cluster import needs, slurm


def main() -> int:
    options = parser().parse_args()
    try:
        return int(VERBS[options.verb](options) or 0)
    except (FileNotFoundError, RuntimeError, LookupError) as error:
        print(f"tests.support.cluster: {error}", file=sys.stderr)
        return 2


def up(options: argparse.Namespace) -> None:
    if reason := needs.why_no_slurm() if options.slurm else cluster.why_not():
        raise RuntimeError(reason)
    count = int(options.words[0]) if options.words else 3
    started = cluster.stand_up(count, name=options.name, detached=True)
    if options.slurm:
        slurm.start(started)
    status(options)


def down(options: argparse.Namespace) -> None:
    for name in cluster.standing():
        if name == options.name or not cluster.alive(name):  # left by a killed process
            cluster.take_down(name)


def status(options: argparse.Namespace) -> None:
    for name in cluster.standing():
        print(f"{name}:" if cluster.alive(name) else f"{name}: left by a killed process")
        for host in cluster.attach(name).hosts:
            print(f"  {host.name}  {host.address}  {host.interface}  pid {host.pid}")


def shell(options: argparse.Namespace) -> None:
    host = cluster.attach(options.name)[options.words[0]]
    command = host.shell(user=options.user, cwd=options.cwd)
    os.execvp(command[0], command)


def run(options: argparse.Namespace) -> int:
    host, *command = options.words
    where = {"user": options.user, "cwd": options.cwd}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"))  # those of this process
    program = cluster.attach(options.name)[host].popen(command, **where, **streams)
    while True:
        try:
            return program.wait()
        except KeyboardInterrupt:
            program.send_signal(signal.SIGINT)


def packages(options: argparse.Namespace) -> None:
    print(*needs.PACKAGES, *needs.SLURM_PACKAGES, *needs.GRID_ENGINE_PACKAGES)


VERBS = {each.__name__: each for each in (up, down, status, shell, run, packages)}


def parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--name", default="by-hand", help="which cluster (default: %(default)s)")
    parser.add_argument("--slurm", action="store_true", help="up: with srun, sbatch and salloc")
    parser.add_argument("--user", help="shell, run: not root")
    parser.add_argument("--cwd", help="shell, run: not the user's home")
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("words", nargs="*", help="the number of hosts; or a host, and its command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
