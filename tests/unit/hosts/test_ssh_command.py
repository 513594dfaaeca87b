"""The command line that runs a program on another host.

Tests mpiddp/hosts/ssh.py. No host is contacted here.
python -m pytest tests/unit/hosts/test_ssh_command.py
"""

from __future__ import annotations

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import _SHELL_LINE, _command
from mpiddp.hosts.transport import QRSH, SSH


def test_the_command_for_a_host() -> None:
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-T"]
    *command, line = _command(Host("192.0.2.7", user="ann", port=2222), SSH)
    assert command == ["ssh", *options, "-p", "2222", "--", "ann@192.0.2.7"]
    assert line.startswith("exec sh -c ")
    assert _command(Host("192.0.2.7"), SSH)[:-1] == ["ssh", *options, "--", "192.0.2.7"]
    assert _command(Host("192.0.2.7"), QRSH) == ["qrsh", "-inherit", "192.0.2.7", line]
    assert _command(Host("localhost"), SSH) == ["sh", "-c", _SHELL_LINE]
