"""Seconds and bytes of a push to hosts whose links are shaped, of a second one, and after a change of a line.

    python -m benchmarks.push --hosts 16 --mbit 1000 --megabytes 200
    python -m benchmarks.push --hosts 3 --files 1 --ways tree stream rsync tar
    python -m benchmarks.push --hosts 3 --launches 10      # what `launch --push` costs if nothing has changed

It needs root: the hosts are those of tests/support/cluster, on this machine, and share its processors. The
star is the way of a push where hosts cannot log in to each other, and the stream that of hosts without rsync.
The commands of rsync, and of tar over ssh, send to all hosts at once.
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
from tests.support.cluster import Cluster, Layout, links, needs
from tests.support.ranks import ROOT

WAYS = ("tree", "star", "stream", "rsync", "tar")
MPIDDP = [sys.executable, "-m", "mpiddp"]
NOT_PUSHED = (".git", ".frameworks", ".mpi")  # the Open MPI of the benchmark is in the environment


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.push",
        description="Seconds and bytes of a push to hosts with limited links.",
    )
    parser.add_argument("--hosts", type=int, default=3, help="besides the first one")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each link")
    parser.add_argument(
        "--launches",
        type=int,
        default=0,
        help="instead: so many pairs of launches, with --push and without, of this repository's environment",
    )
    parser.add_argument("--ways", nargs="+", default=["tree", "star"], choices=WAYS)
    parser.add_argument("--megabytes", type=int, default=200, help="of the folder")
    parser.add_argument("--files", type=int, default=100, help="in which these are")
    parser.add_argument("--rounds", type=int, default=1, help="of all ways, one after the other")
    options = parser.parse_args()
    if options.launches:
        _compare_launches(options.hosts, options.launches)
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as parent:
        folder = Path(parent, "folder")
        folder.mkdir()
        for number in range(options.files):
            size = options.megabytes * 1_000_000 // options.files
            (folder / f"{number:05}").write_bytes(os.urandom(size))
        for way in options.ways * options.rounds:
            with cluster.up(options.hosts + 1, layout=Layout(apart=True)) as hosts:
                _take_away(hosts, way)
                with links.limited(hosts.hosts, mbit=options.mbit):
                    for push in ("first", "second", "changed"):
                        if push == "changed":
                            _insert_line(folder / "00000")
                        seconds, sent = _push(hosts, folder, way)
                        print(
                            f"{way}, {push} push to {options.hosts} hosts: {seconds:.2f} s, "
                            f"{sent / 1e6:.1f} MB from the first host",
                            flush=True,
                        )


def _take_away(hosts: Cluster, way: str) -> None:
    """What would let a push take another way."""
    if way == "star":
        for host in hosts.hosts[1:]:
            host.path("/root/.ssh/known_hosts").unlink()
    elif way == "stream":
        for host in hosts.hosts:
            host.run(["mount", "--bind", "/dev/null", needs.tool("rsync")], check=True)


def _insert_line(path: Path) -> None:
    """In the middle of a file."""
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2] + b"a line\n" + text[len(text) // 2 :])


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


def _push(hosts: Cluster, folder: Path, way: str) -> tuple[float, int]:
    """Seconds, and the bytes over the first host's link."""
    file = hosts.shared / "hosts"
    file.write_text("".join(f"{host.name}\n" for host in hosts.hosts))
    first, others = hosts.hosts[0], [host.name for host in hosts.hosts[1:]]
    commands = [[*MPIDDP, "hosts", "push", str(file), str(folder)]]
    if way == "rsync":
        rsync = ["rsync", "-a", "--delete", "--mkpath", f"{folder}/"]
        commands = [[*rsync, f"{each}:{folder}/"] for each in others]
    elif way == "tar":
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
