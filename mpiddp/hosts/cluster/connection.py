"""One connection to a program of ours on a host, which brings its sources along, and how both ends speak.

They send lines of JSON. `mpiddp hosts push` sends this source to the hosts, which may pass the folders on. It
needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

# The command of the shell on each host. It holds no input: the program follows on stdin, after its length.
START = (
    "command -v python3 >/dev/null 2>&1 || exit 96; exec python3 -I -S -c "
    "'import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))'"
)
PROOF = "mpiddp-push"  # of a login; a start-up file may have printed before it, also on its line
# The first lines of that program.
FIRST = f"""
import sys
print({PROOF!r}, flush=True)
if sys.version_info < (3, 8):
    own = '%d.%d' % sys.version_info[:2]
    print('{{"failed": "python3 is %s there; expected 3.8 or newer."}}' % own)
    sys.exit()
"""
LOGIN_S = 15.0  # until the proof; what the other end is asked may take longer
_BUFFER = 1 << 20  # bytes


class Lost(Exception):
    """The connection ended. `stderr` is ssh's, and `has_begun` is whether the program ran on the host."""

    def __init__(self, exit_code: int, stderr: str, has_begun: bool) -> None:
        super().__init__(exit_code, stderr, has_begun)
        self.exit_code, self.stderr, self.has_begun = exit_code, stderr, has_begun


class Failed(Exception):
    """One of both ends cannot go on. The text is a sentence."""


class Peer:
    """The program on another host, at the end of `command`, whose last argument `START` runs there.

    `reach` is the command without that, and `out` is what follows a message of the other end.
    """

    def __init__(self, command: list[str], program: bytes) -> None:
        import subprocess  # a host that has everything needs neither, nor shutil: 15 ms there
        import tempfile

        self.reach = command[:-1]
        self._program = program
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the connection
        self._has_begun = False
        self.greeting = b""  # what the start-up files of a shell have printed
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=_BUFFER,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self.out = self.process.stdin, self.process.stdout

    def ask(self, message: Any) -> None:
        """Send a message. The first one waits for the login.

        Raises:
            Failed, Lost: as `answer`. A login that took longer than LOGIN_S has the exit code -9.
        """
        if not self._has_begun:
            with killed_after(LOGIN_S, self.process.kill):
                self._begin()
        self.write(json.dumps(message).encode() + b"\n")
        self.flush()

    def _begin(self) -> None:
        self.write(b"%d\n" % len(self._program) + self._program)
        self.flush()
        while not self._has_begun:
            line = self.out.readline()
            if not line:
                self._raise_lost()
            before, proof, _ = line.partition(PROOF.encode())
            self.greeting += before
            self._has_begun = bool(proof)

    def write(self, content: bytes) -> None:
        try:
            self._in.write(content)
        except OSError:
            self._raise_lost()

    def flush(self) -> None:
        try:
            self._in.flush()
        except OSError:
            self._raise_lost()

    def answer(self) -> dict[str, Any]:
        """The next message of the other end.

        Raises:
            Failed: it says so.
            Lost: it has ended.
        """
        line = self.out.readline()
        if not line.endswith(b"\n"):
            self._raise_lost()
        message: dict[str, Any] = json.loads(line)
        if "failed" in message:
            raise Failed(message["failed"])
        return message

    def _raise_lost(self) -> NoReturn:
        for line in self.out:  # it may have said why it ended
            if line.startswith(b'{"failed": '):
                raise Failed(json.loads(line)["failed"])
        raise self.lost()

    def lost(self) -> Lost:
        """Why the connection has ended."""
        code = self.process.wait()
        self._stderr.seek(0)
        return Lost(code, self._stderr.read().decode(errors="replace"), self._has_begun)

    def close(self) -> None:
        """End the connection. Calling it again has no effect."""
        self.process.kill()
        self.process.wait()
        for file in (self._in, self.out):
            with contextlib.suppress(OSError):  # for what was not sent yet
                file.close()
        self._stderr.close()


@contextlib.contextmanager
def killed_after(seconds: float, kill: Callable[[], None]) -> Iterator[None]:
    """Calls `kill` if the block takes longer."""
    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tell(message: dict[str, Any]) -> None:
    """Send a message to the sender, from a host."""
    print(json.dumps(message), flush=True)


def listen() -> dict[str, Any]:
    """The sender's next message. Exits where it is gone."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        sys.exit(1)
    message: dict[str, Any] = json.loads(line)
    return message
