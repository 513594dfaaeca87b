"""The agents of `mpiddp doctor`: one connection to each host, asked all at once.

with Agents(hosts, transport) as agents:
    answers = agents.ask("facts", {...}, limit_s=30)
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, cast

from mpiddp.doctor import agent, network
from mpiddp.hosts import interfaces
from mpiddp.hosts.cluster.connection import FIRST, LOGIN_S, START, Failed, Lost, Peer, killed_after
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.hosts.sources import program_with
from mpiddp.hosts.ssh import shell_command
from mpiddp.hosts.ssh_complaints import login_failed
from mpiddp.hosts.transport import Transport

_FILES_PER_HOST = 3
_END_S = 3.0


def agent_program() -> bytes:
    """The program of a host: the agent, and what it imports."""
    begin = f"sys.modules[{agent.__name__!r}].main()"
    return program_with((interfaces, network, agent), begin, first=FIRST).encode()


class Agents:
    """The agents of all hosts that can be reached. A host that has failed once is asked no more.

    Attributes:
        failures: a sentence for each host whose agent does not answer.
        refusals: each question that failed on a host whose agent goes on, and a sentence.
        skews: the seconds by which each host's clock is ahead of this one's.
    """

    def __init__(self, hosts: Sequence[Host], transport: Transport) -> None:
        allow_open(_FILES_PER_HOST * len(hosts) + OPEN_BESIDES)
        program = agent_program()
        self._peers = {host: Peer(shell_command(host, START, transport), program) for host in hosts}
        self.failures: dict[Host, str] = {}
        self.refusals: list[tuple[str, str]] = []
        self.skews: dict[Host, float] = {}

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers.values():  # each agent then removes what it has written
            with contextlib.suppress(OSError):
                cast(IO[bytes], peer.process.stdin).close()
        deadline = time.monotonic() + _END_S
        for peer in self._peers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.process.wait(max(0.0, deadline - time.monotonic()))
            peer.close()

    @property
    def hosts(self) -> list[Host]:
        """The hosts that have answered so far, in their order."""
        return [host for host in self._peers if host not in self.failures]

    @property
    def greetings(self) -> dict[Host, str]:
        """What the start-up files of a shell have printed before the agent could."""
        return {host: peer.greeting.decode(errors="replace") for host, peer in self._peers.items()}

    def ask(self, question: str, argument: Any, *, limit_s: float) -> dict[Host, Any]:
        """Ask all hosts the same. Returns the answers; `failures` and `refusals` say why one has none."""
        return self.ask_each(question, dict.fromkeys(self.hosts, argument), limit_s=limit_s)

    def ask_each(
        self, question: str, arguments: Mapping[Host, Any], *, limit_s: float
    ) -> dict[Host, Any]:
        """The same with an argument for each host."""
        asked = [host for host in arguments if host not in self.failures]
        with ThreadPoolExecutor(max(1, len(asked))) as threads:
            answers = threads.map(
                lambda host: self._ask(host, question, arguments[host], limit_s), asked
            )
            found = zip(asked, answers, strict=True)
            return {host: message["answer"] for host, message in found if message is not None}

    def _ask(
        self, host: Host, question: str, argument: Any, limit_s: float
    ) -> dict[str, Any] | None:
        peer = self._peers[host]
        try:
            with killed_after(limit_s, peer.process.kill):
                peer.ask([question, argument])
                message = peer.answer()
                self.skews[host] = message["clock"] - time.time()
                return message
        except Failed as failure:
            self.refusals.append((question, f"{host.name}: {str(failure).rstrip('.')}"))
        except (Lost, ValueError, LookupError) as error:
            self.failures[host] = _why_lost(host, question, error)
        return None


def _why_lost(host: Host, question: str, error: Exception) -> str:
    if not isinstance(error, Lost):
        return f"{host.name}: an answer that cannot be read ({question})"
    if error.has_begun:
        reason = "no answer in time" if error.exit_code == -9 else "the connection was lost"
        last = error.stderr.strip().splitlines()[-1:]
        return f"{host.name}: {': '.join([reason, *last])} ({question})"
    missing = f"{host.name}: python3 is missing. Install it: the checks need no more"
    return login_failed(host, error.exit_code, error.stderr, limit_s=LOGIN_S, missing=missing)
