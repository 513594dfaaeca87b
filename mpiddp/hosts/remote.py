"""A program of ours on another host, which has none of our modules: it brings their sources along.

program = program_with((interfaces, facts), "print(...)")
found, failures = ask_hosts(hosts, program, timeout_s=30)      # one answer a host
with Connections(hosts, transport, program) as connections:    # a conversation
    answers = connections.ask("facts", dict.fromkeys(hosts, {}), limit_s=30)
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.sockets import OPEN_BESIDES, allow_open
from mpiddp.hosts.ssh import (
    NO_PROGRAM,
    did_not_run,
    login_failed,
    logins_at_once,
    run_on_hosts,
    shell_command,
)
from mpiddp.hosts.transport import Transport

PROOF = "mpiddp-answer"  # a start-up file may print before it, also on its line
NO_PYTHON = "{name}: python3 is missing. Install it there: mpiddp needs no more"
OLDEST_PYTHON = "3.8"
# The first lines of each program.
CHECK_PYTHON = f"""
import sys
if sys.version_info < {tuple(map(int, OLDEST_PYTHON.split(".")))}:
    sys.exit("it is Python %d.%d, and {OLDEST_PYTHON} or newer is needed" % sys.version_info[:2])
"""
_LOAD = """
import types
for name, source in SOURCES.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
"""
# The command of the shell on each host. It holds no input: the program follows on stdin, after its length.
_START = (
    f"command -v python3 >/dev/null 2>&1 || exit {NO_PROGRAM}; exec python3 -I -S -c "
    "'import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))'"
)
LOGIN_S = 15.0
_FILES_PER_HOST = 3
_END_S = 3.0


def program_with(modules: Sequence[ModuleType], then: str) -> str:
    """A program that loads `modules`, each after those that it imports, and then runs `then`. It is ASCII."""
    sources: dict[str, str] = {}
    for module in modules:
        assert module.__file__ is not None
        # The names by which they import each other, with empty parent packages.
        for name in accumulate(module.__name__.split("."), "{}.{}".format):
            sources.setdefault(name, "")
        sources[module.__name__] = Path(module.__file__).read_text()
    return f"{CHECK_PYTHON}\nSOURCES = {sources!a}\n{_LOAD}{then}\n"


def ask_hosts(
    hosts: Sequence[Host], program: str, *, timeout_s: float, python: str = "python3"
) -> tuple[dict[Host, Any], dict[Host, str]]:
    """The JSON that `program` prints after PROOF on each host, and a sentence for each other host."""
    found: dict[Host, Any] = {}
    failures: dict[Host, str] = {}
    for host, answer in run_on_hosts(hosts, python, program, timeout_s=timeout_s).items():
        _, proof, text = answer.stdout.partition(PROOF)
        if proof and answer.exit_code == 0:
            found[host] = json.loads(text)
        elif answer.has_begun and answer.exit_code not in (None, NO_PROGRAM):
            failures[host] = did_not_run(host, python, answer)
        else:
            failures[host] = _login_failed(host, answer.exit_code, answer.stderr, timeout_s)
    return found, failures


def _login_failed(host: Host, exit_code: int | None, errors: str, limit_s: float) -> str:
    missing = NO_PYTHON.format(name=host.name)
    return login_failed(host, exit_code, errors, limit_s=limit_s, missing=missing)


class _Connection:
    """The program on one host. `printed_before` is what the start-up files of its shell have printed."""

    def __init__(self, host: Host, transport: Transport) -> None:
        self.host = host
        self.printed_before = ""
        self._has_begun = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the connection
        command = shell_command(host, _START, transport)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
        )

    def begin(self, program: bytes) -> str:
        """Send the program. Returns why it does not run there, "" if it does."""
        with contextlib.closing(self._lines(b"%d\n%b" % (len(program), program), LOGIN_S)) as lines:
            for line in lines:
                before, proof, _ = line.decode(errors="replace").partition(PROOF)
                self.printed_before += before
                if proof:
                    self._has_begun = True
                    return ""
        return self._why_lost("login")

    def answer(self, question: str, argument: Any, limit_s: float) -> dict[str, Any] | str:
        """The answer's message, or why there is none: then the connection is lost."""
        data = json.dumps([question, argument]).encode() + b"\n"
        with contextlib.closing(self._lines(data, limit_s)) as lines:
            try:
                message: dict[str, Any] = json.loads(next(lines))
                return {**message, "skew": message.get("clock", 0.0) - time.time()}
            except (StopIteration, ValueError):
                return self._why_lost(question)

    def _lines(self, data: bytes, limit_s: float) -> Generator[bytes, None, None]:
        """Send data, and yield the lines that the program prints. It is killed after the limit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # it has ended, as the end of its output shows
                self._process.stdin.write(data)
                self._process.stdin.flush()
            while line := self._process.stdout.readline():
                yield line
        finally:
            timer.cancel()

    def _why_lost(self, question: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        code = self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace")
        if not self._has_begun:
            return _login_failed(self.host, code, said, LOGIN_S)
        reason = "no answer in time" if code == -signal.SIGKILL else "the connection was lost"
        last = said.strip().splitlines()[-1:]
        return f"{self.host.name}: {', '.join([reason, *last])} ({question})"

    def end(self) -> None:
        """Close the program's stdin, after which it ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self, wait_s: float) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, wait_s))
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
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
        self._open: dict[Host, _Connection] = {}
        self.failures: dict[Host, str] = {}
        self.refusals: list[tuple[str, str]] = []
        self.skews: dict[Host, float] = {}
        data = f"print({PROOF!r}, flush=True)\n{program}".encode()

        def begin(host: Host) -> None:
            self._open[host] = connection = _Connection(host, transport)
            if why := connection.begin(data):
                self.failures[host] = why

        with ThreadPoolExecutor(logins_at_once(hosts, transport)) as threads:
            list(threads.map(begin, hosts))

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._open.values():
            each.end()
        deadline = time.monotonic() + _END_S
        for each in self._open.values():
            each.close(deadline - time.monotonic())

    @property
    def printed_before(self) -> dict[Host, str]:
        """What the start-up files of each host's shell have printed."""
        return {host: each.printed_before for host, each in self._open.items()}

    def ask(
        self, question: str, arguments: Mapping[Host, Any], *, limit_s: float
    ) -> dict[Host, Any]:
        """Ask each host with its argument. Returns the answers; the attributes say why one has none."""
        asked = [host for host in arguments if host not in self.failures]

        def answer(host: Host) -> dict[str, Any] | str:
            return self._open[host].answer(question, arguments[host], limit_s)

        found: dict[Host, Any] = {}
        with ThreadPoolExecutor(max(1, len(asked))) as threads:
            for host, message in zip(asked, threads.map(answer, asked), strict=True):
                if isinstance(message, str):
                    self.failures[host] = message
                elif "failed" in message:
                    self.refusals.append((question, f"{host.name}: {message['failed']}"))
                else:
                    self.skews[host] = message["skew"]
                    found[host] = message["answer"]
        return found
