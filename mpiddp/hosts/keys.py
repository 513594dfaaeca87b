"""`mpiddp hosts keys`: make ssh reach every host without a question.

    mpiddp hosts keys hostfiles/two_nodes

For each host that ssh does not reach, ssh itself shows the host's key and asks, and ssh-copy-id copies the
key of the user's agent, or that of a file. Hosts behind another one need ProxyJump in ~/.ssh/config first.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from mpiddp.errors import DONE, UserError
from mpiddp.hosts.complaints import Answer, failure_of, settings
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.ssh import ask_hosts, other_hosts
from mpiddp.hosts.transport import Transport
from mpiddp.text import with_fix


def main(_: argparse.Namespace, hosts: Hosts) -> int:
    """Make a key if there is none, and copy it. Raises `failure_of` if a host accepts no login then."""
    others = other_hosts(hosts.hosts)
    closed = _closed(others, hosts.transport)
    asked = [  # a yes or a password makes these logins possible
        host
        for host, answer in closed.items()
        if re.search("(?m)^Host key verification failed|^.*Permission denied", answer.stderr)
    ]
    if asked:
        with _public_key(asked[0]) as key:
            for host in asked:  # one after the other: ssh asks for a yes and a password
                port = ["-p", str(host.port)] if host.port else []
                # -f: the private key may be in an agent alone
                subprocess.run(["ssh-copy-id", "-f", "-i", key, *port, "--", host.ssh_target])
        closed = _closed(others, hosts.transport)
    if closed:
        raise failure_of(closed.values(), [answer.why for answer in closed.values()])
    names = ", ".join(host.name for host in others) or "every host"
    print(f"{hosts.transport.name} reaches {names} without a question")
    return DONE


def _closed(hosts: Sequence[Host], transport: Transport) -> dict[Host, Answer]:
    """The answers of hosts to which ssh cannot log in without a question."""
    answers = ask_hosts(hosts, "print(0)", transport=transport)
    return {host: answer for host, answer in answers.items() if not answer.has_begun}


@contextmanager
def _public_key(host: Host) -> Iterator[str]:
    """The file of a public key that ssh offers to this host: an agent's first, or that of an IdentityFile.

    Without one, a new key is made after a yes. A private key is never replaced.
    """
    agent = subprocess.run(["ssh-add", "-L"], capture_output=True)
    if agent.returncode == 0:
        with NamedTemporaryFile(suffix=".pub") as file:
            file.write(agent.stdout.splitlines(keepends=True)[0])
            file.flush()
            yield file.name
        return
    keys = [Path(name).expanduser() for name in settings(host, "identityfile")]
    key = next(filter(Path.exists, keys), None) or _new_key()
    public = key.with_name(f"{key.name}.pub")
    if not public.exists():  # ssh-keygen may ask for a passphrase
        done = subprocess.run(["ssh-keygen", "-y", "-f", str(key)], stdout=subprocess.PIPE)
        if done.returncode:
            raise UserError(f"{key}: ssh-keygen cannot read this key.")
        public.write_bytes(done.stdout)
    yield str(public)


def _new_key() -> Path:
    key = Path.home() / ".ssh/id_ed25519"
    question = f"No agent and no file has a key. Make {key}, without a passphrase? [y/N] "
    if not sys.stdin.isatty() or input(question).lower() not in ("y", "yes"):
        raise UserError(with_fix("there is no ssh key.", "ssh-keygen -t ed25519"))
    key.parent.mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    return key
