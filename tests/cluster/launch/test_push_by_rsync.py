"""What rsync saves a push where both ends have it, and that nothing depends on it.

Tests mpiddp/hosts/cluster/rsync.py. python -m pytest tests/cluster/launch/test_push_by_rsync.py
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mpiddp.hosts.cluster.rsync import AHEAD, PART
from mpiddp.hosts.cluster.tree import PRIVATE
from tests.support import cluster
from tests.support.cluster import Cluster, Layout, links
from tests.support.cluster.host import Host
from tests.support.errors import error
from tests.support.hosts_verb import HOSTS
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

SIZE = 20_000_000
LEAST = 1_000_000  # which rsync brings
SECOND = 1_700_000_000 * 10**9  # a time in ns
NAMES = ("-rf", "#c", "[a-z]*", "two\nlines", "$(x) `y` 'z' \"", os.fsdecode(b"n\xe9"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(5, layout=Layout(apart=True)) as standing:
        for count in (2, 5):
            names = "".join(f"node{number}\n" for number in range(count))
            (standing.shared / f"{count}hosts").write_text(names)
        yield standing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A large file, and names that mean something to a shell or to rsync."""
    made = tmp_path / "a project; $HOME: x"
    (made / "closed").mkdir(parents=True)
    (made / "closed" / "large").write_bytes(os.urandom(SIZE))
    for name in NAMES:
        (made / name).write_bytes(os.urandom(LEAST))
    (made / "closed" / "large").chmod(0o666)
    (made / "closed").chmod(0o555)
    return made


def command(hosts: Cluster, folder: Path, file: str) -> list[str]:
    return [*HOSTS, "push", str(hosts.shared / file), str(folder)]


def push(hosts: Cluster, folder: Path, file: str = "2hosts") -> tuple[CompletedProcess[str], int]:
    """Also the bytes that the first host has sent."""
    before = links.sent_bytes(hosts["node0"])
    done = hosts["node0"].run(command(hosts, folder, file), cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return done, links.sent_bytes(hosts["node0"]) - before


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            path.read_bytes(),
        )
        for path in files
        if PRIVATE not in path.parts
    }


def arrived(host: Host, folder: Path) -> bool:
    there = host.path(folder)
    private = [path.name for path in (there / PRIVATE).iterdir()]
    return contents(there) == contents(folder) and private == ["copy.json"]


