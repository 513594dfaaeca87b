"""Start clusters: one process per host (pid 1 of its pid namespace), and one for the switch.

The kernel kills these processes when the process that started them ends, and a host ends with its pid 1.
"""

import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import needs, program, ssh
from tests.support.cluster.host import Host, configure
from tests.support.cluster.layout import (
    NETWORK,
    PLAIN,
    Layout,
    etc_hosts,
    host_address,
    host_links,
    host_name,
)

STATE = Path("/run/mpiddp-cluster")  # with a folder PID-… for each cluster of a process
_NODE = Path(__file__).with_name("node.py")
_REPOSITORY = Path(__file__).parents[3]
_NSSWITCH = "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    `shared` is a folder that has the same path on this machine and for every user of every host. The hosts
    also share the rest of the file system, except /etc, /run, /sys, /dev/shm and the home folders.
    """

    hosts: tuple[Host, ...]
    shared: Path

    def __getitem__(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(f"no host {name}; there are {', '.join(host.name for host in self.hosts)}")


@contextmanager
def up(count: int = 3, *, layout: Layout = PLAIN) -> Iterator[Cluster]:
    """A cluster of `count` hosts named node0, node1, …, until the end of the block."""
    _remove_stale_folders()
    folder = STATE / f"{os.getpid()}-{os.urandom(3).hex()}"
    shared = folder / "shared"
    shared.mkdir(parents=True)
    shared.chmod(0o1777)
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(_spawn(["unshare", "--net", "sleep", "infinity"]))
        started += [
            _spawn(_node(index, shared, apart=layout.apart and index > 0)) for index in range(count)
        ]
        hub, *nodes = started
        hosts = tuple(
            Host(host_name(n), host_address(n), host_links(layout, n)[0].interface, pid, hub.pid)
            for n, pid in enumerate(map(_pid_1, nodes))
        )
        _connect(hosts, layout)
        for index, host in enumerate(hosts):
            host.path("/etc/hosts").write_text(etc_hosts(layout, index, count))
            host.path("/etc/hostname").write_text(host.name + "\n")
            host.path("/etc/nsswitch.conf").write_text(_NSSWITCH)
        ssh.configure_ssh(hosts)
        ssh.start_sshd(hosts)
        yield Cluster(hosts, shared)
    finally:
        for process in started:
            _end(process)
        shutil.rmtree(folder)


def _remove_stale_folders() -> None:
    """Remove the files that killed processes have left."""
    for folder in STATE.glob("*-*"):
        if not Path("/proc", folder.name.partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _spawn(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process that the kernel kills when this one ends."""
    return subprocess.Popen(
        [needs.tool("setpriv"), "--pdeathsig", "KILL", *command],
        env={"PATH": needs.PATH},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C must reach only the tests, which then end the cluster
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a host or the switch. The pid 1 of a host ends after all other processes of the host."""
    with suppress(ProcessLookupError):
        os.kill(program.first_child(process.pid) or process.pid, signal.SIGKILL)
    process.communicate()


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


def _pid_1(node: subprocess.Popen[bytes]) -> int:
    """Wait until a host is ready, and return the pid of its pid 1. Raises RuntimeError if it ends."""
    assert node.stdout is not None
    printed = []
    for line in node.stdout:
        if line == b"ready\n" and (pid := program.first_child(node.pid)):
            return pid
        printed.append(line.decode())
    raise RuntimeError(f"a test host did not start: {''.join(printed)}")


def _connect(hosts: Sequence[Host], layout: Layout) -> None:
    """Connect every host to the switch, with the links that are live."""
    hub = ["link add switch type bridge", "link set switch up"]
    commands: dict[int, list[str]] = {}
    for index, host in enumerate(hosts):
        of_host = ["link set lo up"]
        for link in host_links(layout, index):
            port = f"{host.name}-{link.interface}"
            hub.append(f"link add {port} type veth peer name {link.interface} netns {host.pid}")
            if link.live:
                hub.append(f"link set {port} master switch")
            hub.append(f"link set {port} up")
            of_host.append(f"addr add {link.address} dev {link.interface}")
            of_host.append(f"link set {link.interface} up")
            if link.live:  # or each login would wait for two delayed acknowledgements of 40 ms
                route = f"{NETWORK}.0/24 dev {link.interface} proto kernel src {host.address}"
                of_host.append(f"route change {route} quickack 1")
        commands[host.pid] = of_host
    configure(hosts[0].hub_pid, hub)
    for pid, of_host in commands.items():
        configure(pid, of_host)
