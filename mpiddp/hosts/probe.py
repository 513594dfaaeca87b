"""The preflight's probe. It runs on each host, over ssh, and reports what that host has.

The launcher sends the source of this file and of the modules that it imports from this package, so a
host needs only a Python 3. See `mpiddp.launch.remote.preflight`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpiddp.hosts.gpu_tools import gpu_names
from mpiddp.hosts.interfaces import interfaces
from mpiddp.hosts.versions import package_version

GPU_TOOL_TIMEOUT_S = 12.0  # less than the preflight's own timeout


def host_info(requirements: dict[str, Any]) -> dict[str, Any]:
    """The fields of HostInfo except `host`, as JSON. `requirements` is HostRequirements as JSON.

    "mpirun" is the beginning of its --version output, None if it cannot run. "gpus" is None if the
    vendor's tool does not answer.
    """
    path = f"{requirements['path']}:{os.environ.get('PATH', os.defpath)}"
    gpus = gpu_names(path, timeout_s=GPU_TOOL_TIMEOUT_S)
    return {
        "has_folder": os.path.isdir(requirements["folder"]),  # noqa: PTH112 - False for any error
        "has_program": _has_program(requirements),
        "has_daemon": os.access(requirements["daemon"], os.X_OK),
        "mpirun": _program_version(requirements["mpirun"]),
        "torch": package_version("torch"),
        "mpi4py": package_version("mpi4py"),
        "gpus": None if gpus is None else len(gpus),
        "interfaces": [asdict(interface) for interface in interfaces()],
    }


def _has_program(requirements: dict[str, Any]) -> bool:
    program = requirements["program"]
    if program is None:
        return True
    if os.sep in program:  # relative to the working folder
        program = str(Path(requirements["folder"], program))
    return shutil.which(program, path=requirements["path"]) is not None


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
            errors="replace",
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout[:500]
