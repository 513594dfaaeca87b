"""The sender's end of a push: what a host lacks, and the bytes of that.

The first host uses it, and each host that passes the folder on; `mpiddp hosts push` sends this source there.
It needs Python 3.8 and the standard library. The contents of files follow in the order of their rows, each
with its SHA-256. Where both ends have rsync, it brings the large ones first.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from typing import IO, Any, Dict, List

from mpiddp.hosts.cluster import rsync
from mpiddp.hosts.cluster.connection import Failed, Lost, Peer, listen, tell
from mpiddp.hosts.cluster.tree import MODE, PATH, SIZE, TIME, Row, digest, list_tree

LOGIN_BYTES = 16 * 10**6  # are sent in the time that another login takes
LARGE = 10**6  # bytes of a file; the stream is faster with small ones
CHUNK = 1 << 20
REPORT_S = 0.2

# What a host lacks: the indices of rows, for each tree that differs there, by its own index.
Lacks = Dict[int, List[int]]  # evaluated at import, also by Python 3.8


def offer(peer: Peer, header: dict[str, Any], rows: list[list[Row]]) -> Lacks:
    """What the host lacks. Empty where all is the same.

    Raises:
        Failed: the host cannot take the folders; the sentence says why.
        Lost: the connection ended.
    """
    peer.ask(header)
    differing = peer.answer()["differs"]
    if not differing:
        return {}
    peer.ask({"rows": [rows[index] for index in differing]})
    return dict(zip(differing, peer.answer()["lacks"]))


def size_of(rows: list[list[Row]], lacks: Lacks) -> int:
    """Bytes."""
    return sum(rows[tree][index][SIZE] for tree, indices in lacks.items() for index in indices)


def send(
    peer: Peer,
    header: dict[str, Any],
    rows: list[list[Row]],
    lacks: Lacks,
    report: Callable[[int], None],
) -> int:
    """Send what the host lacks, and wait until it has replaced the folders. `report` gets counts of bytes.

    Returns:
        How many of the bytes were found there, in older states of the files.

    Raises:
        Failed, Lost: as `offer`. The host keeps what it had.
    """
    large = {
        tree: [index for index in indices if rows[tree][index][SIZE] >= LARGE]
        for tree, indices in lacks.items()
    }
    rsync_first = size_of(rows, large) >= LOGIN_BYTES and rsync.is_here()
    peer.ask({"go": True, "rsync": rsync_first})
    found = 0
    if rsync_first and peer.answer()["rsync"]:
        size, found = _bring(peer, header, rows, large, report)
        peer.ask({"go": True})
        rest = dict(zip(lacks, peer.answer()["lacks"]))
        # Its counts may have ended too early, or be of a file that has changed since.
        arrived = size_of(rows, lacks) - size_of(rows, rest)
        report(arrived - size)
        found = min(found, arrived)
        lacks = rest
    for tree, indices in lacks.items():
        for index in indices:
            send_file(header["trees"][tree]["folder"], rows[tree][index], peer.write, report)
    peer.flush()
    while "done" not in peer.answer():
        pass
    return found


def _bring(
    peer: Peer,
    header: dict[str, Any],
    rows: list[list[Row]],
    large: Lacks,
    report: Callable[[int], None],
) -> rsync.Brought:
    """Let rsync bring these files."""
    size = found = 0
    for tree, indices in large.items():
        if indices:
            folder = header["trees"][tree]["folder"]
            paths = [rows[tree][index][PATH] for index in indices]
            brought = rsync.bring(peer.reach, folder, paths, report, peer.process)
            size, found = size + brought.size, found + brought.found
    return rsync.Brought(size, found)


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
            raise Failed(f"{path} has become shorter. Run it again.")
        checksum.update(content)
        write(content)
        left -= len(content)
        report(len(content))
    write(checksum.digest())


def _cannot_be_read(path: str, error: OSError) -> Failed:
    return Failed(f"{path} cannot be read: {error.strerror}.")


def take_from(peer: Peer, path: str, row: Row) -> None:
    """Write the next file that the other end gives.

    Raises:
        Failed: it cannot read this file, or that arrived damaged. The next one can be taken.
        Lost: it has ended.
    """
    peer.answer()
    try:
        take_file(path, row, peer.out)
    except EOFError:
        raise peer.lost() from None


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
        raise Failed(f"{path} arrived damaged. Run it again.")
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
        found = send(peer, header, rows, lacks, report) if lacks else 0
        tell({"done": True, "sent": unreported, "found": found})
    except Failed as failure:
        tell({"failed": str(failure)})
    except Lost:
        tell({"lost": True, "sent": unreported})
    finally:
        peer.close()


def sentence_of(error: OSError) -> str:
    """A full disk has no path."""
    about = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    return f"{about}{error.strerror}."
