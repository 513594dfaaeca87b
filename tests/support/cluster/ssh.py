"""ssh in a test cluster: new keys, known hosts, and one sshd per host.

ssh verifies host keys as usual. The known_hosts of every host have the keys of all hosts.
"""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.cluster import needs
from tests.support.cluster.host import ETC, TMPDIR, USER, USER_ID, Host
from tests.support.patience import PATIENCE_S, eventually

# By default, a login takes 60 ms more CPU time, and each byte four times as much.
_SSHD_CONFIG = (ETC / "sshd_config").read_text(encoding="utf-8")


class Key(NamedTuple):
    """A key pair in the format of ssh-keygen."""

    private: str
    public: str


def make_keys(count: int) -> list[Key]:
    """`count` new Ed25519 key pairs."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(index)) for index in range(count)]
        command = [needs.tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "mpiddp-test"]
        for file in files:
            subprocess.run([*command, "-f", file], check=True, timeout=PATIENCE_S)
        return [Key(file.read_text(), file.with_suffix(".pub").read_text()) for file in files]


def configure_ssh(hosts: Sequence[Host]) -> None:
    """Let root and `USER` of every host log in to every host with `ssh NAME`."""
    host_keys = make_keys(len(hosts))
    user_keys = make_keys(2)
    pairs = [*zip(hosts, host_keys, strict=True)]
    known_hosts = "".join(f"{host.name},{host.address} {key.public}" for host, key in pairs)
    for host, host_key in pairs:
        _add_user(host)
        _write(host, "/etc/ssh/ssh_config", "")  # OpenSSH's defaults instead of this machine's
        config = _SSHD_CONFIG.format(address=host.address, tmpdir=TMPDIR)
        _write(host, "/etc/ssh/sshd_config", config)
        _write(host, "/etc/ssh/ssh_host_key", host_key.private)
        for (user, uid), key in zip((("root", 0), (USER, USER_ID)), user_keys, strict=True):
            folder = f"{host.home(user)}/.ssh"
            host.path(folder).mkdir(mode=0o700)
            os.chown(host.path(folder), uid, uid)
            _write(host, f"{folder}/id_ed25519", key.private, uid)
            _write(host, f"{folder}/authorized_keys", key.public, uid)
            _write(host, f"{folder}/known_hosts", known_hosts, uid)


def start_sshd(hosts: Sequence[Host]) -> None:
    """Start the sshd of each host in parallel, and wait until they listen."""
    sshd = [needs.tool("sshd"), "-E", "/run/sshd.log"]
    starting = [(host, host.popen(sshd, stdout=None, stderr=None)) for host in hosts]
    for host, process in starting:
        if process.wait(timeout=PATIENCE_S) != 0:
            raise RuntimeError(f"sshd on {host.name}: {host.path('/run/sshd.log').read_text()}")
        eventually(host.path("/run/sshd.pid").exists, poll_s=0.002)  # written once it listens


def stop_sshd(host: Host) -> None:
    """Stop a host's listening sshd. Existing logins are not affected."""
    pid = host.path("/run/sshd.pid").read_text().strip()
    host.run(["kill", pid], check=True)
    pid_file = host.path("/run/sshd.pid")
    eventually(lambda: not pid_file.exists(), poll_s=0.002)  # it removes the file when it ends


def _add_user(host: Host) -> None:
    """Add `USER` to the host's own user files, without a password."""
    home = f"/run/home/{USER}"
    host.path(home).mkdir()
    os.chown(host.path(home), USER_ID, USER_ID)
    for file, line in (
        ("/etc/passwd", f"{USER}:x:{USER_ID}:{USER_ID}::{home}:/bin/bash"),
        ("/etc/group", f"{USER}:x:{USER_ID}:"),
        ("/etc/shadow", f"{USER}:*:19000:0:99999:7:::"),
    ):
        with host.path(file).open("a") as users:
            users.write(line + "\n")


def _write(host: Host, path: str, text: str, owner: int = 0) -> None:
    file = host.path(path)
    file.touch(mode=0o600)
    file.write_text(text)
    os.chown(file, owner, owner)
