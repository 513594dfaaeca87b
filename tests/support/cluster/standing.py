"""Start clusters: one process per host (pid 1 of its pid namespace), and one for the switch.

The kernel kills these processes when the process that started them ends, and a host ends with its pid 1.
Only a detached cluster runs on, until it is taken down.
"""

from __future__ import annotations

import json
import os
import pwd
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster import needs, program, ssh
from tests.support.cluster.host import Host, configure
from tests.support.cluster.layout import (
    NETWORK,
    PLAIN,
    Layout,
    Link,
    etc_hosts,
    host_address,
    host_links,
    host_name,
)
from tests.support.cluster.state import (
    Cluster,
    alive,
    identity,
    record,
    reserve,
    standing,
    take_down,
)

_NODE = Path(__file__).with_name("node.py")
_REPOSITORY = Path(__file__).parents[3]
_NSSWITCH = "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"


@contextmanager
def up(count: int = 3, *, layout: Layout = PLAIN, name: str | None = None) -> Iterator[Cluster]:
    """A cluster of `count` hosts named node0, node1, …, until the end of the block.

    Raises:
        RuntimeError: a cluster of that name exists already.
    """
    cluster = stand_up(count, layout=layout, name=name or f"test-{os.urandom(3).hex()}")
    try:
        yield cluster
    finally:
        take_down(cluster.name)


def stand_up(count: int, *, layout: Layout = PLAIN, name: str, detached: bool = False) -> Cluster:
    """Start a cluster, to be ended by `take_down`. A detached cluster survives this process."""
    for stale in [other for other in standing() if not alive(other)]:
        take_down(stale)
    folder = reserve(name)
    owner = identity(os.getpid())
    started: list[tuple[int, int]] = []
    try:
        hub = _spawn(["unshare", "--net", "sleep", "infinity"], detached)
        started.append(hub)
        started += [
            _spawn(_node(index, folder / "shared", apart=layout.apart and index > 0), detached)
            for index in range(count)
        ]
        processes = tuple(identity(pid) for pid, _ in started)
        record(folder, owner=owner, processes=processes)
        hosts = tuple(
            _host(index, layout, _pid_1(pid, output), hub[0])
            for index, (pid, output) in enumerate(started[1:])
        )
        _connect(hosts, layout)
        for index, host in enumerate(hosts):
            host.path("/etc/hosts").write_text(etc_hosts(layout, index, count))
            host.path("/etc/hostname").write_text(host.name + "\n")
            host.path("/etc/nsswitch.conf").write_text(_NSSWITCH)
        ssh.configure_ssh(hosts)
        ssh.start_sshd(hosts)
        record(folder, owner=None if detached else owner, processes=processes, hosts=hosts)
    except BaseException:  # leave no incomplete cluster, even after Ctrl-C
        record(folder, owner=owner, processes=tuple(identity(pid) for pid, _ in started))
        take_down(name)
        raise
    finally:
        for _, output in started:
            os.close(output)
    return Cluster(name, hosts, folder / "shared")


def _spawn(command: list[str], detached: bool) -> tuple[int, int]:
    """Start a process, and return its pid and a file descriptor of its output.

    The kernel kills it when this process ends, unless it is `detached`.
    """
    if not detached:
        command = ["setpriv", "--pdeathsig", "KILL", *command]
    output, write = os.pipe()
    pid = os.posix_spawn(
        needs.tool(command[0]),
        command,
        {"PATH": needs.PATH},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, write, 1),
            (os.POSIX_SPAWN_DUP2, write, 2),
        ],
        setsid=True,  # Ctrl-C must reach only the tests, which then take the cluster down
    )
    os.close(write)
    return pid, output


def _node(index: int, shared: Path, *, apart: bool) -> list[str]:
    spec = {
        "name": host_name(index),
        "shared": str(shared),
        "replaced_folders": [] if apart else _replaced_folders(),
        "apart": apart,
    }
    return ["unshare", *needs.NAMESPACES, sys.executable, "-I", "-S", str(_NODE), json.dumps(spec)]


def _replaced_folders() -> list[tuple[str, list[str]]]:
    """The folders to replace, outermost first, each with the names of the subfolders to keep.

    Every user must reach Python and this repository. root's home is private to each host, but they may be in
    it, or in a folder that only root can enter.
    """
    home = Path(pwd.getpwuid(0).pw_dir)
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    needed = {Path(prefix) for prefix in prefixes} | {_REPOSITORY}
    needed |= {path.resolve() for path in needed}
    parents = {parent for path in needed for parent in path.parents}
    closed = {path for path in parents if not path.stat().st_mode & stat.S_IXOTH}
    return [(str(folder), _keep(folder, home, needed)) for folder in sorted(closed | {home})]


def _keep(folder: Path, home: Path, needed: set[Path]) -> list[str]:
    """The subfolders to keep: in root's home only the needed ones, elsewhere all."""
    if folder == home:
        inside = (path for path in needed if home in path.parents)
        return sorted({path.relative_to(home).parts[0] for path in inside})
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())


def _pid_1(unshare: int, output: int) -> int:
    """Wait until a host is ready, and return the pid of its pid 1. Raises RuntimeError if it ends."""
    printed = b""
    while not printed.endswith(b"ready\n"):
        more = os.read(output, 4096)
        if not more:
            raise RuntimeError(f"a test host did not start: {printed.decode()}")
        printed += more
    pid = program.first_child(unshare)
    if pid is None:
        raise RuntimeError("a test host ended as soon as it was ready")
    return pid


def _host(index: int, layout: Layout, pid: int, hub: int) -> Host:
    link = host_links(layout, index)[0]
    name = host_name(index)
    return Host(name, host_address(index), link.interface, pid, hub, _port(name, link))


def _port(host: str, link: Link) -> str:
    return f"{host}-{link.interface}"


def _connect(hosts: Sequence[Host], layout: Layout) -> None:
    """Connect every host to the switch, with the links that are live."""
    hub = ["link add switch type bridge", "link set switch up"]
    commands: dict[int, list[str]] = {}
    for index, host in enumerate(hosts):
        own = ["link set lo up"]
        for link in host_links(layout, index):
            port = _port(host.name, link)
            hub.append(f"link add {port} type veth peer name {link.interface} netns {host.pid}")
            if link.live:
                hub.append(f"link set {port} master switch")
            hub.append(f"link set {port} up")
            own.append(f"addr add {link.address} dev {link.interface}")
            own.append(f"link set {link.interface} up")
            if link.live:  # or each login would wait for two delayed acknowledgements of 40 ms
                route = f"{NETWORK}.0/24 dev {link.interface} proto kernel src {host.address}"
                own.append(f"route change {route} quickack 1")
        commands[host.pid] = own
    configure(hosts[0].hub_pid, hub)
    for pid, own in commands.items():
        configure(pid, own)
