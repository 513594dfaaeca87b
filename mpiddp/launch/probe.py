"""What a host tells of itself before a job starts there. Runs on the far side of an ssh connection.

The launcher sends this file's text, so that a host needs nothing but a Python 3; see
`mpiddp.launch.preflight`.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpiddp.network import interfaces


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    """Facts about this host, for `wanted`: the "folder", the "programs" by path, and the "path".

    Everything is JSON. "programs" maps each path to the first lines of its --version, or None where
    it cannot be run.
    """
    return {
        "hostname": socket.gethostname(),
        "own_address": _own_address(),
        "has_folder": os.path.isdir(wanted["folder"]),  # noqa: PTH112 - any error is a no
        "programs": {path: _version(path) for path in wanted["programs"]},
        "torch": _installed("torch"),
        "mpi4py": _installed("mpi4py"),
        "mpiddp": _installed("mpiddp"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "cores": os.cpu_count(),
        "gpus": _gpus(wanted["path"]),
        "interfaces": [asdict(interface) for interface in interfaces()],
        "ssh_connection": os.environ.get("SSH_CONNECTION", ""),
    }


def _own_address() -> str | None:
    """What this host's own name resolves to here: 127.0.1.1 on Debian."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _installed(package: str) -> str | None:
    """The version in the package's metadata: importing torch would take seconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(program: str) -> str | None:
    if not os.access(program, os.X_OK):
        return None
    try:
        answer = subprocess.run(
            [program, "--version"],
            env={**os.environ, "PATH": f"{Path(program).parent}:{os.environ.get('PATH', '')}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout[:500]


def _gpus(path: str) -> int:
    program = shutil.which("nvidia-smi", path=path) or shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
