"""The sender's end of a push: one connection to a host, what it lacks, and the bytes of that.

The first host uses it, and each host that passes the folder on; `mpiddp hosts push` sends this source there.
It needs Python 3.8 and the standard library. Both ends speak lines of JSON; the contents of files follow
in the order of their rows, each with its SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn

from mpiddp.hosts.cluster.tree import MODE, PATH, SIZE, TIME, Row, digest, list_tree

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
    print('{{"failed": "python3 is %s there; expected 3.8 or newer. [python-too-old]"}}' % own)
    sys.exit()
"""
LOGIN_S = 15.0  # until the proof; what the other end is asked may take longer
CHUNK = 1 << 20
REPORT_S = 0.2


class Lost(Exception):
    """The connection ended. `stderr` is ssh's, and `has_begun` is whether the program ran on the host."""

    def __init__(self, exit_code: int, stderr: str, has_begun: bool) -> None:
        super().__init__(exit_code, stderr, has_begun)
        self.exit_code, self.stderr, self.has_begun = exit_code, stderr, has_begun


class Failed(Exception):
    """One of both ends cannot go on. The text is a sentence."""


class Peer:
    """The program of a push on another host, at the end of `command`, which runs `START` there."""

    def __init__(self, command: list[str], program: bytes) -> None:
        import subprocess  # a host that has everything needs neither, nor shutil: 15 ms there
        import tempfile

        self._program = program
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the connection
        self._has_begun = False
        self.greeting = b""  # what the start-up files of a shell have printed
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=CHUNK,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout

    def ask(self, message: Any) -> None:
        """Send a message. The first one waits for the login.

        Raises:
            Failed, Lost: as `answer`. A login that took longer than LOGIN_S has the exit code -9.
        """
        if not self._has_begun:
            with killed_after(LOGIN_S, self.process.kill):
                self._begin()
        self.write(json.dumps(message).encode() + b"\n")
        self._flush()

    def _begin(self) -> None:
        self.write(b"%d\n" % len(self._program) + self._program)
        self._flush()
        while not self._has_begun:
            line = self._out.readline()
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

    def _flush(self) -> None:
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
        line = self._out.readline()
        if not line.endswith(b"\n"):
            self._raise_lost()
        message: dict[str, Any] = json.loads(line)
        if "failed" in message:
            raise Failed(message["failed"])
        return message

    def _raise_lost(self) -> NoReturn:
        for line in self._out:  # it may have said why it ended
            if line.startswith(b'{"failed": '):
                raise Failed(json.loads(line)["failed"])
        raise self._lost()

    def _lost(self) -> Lost:
        code = self.process.wait()
        self._stderr.seek(0)
        return Lost(code, self._stderr.read().decode(errors="replace"), self._has_begun)

    def take(self, path: str, row: Row) -> None:
        """Write the next file of the other end.

        Raises:
            Failed: it cannot read this file, or that arrived damaged. The next one can be taken.
            Lost: it has ended.
        """
        self.answer()
        try:
            take_file(path, row, self._out)
        except EOFError:
            raise self._lost() from None

    def close(self) -> None:
        """End the connection. Calling it again has no effect."""
        self.process.kill()
        self.process.wait()
        for file in (self._in, self._out):
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


def offer(peer: Peer, header: dict[str, Any], rows: list[list[Row]]) -> list[list[int]] | None:
    """Which rows of each tree the host lacks. None where all is the same.

    Raises:
        Failed: the host cannot take the folders; the sentence says why.
        Lost: the connection ended.
    """
    peer.ask(header)
    differing = peer.answer()["differs"]
    if not differing:
        return None
    peer.ask({"rows": [rows[index] for index in differing]})
    lacking = dict(zip(differing, peer.answer()["lacks"]))
    return [lacking.get(index, []) for index in range(len(rows))]


def send(
    peer: Peer,
    header: dict[str, Any],
    rows: list[list[Row]],
    lacks: list[list[int]],
    report: Callable[[int], None],
) -> None:
    """Send what the host lacks, and wait until it has replaced the folders. `report` gets counts of bytes.

    Raises:
        Failed, Lost: as `offer`. The host keeps what it had.
    """
    peer.ask({"go": True})
    for tree, own, indices in zip(header["trees"], rows, lacks):
        for index in indices:
            send_file(tree["folder"], own[index], peer.write, report)
    peer._flush()
    while "done" not in peer.answer():
        pass


