"""The command line that runs a program on another host.

Tests mpiddp/hosts/ssh.py. No host is contacted here.
python -m pytest tests/unit/hosts/test_ssh_command.py
"""

from __future__ import annotations

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import shell_command
from mpiddp.hosts.transport import QRSH, SSH


def test_the_command_for_a_host() -> None:
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    options += ["-o", "ServerAliveInterval=15"]
    *command, line = shell_command(Host("192.0.2.7", user="ann", port=2222), "date", SSH)
    assert command == ["ssh", *options, "-p", "2222", "-T", "--", "ann@192.0.2.7"]
    assert line == "exec sh -c date"
    assert shell_command(Host("192.0.2.7"), "date", SSH)[:-1] == [
        "ssh",
        *options,
        "-T",
        "--",
        "192.0.2.7",
    ]
    assert shell_command(Host("192.0.2.7"), "date", QRSH) == ["qrsh", "-inherit", "192.0.2.7", line]
    assert shell_command(Host("localhost"), "date", SSH) == ["sh", "-c", "date"]
