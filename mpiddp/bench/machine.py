"""What a figure needs beside it to mean something: the machine that it was measured on."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict


class Machine(TypedDict):
    host: str
    cpu: str
    cores: int | None
    memory_gib: float
    gpus: list[str]
    python: str
    torch: str | None
    mpi4py: str | None


class JobHost(Machine):
    """A machine of a job, with its number of ranks."""

    ranks: int


def machine() -> Machine:
    """This host as it is now, by the standard library alone."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "host": socket.gethostname(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 1024**3, 1),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "mpi4py": _version("mpi4py"),
    }


def one_line(host: Machine) -> str:
    """The machine as a chart's footnote has it."""
    gpus = f", {len(host['gpus'])} × {host['gpus'][0]}" if host["gpus"] else ""
    return f"{host['cores']} × {host['cpu']}{gpus}, torch {host['torch']}"


def available_bytes() -> int:
    """The memory that processes can still get without swapping."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held so far; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields.get("VmHWM", "0").split()[0]) * 1024


def children(pid: int) -> list[int]:
    """The processes that the first thread of a process has started; [] if it has ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()  # ARM has no such line


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
