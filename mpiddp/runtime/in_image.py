"""Whether a path of a script is lost with the container of `mpiddp launch --image`."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.protocol.variables import CONTAINER_BEGAN

_MOUNTS = Path("/proc/self/mountinfo")


def refuse_lost(path: str | Path) -> None:
    """Raise UserError if a restart will not find what this script writes to `path`.

    The kernel knows each folder of the host that the container has, because Apptainer mounts some by itself.
    A file of the image is there again at a restart.
    """
    began_at = os.environ.get(CONTAINER_BEGAN)
    if began_at is None:
        return
    path = Path(os.path.realpath(path))
    if path.is_file() and path.stat().st_ctime < float(began_at):
        return
    if _mount_of(str(path)) == "/":
        folder = path if len(path.parts) == 2 else path.parent
        sentence = f"{path} is inside the container only, and is lost with it."
        raise UserError(sentence, fix=f"--mount {shlex.quote(str(folder))}")


def _mount_of(path: str) -> str:
    """The folder where the file system of an absolute path is mounted, see proc_pid_mountinfo(5)."""
    fields = (line.split(b" ") for line in _MOUNTS.read_bytes().splitlines())
    octal = re.compile(rb"\\([0-7]{3})")
    mounts = [
        os.fsdecode(octal.sub(lambda match: bytes([int(match[1], 8)]), row[4])) for row in fields
    ]
    return max(
        (mount for mount in mounts if f"{path}/".startswith(f"{mount.rstrip('/')}/")), key=len
    )
