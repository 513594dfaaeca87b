"""Seconds and bytes of a push to hosts whose links are shaped, tree against star, and of a second push.

    python -m benchmarks.push --hosts 16 --mbit 1000 --megabytes 200
    python -m benchmarks.push --hosts 3 --beside     # rsync, and tar over ssh, to all hosts at once
    python -m benchmarks.push --hosts 3 --launches 10      # what `launch --push` costs if nothing has changed

It needs root: the hosts are those of tests/support/cluster, on this machine, and share its processors. The
star is the way of a push where hosts cannot log in to each other.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from tests.support import cluster
from tests.support.cluster import Cluster, Layout, links
from tests.support.ranks import ROOT

MPIDDP = [sys.executable, "-m", "mpiddp"]
NOT_PUSHED = (".git", ".frameworks", ".mpi")  # the Open MPI of the benchmark is in the environment


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.push",
        description="Seconds and bytes of a push to hosts with limited links, tree against star.",
    )
    parser.add_argument("--hosts", type=int, default=3, help="besides the first one")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each link")
    parser.add_argument(
        "--launches",
        type=int,
        default=0,
        help="instead: so many pairs of launches, with --push and without, of this repository's environment",
    )
    parser.add_argument(
        "--beside", action="store_true", help="also with rsync, and with tar over ssh"
    )
    parser.add_argument("--megabytes", type=int, default=200, help="of the folder, in 100 files")
    options = parser.parse_args()
    if options.launches:
        _compare_launches(options.hosts, options.launches)
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as parent:
        folder = Path(parent, "folder")
        folder.mkdir()
        for number in range(100):
            (folder / f"{number:02}").write_bytes(os.urandom(options.megabytes * 10_000))
        for name in ("tree", "star", *(("rsync", "tar") if options.beside else ())):
            with cluster.up(options.hosts + 1, layout=Layout(apart=True)) as hosts:
                if name == "star":
                    for host in hosts.hosts[1:]:
                        host.path("/root/.ssh/known_hosts").unlink()
                with links.limited(hosts.hosts, mbit=options.mbit):
                    for push in ("first", "second"):
                        seconds, sent = _push(hosts, folder, name)
                        print(
                            f"{name}, {push} push to {options.hosts} hosts: {seconds:.2f} s, "
                            f"{sent / 1e6:.1f} MB from the first host",
                            flush=True,
                        )


def _compare_launches(number: int, pairs: int) -> None:
    """Launch a command on bare hosts that have got this repository, with --push and without, in turns."""
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as project,
        cluster.up(number + 1, layout=Layout(apart=True)) as hosts,
    ):
        Path(project, "train.py").write_text("print()\n")
        file = hosts.shared / "hosts"
        file.write_text("".join(f"{host.name} slots=1\n" for host in hosts.hosts))
        leave_out = [option for name in NOT_PUSHED for option in ("--leave-out", name)]
        push = [
            *MPIDDP,
            "hosts",
            "push",
            str(file),
            "--with-python",
            *leave_out,
            project,
            str(ROOT),
        ]
        hosts.hosts[0].run(push, cwd=Path(project), check=True)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(pairs):
            for pushes, found in seconds.items():
                command = [*MPIDDP, "launch", "--hostfile", str(file), *["--push"] * pushes]
                began = time.monotonic()
                hosts.hosts[0].run([*command, "--", "true"], cwd=Path(project), check=True)
                found.append(time.monotonic() - began)
                print(f"{'with' if pushes else 'without'} --push: {found[-1]:.2f} s", flush=True)
    more = [mine - other for other, mine in zip(seconds[False], seconds[True], strict=True)]
    print(
        f"median without {median(seconds[False]):.2f} s, with {median(seconds[True]):.2f} s, "
        f"of the differences {median(more):.2f} s ({min(more):.2f} to {max(more):.2f})"
    )


def _push(hosts: Cluster, folder: Path, name: str) -> tuple[float, int]:
    """Seconds, and the bytes over the first host's link."""
    file = hosts.shared / "hosts"
    file.write_text("".join(f"{host.name}\n" for host in hosts.hosts))
    first, others = hosts.hosts[0], [host.name for host in hosts.hosts[1:]]
    commands = [[*MPIDDP, "hosts", "push", str(file), str(folder)]]
    if name == "rsync":
        rsync = ["rsync", "-a", "--delete", "--mkpath", f"{folder}/"]
        commands = [[*rsync, f"{each}:{folder}/"] for each in others]
    elif name == "tar":
        here = shlex.quote(str(folder))
        receive = shlex.quote(f"mkdir -p {here} && tar -C {here} -xf -")
        commands = [
            ["sh", "-c", f"tar -C {here} -cf - . | ssh {each} {receive}"] for each in others
        ]
    before, began = links.sent_bytes(first), time.monotonic()
    with ThreadPoolExecutor(len(commands)) as pool:
        root = Path(__file__).parents[1]
        list(pool.map(lambda each: first.run(each, cwd=root, check=True), commands))
    return time.monotonic() - began, links.sent_bytes(first) - before


if __name__ == "__main__":
    main()
