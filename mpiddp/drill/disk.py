"""A small disk at the folder of a run, in a mount namespace: it needs no root, and no mount remains.

python -m mpiddp.drill.disk FOLDER BYTES    # holds it until its stdin ends
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_NEWNS, _NEWUSER, _PRIVATE, _RECURSIVE = (
    0x20000,
    0x10000000,
    1 << 18,
    1 << 14,
)  # linux/sched.h, mount.h
_MOUNTED = "mounted\n"


class Disk:
    """A tmpfs at `folder`, for the programs that `enter` starts. `holder`: the pid that keeps it."""

    def __init__(self, folder: Path, holder: int) -> None:
        self._folder, self._holder = folder, holder

    def seen(self) -> Path:
        """The path of its root for processes outside."""
        return Path(f"/proc/{self._holder}/root", *self._folder.parts[1:])

    def enter(self, command: Sequence[str], cwd: Path) -> list[str]:
        """The command that runs another one where the disk is."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        enter = ["nsenter", f"--target={self._holder}", "--mount", *user]
        return [*enter, "env", f"--chdir={cwd}", *command]


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Disk]:
    """A disk of `size` bytes at an empty folder, until the end of the block.

    Raises:
        OSError: this machine does not allow it.
    """
    if shutil.which("nsenter") is None:
        raise OSError("no nsenter on PATH")
    holder = subprocess.Popen(
        [sys.executable, "-m", "mpiddp.drill.disk", str(folder), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        answer = holder.stdout.readline()
        if answer != _MOUNTED:
            raise OSError(answer.strip() or "its process has failed")
        disk = Disk(folder, holder.pid)
        entered = subprocess.run(disk.enter(["true"], folder), capture_output=True, text=True)
        if entered.returncode != 0:
            raise OSError(entered.stderr.strip())
        yield disk


def _mount(folder: str, size: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result != 0:
            raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")

    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(_NEWNS if user == 0 else _NEWNS | _NEWUSER), "unshare")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    check(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "mount --make-rprivate /")
    options = f"size={size},mode=0755".encode()
    check(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options), "mount -t tmpfs")


def main(folder: str, size: str) -> None:
    try:
        _mount(folder, int(size))
    except OSError as error:
        print(error, flush=True)
        return
    print(_MOUNTED, end="", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
