"""The sentences for ssh's own errors, each with the command that fixes it."""

from __future__ import annotations

import re
import signal
import socket

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import CONNECT_TIMEOUT_S, NO_PROGRAM

# What ssh prints where a jump host (ProxyJump) fails: the reason, then that the host said nothing. Where only
# the host behind it is not reached, ssh says "stdio forwarding failed" before.
_JUMP_FAILED = re.compile(
    r"^(?!Warning: |stdio forwarding failed)(.+)\n"
    r"kex_exchange_identification: .*\n.* UNKNOWN port 65535",
    re.MULTILINE,
)
# What the sshd of a jump host answers where it cannot, or may not, reach the host behind it.
_NOT_BEHIND = re.compile(r"^channel \d+: open failed: (?:connect failed: )?(.+)$", re.MULTILINE)


def ssh_complaint(host: Host, errors: str) -> str:
    """The sentence for ssh's own error, with the command that fixes it."""
    name, here = host.name, socket.gethostname()
    lines = "\n".join(errors.splitlines())
    if jump := _JUMP_FAILED.search(lines):
        why = jump[1].rstrip(".")
        return f"ssh {name}: the jump host on the way failed ({why}). Try: {ssh_line(host)} true"
    if (behind := _NOT_BEHIND.search(lines)) and behind[1] != "Connection refused":
        return (
            f"ssh {name}: the jump host on the way does not reach it ({behind[1].rstrip('.')}). "
            f"Try: {ssh_line(host)} true"
        )
    if "Could not resolve hostname" in errors:
        return f"{name}: cannot be resolved from {here}. Add it to DNS or /etc/hosts."
    if "IDENTIFICATION HAS CHANGED" in errors:
        return (
            f"ssh {name}: its host key has changed. Check that it is the same host, "
            f"then run: ssh-keygen -R {name}"
        )
    if "Host key verification failed" in errors:
        return (
            f"ssh {name}: its host key is unknown. "
            f"Check it, then: ssh-keyscan {_port(host)}{name} >> ~/.ssh/known_hosts"
        )
    if denied := re.search(r"Permission denied \(([^)]*)\)", errors):
        return (
            f"ssh {name}: permission denied ({denied[1]}). Run: ssh-copy-id "
            f"{_port(host)}{host.ssh_target}"
        )
    if "Connection refused" in errors:
        return (
            f"ssh {name}: connection refused. "
            f"Start sshd there, or give its port in the hostfile: {name} port=N"
        )
    if "No route to host" in errors or "Network is unreachable" in errors:
        return f"ssh {name}: no route from {here}. Check that the host is on and the network is up."
    if "timed out" in errors:
        return (
            f"ssh {name}: no answer in {CONNECT_TIMEOUT_S} s. "
            "Check that the host is on and the network is up."
        )
    last = errors.strip().splitlines()[-1:] or ["no output"]
    return f"ssh {name} failed: {last[0]}. Try: {ssh_line(host)} true"


def login_failed(
    host: Host, exit_code: int | None, errors: str, *, limit_s: float, missing: str
) -> str:
    """The sentence for a program that did not begin on a host.

    Args:
        exit_code: of ssh; None, or that of SIGKILL, if it was ended after `limit_s`.
        errors: what it printed on stderr.
        missing: the sentence for a host that does not have the program.
    """
    if exit_code == NO_PROGRAM:
        return missing
    if exit_code in (None, -signal.SIGKILL):
        return f"ssh {host.name}: no answer in {limit_s:g} s. Try: {ssh_line(host)} true"
    return ssh_complaint(host, errors)


def ssh_line(host: Host) -> str:
    """The command that a person types to log in."""
    return f"ssh {_port(host)}{host.ssh_target}"


def _port(host: Host) -> str:
    """The port option of ssh, ssh-copy-id and ssh-keyscan."""
    return f"-p {host.port} " if host.port else ""
