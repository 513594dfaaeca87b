"""Faults that break the ssh of a running host until the end of a block.

with faults.no_sshd(cluster["node1"]):
    ...  # ssh node1: connection refused
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from tests.support.cluster import ssh
from tests.support.cluster.host import USER, Arg, Host
from tests.support.cluster.start import Cluster


@contextmanager
def no_sshd(host: Host) -> Iterator[None]:
    """No sshd listens: "Connection refused"."""
    ssh.stop_sshd(host)
    try:
        yield
    finally:
        ssh.start_sshd([host])


@contextmanager
def sshd_with(host: Host, settings: str) -> Iterator[None]:
    """The host's sshd has these settings as well. They count, because the first of a kind does."""
    with no_sshd(host), begins_with(host, "/etc/ssh/sshd_config", settings):
        ssh.start_sshd([host])
        try:
            yield
        finally:
            ssh.stop_sshd(host)


@contextmanager
def unknown_key(cluster: Cluster, host: Host) -> Iterator[None]:
    """No host knows the key of this host: "Host key verification failed."."""
    with ExitStack() as stack:
        for peer in cluster.hosts:
            for user in ("root", USER):
                path = f"{peer.home(user)}/.ssh/known_hosts"
                stack.enter_context(without_lines(peer, path, f"{host.name},"))
        yield


@contextmanager
def key_refused(host: Host) -> Iterator[None]:
    """The host accepts no user's key: "Permission denied (publickey)."."""
    with ExitStack() as stack:
        for user in ("root", USER):
            path = f"{host.home(user)}/.ssh/authorized_keys"
            stack.enter_context(changed(host, path, lambda _: ""))
        yield


@contextmanager
def another_port(cluster: Cluster, host: Host, port: int) -> Iterator[None]:
    """The host's sshd listens on this port alone. The other hosts know its key there."""
    with ExitStack() as stack:
        for peer in cluster.hosts:
            for user in ("root", USER):
                path = f"{peer.home(user)}/.ssh/known_hosts"
                keys = peer.path(path).read_text().splitlines()
                (key,) = (line for line in keys if line.startswith(f"{host.name},"))
                there = f"[{host.name}]:{port},[{host.address}]:{port} {key.partition(' ')[2]}\n"
                stack.enter_context(changed(peer, path, lambda keys, there=there: keys + there))
        stack.enter_context(sshd_with(host, f"Port {port}\n"))
        yield


@contextmanager
def another_user(host: Host) -> Iterator[None]:
    """root of any host logs in to this host as `USER`, and not as root."""
    keys = {user: f"{host.home(user)}/.ssh/authorized_keys" for user in ("root", USER)}
    texts = {user: host.path(path).read_text() for user, path in keys.items()}
    with (
        changed(host, keys["root"], lambda _: ""),
        changed(host, keys[USER], lambda keys: keys + texts["root"]),
    ):
        yield


@contextmanager
def unreachable(host: Host) -> Iterator[None]:
    """The host's link is down, so connections to it time out."""
    host.link("down")
    try:
        yield
    finally:
        host.link("up")


def firewall(host: Host, verdict: str) -> AbstractContextManager[None]:
    """The host takes connections to its sshd alone. Others: "drop", or "reject with tcp reset"."""
    return _rule(host, f"tcp flags & (syn|ack) == syn tcp dport != 22 {verdict}")


def dropped_port(host: Host, port: str) -> AbstractContextManager[None]:
    """No packet from this TCP port of another host reaches the host, also of open connections."""
    return _rule(host, f"tcp sport {port} drop")


@contextmanager
def _rule(host: Host, rule: str) -> Iterator[None]:
    rules = [
        "table inet test {",
        "chain in {",
        "type filter hook input priority 0; policy accept;",
        "iif lo accept",
        rule,
        *("}", "}"),
    ]
    host.run(["nft", "-f", "-"], stdin="\n".join([*rules, ""]), check=True)
    try:
        yield
    finally:
        host.run(["nft", "delete", "table", "inet", "test"], check=True)


@contextmanager
def mounted(host: Host, path: Arg, *options: str, what: Arg = "tmpfs") -> Iterator[None]:
    """A folder of the host is a file system in memory with these options, or a file or folder another one."""
    kind = ("-t", "tmpfs") if what == "tmpfs" else ("--bind",)
    host.run(["mount", *kind, *options, what, path], check=True)
    try:
        yield
    finally:
        host.run(["umount", path], check=True)


@contextmanager
def changed(host: Host, path: str, change: Callable[[str], str]) -> Iterator[None]:
    """A file of the host has another text, which may be its first one."""
    file = host.path(path)
    before = file.read_text() if file.exists() else None
    file.write_text(change(before or ""))  # in place, which keeps its owner and mode
    try:
        yield
    finally:
        file.unlink() if before is None else file.write_text(before)


def begins_with(host: Host, path: str, text: str) -> AbstractContextManager[None]:
    """A file of the host has this text before its own."""
    return changed(host, path, lambda before: text + before)


def without_lines(host: Host, path: str, words: str) -> AbstractContextManager[None]:
    """A file of the host lacks the lines that have these words."""

    def others(text: str) -> str:
        return "".join(line for line in text.splitlines(keepends=True) if words not in line)

    return changed(host, path, others)