def change(folder: Path) -> None:
    """Insert a line into the large file."""
    large = folder / "closed" / "large"
    text = large.read_bytes()
    large.write_bytes(text[: SIZE // 2] + b"a line\n" + text[SIZE // 2 :])


def test_of_a_large_file_the_changed_part_is_sent(hosts: Cluster, folder: Path) -> None:
    twin = folder / "twin"
    twin.write_text("a" * LEAST)
    os.utime(twin, ns=(SECOND + 1, SECOND + 1))
    done, sent = push(hosts, folder)
    assert re.fullmatch(r"node1: 27\.0 MB sent\n27\.0 MB in \d+\.\d s\n", done.stdout)
    assert sent > SIZE
    assert arrived(hosts["node1"], folder)

    change(folder)
    for name in NAMES:
        with (folder / name).open("r+b") as file:
            file.write(b"another begin")
    twin.write_text("b" * LEAST)  # in the same second
    os.utime(twin, ns=(SECOND + 2, SECOND + 2))
    done, sent = push(hosts, folder)
    found = r"27\.0 MB in \d+\.\d s; rsync found 26\.0 MB of it there"
    assert re.fullmatch(rf"node1: 27\.0 MB sent\n{found}\n", done.stdout), done.stdout
    assert sent < 2 * LEAST
    assert arrived(hosts["node1"], folder)


def test_hosts_pass_on_what_has_changed(hosts: Cluster, folder: Path) -> None:
    push(hosts, folder, "5hosts")
    change(folder)
    done, sent = push(hosts, folder, "5hosts")
    found = r"80\.0 MB in \d+\.\d s; rsync found (\d+\.\d) MB of it there"
    total = re.fullmatch(rf"node\[1-4\]: 20\.0 MB sent\n{found}\n", done.stdout)
    assert total, done.stdout
    assert 79 < float(total[1]) <= 80
    assert sent < SIZE // 10
    assert all(arrived(host, folder) for host in hosts.hosts[1:])


@pytest.mark.parametrize("broken", ["#!/bin/sh\nexit 1\n", "of another CPU", None])
@pytest.mark.parametrize("name", ["node0", "node1"])
def test_without_rsync_all_is_sent(
    hosts: Cluster, folder: Path, name: str, broken: str | None
) -> None:
    push(hosts, folder)
    change(folder)
    host, here = hosts[name], shutil.which("rsync")
    other = "/dev/null"  # which cannot be run
    if broken is not None:
        other = "/run/broken-rsync"
        host.path(other).write_text(broken)
        host.path(other).chmod(0o755)
    host.run(["mount", "--bind", other, here], check=True)
    try:
        done, sent = push(hosts, folder)
    finally:
        host.run(["umount", here], check=True)
    assert re.fullmatch(r"node1: 20\.0 MB sent\n20\.0 MB in \d+\.\d s\n", done.stdout)
    assert sent > SIZE
    assert arrived(hosts["node1"], folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, None])
def test_a_file_that_broke_off_continues(hosts: Cluster, folder: Path, number: int | None) -> None:
    """Without a signal to it, the push loses its program on the host, and does not wait for rsync."""
    node0, node1 = hosts["node0"], hosts["node1"]
    private = node1.path(folder) / PRIVATE
    push_it = command(hosts, folder, "2hosts")
    with links.limited(hosts.hosts, mbit=40), node0.popen(push_it, cwd=ROOT) as running:
        deadline = time.monotonic() + PATIENCE_S
        while not [path for path in private.rglob(".large.*") if path.stat().st_size > SIZE // 2]:
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.01)
        if number is None:
            (program,) = (each for each in node1.processes() if "python3" in each.command)
            node1.run(["kill", "-KILL", str(program.pid)], check=True)
        else:
            running.send_signal(number)
        _, stderr = running.communicate(timeout=PATIENCE_S)
        if number is None:
            assert running.returncode == 1
            assert re.fullmatch(error("connection was", "node1: ") + "\n", stderr), stderr
        elif number == signal.SIGINT:
            assert (running.returncode, stderr) == (130, "interrupted\n")
        while [
            each for host in (node0, node1) for each in host.processes() if "rsync" in each.command
        ]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not (private / AHEAD / "closed" / "large").exists()
    assert SIZE // 2 < (private / PART / "large").stat().st_size < SIZE
    done, sent = push(hosts, folder)
    assert "rsync found" in done.stdout
    assert sent < SIZE // 2 + SIZE // 10
    assert arrived(node1, folder)


def test_an_rsync_of_before_reaches_no_later_push(hosts: Cluster, folder: Path) -> None:
    """On a slow disk a host's rsync works on for a while after Ctrl-C."""
    node0, node1 = hosts["node0"], hosts["node1"]
    first, later = folder / "1", folder / "2"
    states = [os.urandom(3 * LEAST) for _ in range(3)]
    text = os.urandom(SIZE) * 10  # so that rsync does not end before it is stopped

    def write(begin: bytes, state: int, second: int) -> None:
        first.write_bytes(begin + text)
        later.write_bytes(states[state])
        os.utime(first, ns=(SECOND + len(begin), SECOND + len(begin)))
        os.utime(later, ns=(SECOND + second, SECOND + second))

    def of_rsync() -> list[str]:
        return [str(each.pid) for each in node1.processes() if "rsync --server" in each.command]

    write(b"", 0, 0)
    push(hosts, folder)
    write(b"another begin", 1, 10)
    there = node1.path(folder) / PRIVATE
    deadline = time.monotonic() + PATIENCE_S
    with node0.popen(command(hosts, folder, "2hosts"), cwd=ROOT) as running:
        while not list(there.rglob(".1.*")):
            assert time.monotonic() < deadline
        stopped = of_rsync()
        node1.run(["kill", "-STOP", *stopped], check=True)
        time.sleep(1)  # for the rest to be on its way; sooner only makes the test weaker
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE_S) == 130

    write(b"", 2, 20)
    with (
        links.limited(hosts.hosts, mbit=8),
        node0.popen(command(hosts, folder, "2hosts"), cwd=ROOT) as running,
    ):
        while not (there / "new" / "2").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        node1.run(["kill", "-CONT", *stopped], check=True)
        while of_rsync():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert running.wait(PATIENCE_S) == 0
    assert arrived(node1, folder)


def test_a_disk_without_room_for_parts(hosts: Cluster, folder: Path) -> None:
    """What a push that broke off has left does not keep the next one out."""
    node0, node1 = hosts["node0"], hosts["node1"]
    node1.path(folder).mkdir(parents=True)
    node1.run(["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(folder)], check=True)
    private = node1.path(folder) / PRIVATE
    deadline = time.monotonic() + PATIENCE_S
    try:
        with (
            links.limited(hosts.hosts, mbit=80),
            node0.popen(command(hosts, folder, "2hosts"), cwd=ROOT) as running,
        ):
            while not [
                path for path in private.rglob(".large.*") if path.stat().st_size > SIZE // 2
            ]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            running.send_signal(signal.SIGINT)
            assert running.wait(PATIENCE_S) == 130
            while not list(private.rglob("large")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        push(hosts, folder)
        assert arrived(node1, folder)
    finally:
        node1.run(["umount", str(folder)], check=True)
