"""The machine on which a figure was measured."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

from mpiddp.hosts.facts import package_version
from mpiddp.hosts.gpus import gpu_names


@dataclass(frozen=True)
class Machine:
    host: str
    cpu: str
    cores: int | None
    memory_gib: float
    gpus: list[str]
    python: str
    torch: str | None
    mpi4py: str | None


def machine() -> Machine:
    """Describe this host, using only the standard library."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        host=socket.gethostname(),
        cpu=_cpu_model(),
        cores=os.cpu_count(),
        memory_gib=round(pages / 1024**3, 1),
        gpus=gpu_names() or [],
        python=platform.python_version(),
        torch=package_version("torch"),
        mpi4py=package_version("mpi4py"),
    )


def available_bytes() -> int:
    """The memory that is available to processes without swapping."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def peak_bytes(pid: int) -> int:
    """The peak memory of a process so far; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields.get("VmHWM", "0").split()[0]) * 1024


def forget_files(*folders: str) -> None:
    """Let the kernel forget the contents of all files below, as a reboot does.

    It keeps the parts that a running process has mapped.
    """
    os.sync()  # what is not written yet stays
    for folder in folders:
        for here, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError), Path(here, name).open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_child(pid: int) -> int:
    """The oldest child of the first thread of a process; 0 if it has none, or has ended."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[0]) if found else 0


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()  # ARM has no such line
