"""A program of ours on another host, which has none of our modules: it brings their sources along.

program = program_with((interfaces, facts), "print(...)")
found, failures = ask_hosts(hosts, program, timeout_s=30)      # one answer a host
with Connections(hosts, transport, program) as connections:    # a conversation
    answers = connections.ask(dict.fromkeys(hosts, {}), limit_s=30)
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from subprocess import PIPE
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
from mpiddp.hosts.transport import SSH, Transport

PROOF = "mpiddp-answer"  # of a connection: a start-up file may print before it, also on its line
NO_PYTHON = "{name}: {python} is missing. Install it there."
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
    hosts: Sequence[Host],
    program: str,
    *,
    timeout_s: float,
    python: str = "python3",
    transport: Transport = SSH,
) -> tuple[dict[Host, Any], dict[Host, str]]:
    """The JSON in the last line that `program` prints on each host, and a sentence for each other host."""
    found: dict[Host, Any] = {}
    failures: dict[Host, str] = {}
    answers = run_on_hosts(hosts, python, program, timeout_s=timeout_s, transport=transport)
    for host, answer in answers.items():
        lines = answer.stdout.splitlines()
        if lines and answer.exit_code == 0:
            found[host] = json.loads(lines[-1])
        elif answer.has_begun and answer.exit_code not in (None, NO_PROGRAM):
            failures[host] = did_not_run(host, python, answer)
        else:
            missing = NO_PYTHON.format(name=host.name, python=python)
            failures[host] = login_failed(
                host, answer.exit_code, answer.stderr, limit_s=timeout_s, missing=missing
            )
    return found, failures


class _Connection:
    """A program on one host that answers each line of JSON with another one.

    Attributes:
        failure: why it answers no more, "" while it does.
        printed_before: what the start-up files of its shell have printed.
        skew: the seconds by which its clock is ahead of this one's.
    """

    def __init__(self, host: Host, transport: Transport) -> None:
        self.host = host
        self.failure = self.printed_before = ""
        self.skew = 0.0
        self._has_begun = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the connection
        command = shell_command(host, _START, transport)
        self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=self._stderr)

    def ask(self, data: bytes, limit_s: float) -> Any:
        """Send data, and return the next answer; None without one. The program is killed after the limit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # it has ended, as the end of its output shows
                self._process.stdin.write(data)
                self._process.stdin.flush()
            while line := self._process.stdout.readline():
                before, proof, text = line.decode(errors="replace").partition(PROOF)
                self.printed_before += before
                if proof:
                    self._has_begun = True
                    with contextlib.suppress(ValueError):  # it broke off within the line
                        clock, answer = json.loads(text)
                        self.skew = clock - time.time()
                        return answer
        finally:
            timer.cancel()
        self.failure = self._why_lost(limit_s)
        return None

    def _why_lost(self, limit_s: float) -> str:
        self.end()
        code = self._process.returncode
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace")
        if not self._has_begun:
            missing = NO_PYTHON.format(name=self.host.name, python="python3")
            return login_failed(self.host, code, said, limit_s=limit_s, missing=missing)
        reason = "no answer in time" if code == -signal.SIGKILL else "the connection was lost"
        return ", ".join([f"{self.host.name}: {reason}", *said.strip().splitlines()[-1:]])

    def end(self) -> None:
        """Close the program's stdin, after which it ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        assert self._process.stdout is not None
        self.end()
        self._process.stdout.close()
        self._stderr.close()


class Connections:
    """A connection to each host, all asked at once. One that has failed is asked no more.

    `program` answers each line of its stdin by another one: PROOF, and the JSON of [its clock, its answer].
    """

    def __init__(self, hosts: Sequence[Host], transport: Transport, program: str) -> None:
        allow_open(_FILES_PER_HOST * len(hosts) + OPEN_BESIDES)
        self.by_host: dict[Host, _Connection] = {}
        text = f"print({f'{PROOF}[0, null]'!r}, flush=True)\n{program}".encode()

        def begin(host: Host) -> None:
            self.by_host[host] = connection = _Connection(host, transport)
            connection.ask(b"%d\n%b" % (len(text), text), LOGIN_S)

        with ThreadPoolExecutor(logins_at_once(hosts, transport)) as threads:
            list(threads.map(begin, hosts))

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor(max(1, len(self.by_host))) as threads:
            list(threads.map(_Connection.close, self.by_host.values()))

    def ask(self, questions: Mapping[Host, Any], *, limit_s: float) -> dict[Host, Any]:
        """Send each host its question. Returns the answers of those that give one."""
        asked = [host for host in questions if not self.by_host[host].failure]

        def answer(host: Host) -> Any:
            return self.by_host[host].ask(json.dumps(questions[host]).encode() + b"\n", limit_s)

        with ThreadPoolExecutor(max(1, len(asked))) as threads:
            answers = dict(zip(asked, threads.map(answer, asked), strict=True))
        return {host: each for host, each in answers.items() if not self.by_host[host].failure}
