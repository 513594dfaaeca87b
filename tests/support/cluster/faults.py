"""Faults that break the ssh of a running host until the end of a block.

with faults.no_sshd(cluster["node1"]):
    ...  # ssh node1: connection refused
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from tests.support.cluster import ssh
from tests.support.cluster.host import USER, Arg, Host
from tests.support.cluster.start import Cluster
from tests.support.ranks import ROOT


@contextmanager
def between(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Call the one, and at the end of the block the other."""
    begin()
    try:
        yield
    finally:
        end()


def shelled(host: Host, begin: str, end: str) -> AbstractContextManager[None]:
    """Run a shell command on the host, and another one at the end of the block."""
    begun, ended = (partial(host.run, ["sh", "-ec", script], check=True) for script in (begin, end))
    return between(begun, ended)


def no_sshd(host: Host) -> AbstractContextManager[None]:
    """No sshd listens: "Connection refused"."""
    return between(partial(ssh.stop_sshd, host), partial(ssh.start_sshd, [host]))


@contextmanager
def sshd_with(host: Host, settings: str) -> Iterator[None]:
    """The host's sshd has these settings as well. They count, because the first of a kind does."""
    with (
        no_sshd(host),
        begins_with(host, "/etc/ssh/sshd_config", settings),
        between(partial(ssh.start_sshd, [host]), partial(ssh.stop_sshd, host)),
    ):
        yield


def unknown_key(cluster: Cluster, host: Host) -> AbstractContextManager[None]:
    """No host knows the key of this host: "Host key verification failed."."""
    return _changed_keys(cluster.hosts, "known_hosts", _without(f"{host.name},"))


def key_refused(host: Host) -> AbstractContextManager[None]:
    """The host accepts no user's key: "Permission denied (publickey)."."""
    return _changed_keys([host], "authorized_keys", lambda _: "")


@contextmanager
def another_port(cluster: Cluster, host: Host, port: int) -> Iterator[None]:
    """The host's sshd listens on this port alone. The other hosts know its key there."""

    def with_port(keys: str) -> str:
        (key,) = (line for line in keys.splitlines() if line.startswith(f"{host.name},"))
        return f"{keys}[{host.name}]:{port},[{host.address}]:{port} {key.partition(' ')[2]}\n"

    changes = _changed_keys(cluster.hosts, "known_hosts", with_port)
    with changes, sshd_with(host, f"Port {port}\n"):
        yield


@contextmanager
def another_user(host: Host) -> Iterator[None]:
    """root of any host logs in to this host as `USER`, and not as root."""
    of_root, of_user = (f"{host.home(user)}/.ssh/authorized_keys" for user in ("root", USER))
    more = host.path(of_root).read_text()
    with changed(host, of_root, lambda _: ""), changed(host, of_user, lambda keys: keys + more):
        yield


def unreachable(host: Host) -> AbstractContextManager[None]:
    """The host's link is down, so connections to it time out."""
    return between(partial(host.link, "down"), partial(host.link, "up"))


def firewall(host: Host, verdict: str) -> AbstractContextManager[None]:
    """The host takes connections to its sshd alone. Others: "drop", or "reject with tcp reset"."""
    return _rule(host, f"tcp flags & (syn|ack) == syn tcp dport != 22 {verdict}")


def dropped_port(host: Host, port: str) -> AbstractContextManager[None]:
    """No packet from this TCP port of another host reaches the host, also of open connections."""
    return _rule(host, f"tcp sport {port} drop")


def _rule(host: Host, rule: str) -> AbstractContextManager[None]:
    chain = f"type filter hook input priority 0; policy accept; iif lo accept; {rule};"
    table = f"nft 'table inet test {{ chain in {{ {chain} }}; }}'"
    return shelled(host, table, "nft delete table inet test")


def mounted(
    host: Host, path: Arg, *options: str, what: Arg = "tmpfs"
) -> AbstractContextManager[None]:
    """A folder of the host is a file system in memory with these options, or a file or folder another one."""
    kind = ("-t", "tmpfs") if what == "tmpfs" else ("--bind",)
    mount = shlex.join(map(str, ["mount", *kind, *options, what, path]))
    return shelled(
        host, beside_the_checkout(mount, path), f"umount --recursive {shlex.quote(str(path))}"
    )


def beside_the_checkout(mount: str, path: Arg) -> str:
    """The shell command, which mounts something over this folder, and leaves a checkout below it in its place."""
    if not ROOT.is_relative_to(path):
        return mount
    again = f"mkdir -p {ROOT} && mount --bind /run/checkout {ROOT} && umount /run/checkout"
    return f"mkdir -p /run/checkout && mount --bind {ROOT} /run/checkout && {mount} && {again}"


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


@contextmanager
def _changed_keys(hosts: Sequence[Host], name: str, change: Callable[[str], str]) -> Iterator[None]:
    """This file in ~/.ssh has another text, on each of these hosts and for both users."""
    with ExitStack() as stack:
        for host in hosts:
            for user in ("root", USER):
                stack.enter_context(changed(host, f"{host.home(user)}/.ssh/{name}", change))
        yield


def begins_with(host: Host, path: str, text: str) -> AbstractContextManager[None]:
    """A file of the host has this text before its own."""
    return changed(host, path, lambda before: text + before)


def without_lines(host: Host, path: str, words: str) -> AbstractContextManager[None]:
    """A file of the host lacks the lines that have these words."""
    return changed(host, path, _without(words))


def _without(words: str) -> Callable[[str], str]:
    def others(text: str) -> str:
        return "".join(line for line in text.splitlines(keepends=True) if words not in line)

    return others
