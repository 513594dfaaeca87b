"""What rsync brings to a host ahead of the push's own stream: of a large file, only the parts that differ.

It saves bytes, and nothing depends on it: whatever it has not brought, for any reason, the stream sends.
`mpiddp hosts push` sends this source to the hosts. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from mpiddp.hosts.cluster.tree import FILE, KIND, PATH, PRIVATE, Row, list_all, remove

if TYPE_CHECKING:
    import subprocess

AHEAD = "ahead"  # in the private folder of a copy: what rsync brings
PART = "part"  # beside it: what of a file had arrived when its connection ended, by the file's name
SILENCE_S = 60  # soon after them it ends. While it reads a large file, both ends send signs of life

_PASSED = re.compile(r"\s*(\d+)\s+\d+%")
_FOUND = "Matched data: "  # and the number of bytes


class Brought(NamedTuple):
    """Bytes of the files that rsync has made, and how many of these it has found on the host."""

    size: int
    found: int


def is_here() -> bool:
    import shutil  # a host that has everything needs it not

    return shutil.which("rsync") is not None


def bring(
    reach: Sequence[str],
    folder: str,
    paths: Sequence[str],
    report: Callable[[int], None],
    connection: subprocess.Popen[Any],
) -> Brought:
    """Bring files to where the copy of a host awaits them.

    Args:
        reach: the command that runs a line on the host, without that line.
        folder: the folder, at the same path on both hosts.
        paths: the files, below the folder.
        report: gets counts of bytes.
        connection: the push's own to the host. rsync ends with it.
    """
    try:
        process = _start(_command(reach, folder), paths)
    except OSError:  # it is for another CPU, or this process may open no more files
        return Brought(0, 0)
    assert process.stdout is not None
    try:
        threading.Thread(target=_end_with, args=(connection, process), daemon=True).start()
        return _follow(process.stdout, report)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _start(command: Sequence[str], paths: Sequence[str]) -> subprocess.Popen[str]:
    import subprocess
    import tempfile

    with tempfile.TemporaryFile() as names:  # a pipe could be full while rsync waits for its own
        # "./": it would take a name that begins with "#" for a comment.
        names.write(b"\0".join(b"./" + os.fsencode(path) for path in paths))
        names.seek(0)
        return subprocess.Popen(
            command,
            stdin=names,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            errors="replace",
        )


def _end_with(connection: subprocess.Popen[Any], process: subprocess.Popen[str]) -> None:
    connection.wait()
    process.kill()


def _command(reach: Sequence[str], folder: str) -> list[str]:
    private = os.path.join(folder, PRIVATE)
    return [
        "rsync",
        f"--rsh={' '.join(reach)}",
        "--protect-args",  # no shell reads a path, as from rsync 3.2.4 on by itself
        "--from0",
        "--files-from=-",
        "--no-implied-dirs",  # folders stay writable, so that files can be moved
        "--perms",
        "--times",
        # Of two files with the same size it compares seconds alone, and all that are named here differ.
        "--ignore-times",
        f"--copy-dest={folder}",  # where older states of the files are
        f"--partial-dir={os.path.join(private, PART)}",
        f"--timeout={SILENCE_S}",
        "--info=progress2,stats2",
        "--no-human-readable",
        "--outbuf=none",  # it ends at its next line if nobody reads them any more
        "--",
        f"{folder}/",
        f"exec:{private}/{AHEAD}/",  # `reach` names the host already, so here is the shell's word
    ]


def _follow(output: IO[str], report: Callable[[int], None]) -> Brought:
    """Read what rsync prints, until it ends. Its lines of progress have the bytes so far."""
    size = found = 0
    for line in output:
        if passed := _PASSED.match(line):
            report(int(passed[1]) - size)
            size = int(passed[1])
        elif line.startswith(_FOUND):
            found = int(line[len(_FOUND) :].split()[0])
    return Brought(size, found)


class Ahead:
    """The host's end: what rsync brings to its copy of `folder`.

    The rsync of a push that broke off may write on for a while, in the folder that was its own. What is right
    is moved out of that folder, which then is removed; a later push makes another one.
    """

    def __init__(self, folder: str) -> None:
        private = os.path.join(folder, PRIVATE)
        self._folder = folder
        self._here, self._part = os.path.join(private, AHEAD), os.path.join(private, PART)

    def arrived(self) -> list[Row]:
        return list_all(self._here)

    def parts(self) -> list[Row]:
        return list_all(self._part)

    def open(self, lacking: Sequence[Row]) -> None:
        """Make the folder for these files, and keep the parts that help."""
        os.mkdir(self._here)
        seen: set[str] = set()
        for row in lacking:
            # rsync would prefer a part to an older state, which has more of the file, or take another file's.
            name = os.path.basename(row[PATH])
            if name in seen or os.path.lexists(os.path.join(self._folder, row[PATH])):
                remove(os.path.join(self._part, name))
            seen.add(name)

    def move(self, rows: Sequence[Row], to: str) -> None:
        """Move the files that are as one of `rows` into `to`, and remove all else."""
        wanted = {row[PATH]: row for row in rows}
        gone = self._here + ".gone"
        remove(gone)
        if os.path.isdir(self._here):
            os.rename(self._here, gone)
        for row in list_all(gone):
            if wanted.get(row[PATH]) == row and row[KIND] == FILE:
                place = os.path.join(to, row[PATH])
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.replace(os.path.join(gone, row[PATH]), place)
        with contextlib.suppress(
            OSError
        ):  # an rsync of before still writes there: the next push removes it
            remove(gone)

    def close(self) -> None:
        """Remove the parts, whose place the files need."""
        remove(self._part)
