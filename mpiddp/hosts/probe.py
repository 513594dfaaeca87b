"""What the preflight needs to know of a host. Runs there, on the far side of an ssh connection.

The launcher sends the text of this file and of the modules of this package that it imports, so a host
needs nothing but a Python 3; see `mpiddp.launch.remote.preflight`.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpiddp.hosts.interfaces import interfaces
from mpiddp.hosts.nvidia_smi import gpu_names
from mpiddp.hosts.versions import package_version

NVIDIA_SMI_TIMEOUT_S = 12.0  # less than the preflight has for a host


def host_info(requirements: dict[str, Any]) -> dict[str, Any]:
    """The fields of HostInfo, but the host itself, as JSON. `requirements` is HostRequirements as JSON.

    "mpirun" is the start of its answer to --version, None where it cannot be run. "gpus" is None where
    nvidia-smi does not answer.
    """
    path = f"{requirements['path']}:{os.environ.get('PATH', os.defpath)}"
    gpus = gpu_names(path, timeout_s=NVIDIA_SMI_TIMEOUT_S)
    return {
        "has_folder": os.path.isdir(requirements["folder"]),  # noqa: PTH112 - any error is a no
        "has_daemon": os.access(requirements["daemon"], os.X_OK),
        "mpirun": _program_version(requirements["mpirun"]),
        "torch": package_version("torch"),
        "mpi4py": package_version("mpi4py"),
        "gpus": None if gpus is None else len(gpus),
        "interfaces": [asdict(interface) for interface in interfaces()],
    }


def _program_version(program: str) -> str | None:
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
