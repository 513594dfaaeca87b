"""`mpiddp hosts keys`: make ssh reach every host without a question.

    mpiddp hosts keys hostfiles/two_nodes

For each host that ssh does not reach, ssh itself shows the host's key and asks, and ssh-copy-id copies the
user's key. Hosts behind another one need ProxyJump in ~/.ssh/config first.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, UserError
from mpiddp.hosts.complaints import Answer
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.ssh import ask_hosts, other_hosts
from mpiddp.hosts.transport import Transport
from mpiddp.hosts.where import add_file

_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")  # ssh offers these by itself


def add_arguments(parser: OneSentenceParser) -> None:
    add_file(parser)


def main(_: argparse.Namespace, hosts: Hosts) -> int:
    """Make a key if there is none, and copy it. Raises UserError if a host accepts no login then."""
    others = other_hosts(hosts.hosts)
    closed = _closed(others, hosts.transport)
    asked = [  # a yes or a password makes these logins possible
        host
        for host, answer in closed.items()
        if re.search("(?m)^Host key verification failed|^.*Permission denied", answer.stderr)
    ]
    if asked:
        key = _key()
        for host in asked:  # one after the other: ssh asks for a yes and a password
            port = ["-p", str(host.port)] if host.port else []
            subprocess.run(["ssh-copy-id", "-i", str(key), *port, "--", host.ssh_target])
        closed = _closed(others, hosts.transport)
    if closed:
        raise UserError("\n".join(answer.why for answer in closed.values()))
    names = ", ".join(host.name for host in others) or "every host"
    print(f"ssh reaches {names} without a question")
    return DONE


def _closed(hosts: Sequence[Host], transport: Transport) -> dict[Host, Answer]:
    """The answers of hosts to which ssh cannot log in without a question."""
    answers = ask_hosts(hosts, "print(0)", transport=transport)
    return {host: answer for host, answer in answers.items() if not answer.has_begun}


def _key() -> Path:
    """The user's public key. A private key is never replaced."""
    folder = Path.home() / ".ssh"
    for key in (folder / name for name in _KEYS):
        public = key.with_suffix(".pub")
        if key.exists() and not public.exists():  # ssh-keygen may ask for a passphrase
            done = subprocess.run(["ssh-keygen", "-y", "-f", str(key)], stdout=subprocess.PIPE)
            if done.returncode:
                raise UserError(f"{key}: ssh-keygen cannot read this key.")
            public.write_bytes(done.stdout)
        if public.exists():
            return public
    folder.mkdir(mode=0o700, exist_ok=True)
    key = folder / _KEYS[0]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    print(f"{key}: a new key without a passphrase", flush=True)
    return key.with_suffix(".pub")
