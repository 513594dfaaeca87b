"""Limits, ports and homes of this machine, and programs that a test puts in the place of real ones."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Sources: NVIDIA's MIG User Guide for nvidia-smi -L, "nvidia-smi --help-query-gpu", ROCm's documentation of
# amd-smi and rocm-smi, XPU Manager's user guide.
NVIDIA = """
case "$1" in
-L)
  echo "GPU 0: NVIDIA H200 (UUID: GPU-18ac)"
  echo "  MIG 1g.18gb     Device  0: (UUID: MIG-aa01)"
  echo "  MIG 1g.18gb     Device  1: (UUID: MIG-aa02)"
  echo "GPU 1: NVIDIA H200 (UUID: GPU-19ac)"
  echo "  MIG 1g.18gb     Device  0: (UUID: MIG-bb01)" ;;
--query-gpu=uuid,pci.bus_id)
  echo "GPU-18ac, 00000000:18:00.0"; echo "GPU-19ac, 00000000:9A:00.0" ;;
*) echo 00000000:18:00.0; echo 00000000:9A:00.0 ;;
esac
"""


def tool(folder: Path, name: str, text: str) -> str:
    """Write a program with this text. Returns a PATH that has it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.defpath}"


def an_mpirun(folder: Path, version: str = "mpirun (Open MPI) 5.0.11") -> str:
    """The path of an mpirun that prints this version, and starts nothing."""
    tool(folder, "mpirun", f"echo '{version}'")
    return str(folder / "mpirun")


def reserved(address: str) -> socket.socket:
    """A socket that reserves a port. The kernel never assigns it, but a process may request it."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((address, 0))
    return reservation


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """Within the body, this process may open `count` more files, as at the limit of `ulimit -n`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 1)]
    for file in opened:
        os.close(file)
    limit = opened[-1]  # the lowest free ones come first
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
