"""What a host tells of itself before a job starts there. Runs on the far side of an ssh connection.

The launcher sends this file's text, so that a host needs nothing but a Python 3; see
`mpiddp.launch.remote.preflight`.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpiddp.hosts.interfaces import interfaces


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    """HostInfo about this host as JSON, for `wanted`: "folder", "mpirun", "daemon" and the ranks' "path".

    "mpirun" is what it says of its version, None where it cannot be run.
    """
    return {
        "has_folder": os.path.isdir(wanted["folder"]),  # noqa: PTH112 - any error is a no
        "mpirun": _version(wanted["mpirun"]),
        "has_daemon": os.access(wanted["daemon"], os.X_OK),
        "torch": _installed("torch"),
        "mpi4py": _installed("mpi4py"),
        "gpus": _gpus(wanted["path"]),
        "interfaces": [asdict(interface) for interface in interfaces()],
    }


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


def _gpus(path: str) -> int | None:
    """How many nvidia-smi lists; 0 where there is none, None where it does not answer."""
    program = shutil.which("nvidia-smi", path=path) or shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=12)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