def send_file(
    folder: str, row: Row, write: Callable[[bytes], object], report: Callable[[int], None]
) -> None:
    """Write the contents of a file of `folder`, then its SHA-256. Raises Failed."""
    path = os.path.join(folder, row[PATH])
    try:
        with open(path, "rb") as file:
            _send_contents(path, file, row[SIZE], write, report)
    except OSError as error:
        raise _cannot_be_read(path, error) from None


def _send_contents(
    path: str,
    file: IO[bytes],
    left: int,
    write: Callable[[bytes], object],
    report: Callable[[int], None],
) -> None:
    checksum = hashlib.sha256()
    while left:
        content = file.read(min(left, CHUNK))
        if not content:
            raise Failed(f"{path} has become shorter. Run it again. [push-file-shorter]")
        checksum.update(content)
        write(content)
        left -= len(content)
        report(len(content))
    write(checksum.digest())


def _cannot_be_read(path: str, error: OSError) -> Failed:
    return Failed(f"{path} cannot be read: {error.strerror}. [push-file-unreadable]")


def take_file(path: str, row: Row, stream: IO[bytes]) -> None:
    """Write what `send_file` sends to `path`. Its time is set at the end, so only a whole file has it.

    Raises:
        EOFError: the stream has ended.
        Failed: the file arrived damaged.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    checksum, left = hashlib.sha256(), row[SIZE]
    with open(path, "wb") as file:
        while left:
            content = stream.read(min(left, CHUNK))
            if not content:
                raise EOFError
            checksum.update(content)
            file.write(content)
            left -= len(content)
    if stream.read(checksum.digest_size) != checksum.digest():
        raise Failed(f"{path} arrived damaged. Run it again. [push-file-damaged]")
    os.chmod(path, row[MODE])
    os.utime(path, ns=(row[TIME], row[TIME]))


def digest_of_file(path: str, size: int) -> str:
    """The SHA-256 of the first `size` bytes."""
    checksum = hashlib.sha256()
    with open(path, "rb") as file:
        while size and (content := file.read(min(size, CHUNK))):
            checksum.update(content)
            size -= len(content)
    return checksum.hexdigest()


def give(folder: str) -> None:
    """Send what another host wants of `folder`: its rows, digests of some files, the contents of some.

    Entries that begin with a dot are left out: they are not complete yet.
    """
    names = os.listdir(folder) if os.path.lexists(folder) else []
    rows = {row[PATH]: row for row in list_tree(folder, names) if "/." not in "/" + row[PATH]}
    tell({"rows": list(rows.values())})
    asked = listen()["digests"]
    tell({"digests": [_digest_or_none(os.path.join(folder, path), size) for path, size in asked]})
    for path in listen()["files"]:
        _give_file(os.path.join(folder, path), rows[path][SIZE])
    sys.stdout.buffer.flush()


def _digest_or_none(path: str, size: int) -> str | None:
    try:
        return digest_of_file(path, size)
    except OSError:  # the file itself is asked for next, and says so
        return None


def _give_file(path: str, size: int) -> None:
    """Send whether the file can be read, then as `send_file`. Its contents leave no place for a message."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        tell({"failed": str(_cannot_be_read(path, error))})
        return
    with file:
        tell({"follows": True})
        try:
            _send_contents(path, file, size, sys.stdout.buffer.write, lambda count: None)
        except (OSError, Failed) as error:
            sys.exit(str(error))


def pass_on(program: bytes, message: dict[str, Any]) -> None:
    """Push this host's copies to another host, and report to stdout. It runs on a host that has had them all.

    "lost": it cannot; another one may.
    """
    header = message["header"]
    try:
        rows = [list_tree(tree["folder"], tree["names"]) for tree in header["trees"]]
        if any(digest(own) != tree["digest"] for own, tree in zip(rows, header["trees"])):
            tell({"lost": True})  # its copy has changed since
            return
        peer = Peer(message["pass_on"], program)
    except OSError:  # of its disk, or it has no ssh
        tell({"lost": True})
        return
    reported, unreported = time.monotonic(), 0

    def report(count: int) -> None:
        nonlocal reported, unreported
        unreported += count
        if time.monotonic() - reported > REPORT_S:
            tell({"sent": unreported})
            reported, unreported = time.monotonic(), 0

    try:
        lacks = offer(peer, header, rows)
        if lacks is not None:
            send(peer, header, rows, lacks, report)
        tell({"done": True, "sent": unreported})
    except Failed as failure:
        tell({"failed": str(failure)})
    except Lost:
        tell({"lost": True})
    finally:
        peer.close()


def sentence_of(error: OSError) -> str:
    """A full disk has no path."""
    about = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    return f"{about}{error.strerror}. [transfer-file]"


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
