"""A program of ours on another host, which has none of our modules: it brings their sources along.

    program_with((interfaces, facts), "print(...)")     # for `run_on_hosts`
    with Connections(hosts, transport, program) as connections:
        answers = connections.ask("facts", {...}, limit_s=30)

A connection sends questions as lines of JSON, and gets an answer for each.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.hosts.ssh import NO_PROGRAM, login_failed, logins_at_once, shell_command
from mpiddp.hosts.transport import Transport

_LOAD = """
import sys, types
for name, source in SOURCES.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
"""
# The command of the shell on each host. It holds no input: the program follows on stdin, after its length.
_START = (
    f"command -v python3 >/dev/null 2>&1 || exit {NO_PROGRAM}; exec python3 -I -S -c "
    "'import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))'"
)
_PROOF = "mpiddp-login"  # a start-up file may have printed before it, also on its line
_OLDEST = (3, 8)
_FIRST = f"""
import sys
print({_PROOF!r}, flush=True)
if sys.version_info < {_OLDEST}:
    sys.exit('python3 is %d.%d there; expected {_OLDEST[0]}.{_OLDEST[1]} or newer' % sys.version_info[:2])
"""
LOGIN_S = 15.0
_FILES_PER_HOST = 3
_END_S = 3.0


def program_with(modules: Sequence[ModuleType], then: str, *, first: str = "") -> str:
    """A program that loads `modules`, each after those that it imports, and then runs `then`. It is ASCII.

    Args:
        first: lines to run before.
    """
    sources: dict[str, str] = {}
    for module in modules:
        assert module.__file__ is not None
        # The names by which they import each other, with empty parent packages.
        for name in accumulate(module.__name__.split("."), "{}.{}".format):
            sources.setdefault(name, "")
        sources[module.__name__] = Path(module.__file__).read_text()
    return f"{first}\nSOURCES = {sources!a}\n{_LOAD}{then}\n"


class _Connection:
    """The program on one host. `printed_before` is what the start-up files of its shell have printed."""

    def __init__(self, host: Host, transport: Transport) -> None:
        self.host = host
        self.printed_before = ""
        self.has_begun = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the connection
        self.process = subprocess.Popen(
            shell_command(host, _START, transport),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )

    def begin(self, program: bytes) -> bool:
        """Send the program. Returns whether it runs there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError), self._killed_after(LOGIN_S):
            self.process.stdin.write(b"%d\n" % len(program) + program)
            self.process.stdin.flush()
            while not self.has_begun and (line := self.process.stdout.readline()):
                before, proof, _ = line.decode(errors="replace").partition(_PROOF)
                self.printed_before += before
                self.has_begun = bool(proof)
        return self.has_begun

    def answer(self, question: str, argument: Any, limit_s: float) -> dict[str, Any] | None:
        """The answer's message, None if the connection is lost."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError), self._killed_after(limit_s):
            self.process.stdin.write(json.dumps([question, argument]).encode() + b"\n")
            self.process.stdin.flush()
            message: dict[str, Any] = json.loads(self.process.stdout.readline())
            return {**message, "skew": message.get("clock", 0.0) - time.time()}
        return None

    @contextlib.contextmanager
    def _killed_after(self, seconds: float) -> Any:
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def why_lost(self, question: str) -> str:
        """The sentence for a connection that has ended."""
        code = self.process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace")
        name = self.host.name
        if not self.has_begun:
            missing = f"{name}: python3 is missing. Install it: mpiddp needs no more there"
            return login_failed(self.host, code, said, limit_s=LOGIN_S, missing=missing)
        reason = "no answer in time" if code == -9 else "the connection was lost"
        return f"{name}: {', '.join([reason, *said.strip().splitlines()[-1:]])} ({question})"

    def end_input(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def close(self, wait_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, wait_s))
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()


class Connections:
    """One connection to each host, asked all at once. A host that has failed once is asked no more.

    Attributes:
        failures: a sentence for each host that does not answer.
        refusals: each question that failed on a host whose program goes on, and a sentence.
        skews: the seconds by which each host's clock is ahead of this one's.
    """

    def __init__(self, hosts: Sequence[Host], transport: Transport, program: str) -> None:
        allow_open(_FILES_PER_HOST * len(hosts) + OPEN_BESIDES)
        self._program = f"{_FIRST}{program}".encode()
        self._transport = transport
        self._hosts = hosts
        self._open: dict[Host, _Connection] = {}
        self.failures: dict[Host, str] = {}
        self.refusals: list[tuple[str, str]] = []
        self.skews: dict[Host, float] = {}
        with ThreadPoolExecutor(logins_at_once(hosts)) as threads:
            list(threads.map(self._begin, hosts))

    def _begin(self, host: Host) -> None:
        connection = self._open[host] = _Connection(host, self._transport)
        if not connection.begin(self._program):
            self.failures[host] = connection.why_lost("login")

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._open.values():
            each.end_input()
        deadline = time.monotonic() + _END_S
        for each in self._open.values():
            each.close(deadline - time.monotonic())

    @property
    def hosts(self) -> list[Host]:
        """The hosts that have answered so far, in their order."""
        return [host for host in self._hosts if host not in self.failures]

    @property
    def printed_before(self) -> dict[Host, str]:
        """What the start-up files of each host's shell have printed."""
        return {host: each.printed_before for host, each in self._open.items()}

    def ask(self, question: str, argument: Any, *, limit_s: float) -> dict[Host, Any]:
        """Ask all hosts the same. Returns the answers; `failures` and `refusals` say why one has none."""
        return self.ask_each(question, dict.fromkeys(self.hosts, argument), limit_s=limit_s)

    def ask_each(
        self, question: str, arguments: Mapping[Host, Any], *, limit_s: float
    ) -> dict[Host, Any]:
        """The same with an argument for each host."""
        asked = [host for host in arguments if host not in self.failures]

        def answer(host: Host) -> dict[str, Any] | None:
            return self._open[host].answer(question, arguments[host], limit_s)

        found: dict[Host, Any] = {}
        with ThreadPoolExecutor(max(1, len(asked))) as threads:
            for host, message in zip(asked, threads.map(answer, asked), strict=True):
                if message is None:
                    self._open[host].process.kill()
                    self.failures[host] = self._open[host].why_lost(question)
                elif "failed" in message:
                    self.refusals.append((question, f"{host.name}: {message['failed']}"))
                else:
                    self.skews[host] = message["skew"]
                    found[host] = message["answer"]
        return found
