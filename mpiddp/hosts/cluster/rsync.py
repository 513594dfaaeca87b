"""What rsync brings to a host ahead of the push's own stream: of a large file, only the parts that differ.

It saves bytes, and nothing depends on it: whatever it has not brought, for any reason, the stream sends.
`mpiddp hosts push` sends this source to the hosts. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple

from mpiddp.hosts.cluster.tree import PRIVATE

if TYPE_CHECKING:
    import subprocess

NEW = "new"  # in the private folder of a copy: what has arrived
PART = "part"  # what of a file had arrived when its connection ended
SILENCE_S = 60  # then it ends. While it reads a large file, both ends send signs of life

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
    started: Callable[[subprocess.Popen[str]], None],
) -> Brought:
    """Bring these files of `folder` to where they arrive in the copy of a host.

    Args:
        report: gets counts of bytes.
        reach: the command that runs a line on the host, without that line.
        started: gets the process, which another thread may kill.
    """
    import subprocess
    import tempfile

    with tempfile.TemporaryFile() as names:  # a pipe could be full while rsync waits for its own
        names.write(b"\0".join(os.fsencode(path) for path in paths))
        names.seek(0)
        process = subprocess.Popen(
            _command(reach, folder),
            stdin=names,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            errors="replace",
        )
    assert process.stdout is not None
    try:
        started(process)
        return _follow(process.stdout, report)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _command(reach: Sequence[str], folder: str) -> list[str]:
    private = os.path.join(folder, PRIVATE)
    return [
        "rsync",
        f"--rsh={' '.join(reach)}",
        "--protect-args",  # no shell reads a path, as from rsync 3.2.4 on by itself
        "--from0",
        "--files-from=-",
        "--no-implied-dirs",  # folders stay writable, for what is still to arrive
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
        f"exec:{private}/{NEW}/",  # `reach` names the host already, so here is the shell's word
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
