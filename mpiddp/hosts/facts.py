"""The facts of a host for the preflight of a job. A fact that the host cannot tell is None.

This module travels to the hosts as source. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpiddp.hosts.gpu_health import MORE_S, read_health
from mpiddp.hosts.gpus import TIMEOUT_S, tool_output
from mpiddp.hosts.interfaces import interfaces, machine

VERSION_S = 10.0  # mpirun --version may take so long
LONGEST_S = TIMEOUT_S + 3 * MORE_S + 2 * VERSION_S + 5.0  # a host with slow tools takes so long


def host_info(needs: dict[str, Any]) -> dict[str, Any]:
    """The fields of the preflight's HostInfo except `host`, as JSON. `needs` has the needs of the ranks."""
    path = f"{needs['path']}:{os.environ.get('PATH', os.defpath)}"
    program = needs["program"]
    if os.sep in program:  # relative to the working folder
        program = str(Path(needs["folder"], program))
    version, image = program_version(needs["mpirun"], os.environ), needs["image"]
    packages = [os.path.join(needs["folder"], folder) for folder in needs["packages"]]
    script = os.path.join(needs["folder"], needs["script"])
    paths = (os.path.join(needs["folder"], "."), script, *[program] * (os.sep in program))
    return {
        "errors": {path: error for path in paths if (error := error_at(path))},
        "has_folder": os.path.isdir(needs["folder"]),
        "has_program": not program
        or shutil.which(program, path=path if image else needs["path"]) is not None,
        "has_script": os.path.exists(script),
        "has_daemon": os.access(needs["daemon"], os.X_OK),
        "mpirun": None if version is None else version.partition("\n")[0][:500],
        "machine": machine("net", "pid"),  # containers of one machine differ in their pids
        "hostname": socket.gethostname(),
        "python": sys.version.split()[0],
        "image": tool_output(image[0], image[1:], path, VERSION_S, stderr=subprocess.STDOUT)
        if image
        else "",
        # The packages of an image are its own.
        "torch": None if image else package_version("torch", packages),
        "mpi4py": None if image else package_version("mpi4py", packages),
        "gpus": read_health(path),
        "interfaces": [interface._asdict() for interface in interfaces()],
        "address": [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""][2],
    }


def error_at(path: str) -> str:
    """The system's reason why this path cannot be reached, "" if it can or does not exist."""
    try:
        os.stat(path)
    except OSError as error:
        return "" if error.errno in (errno.ENOENT, errno.ENOTDIR) else str(error.strerror)
    return ""


def package_version(package: str, folders: Sequence[str] = ()) -> str | None:
    """The version in the package's metadata, None if it is not installed. To import torch would take seconds.

    Python looks into `folders` before its own.
    """
    from importlib.metadata import distributions  # 20 ms

    installed = distributions(name=package, path=[*folders, *sys.path])
    return next((distribution.version for distribution in installed), None)


def program_version(
    program: str, env: Mapping[str, str], stderr: int = subprocess.DEVNULL
) -> str | None:
    """The output of `program --version`; None if it cannot run, or does not answer within VERSION_S."""
    variables = with_own_folder(Path(program), env)
    return tool_output(program, ("--version",), None, VERSION_S, variables, stderr) or None


def with_own_folder(program: Path, env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the program's folder on PATH, where Intel's mpirun looks for its other programs."""
    folders = env.get("PATH", os.defpath).split(os.pathsep)
    folder = str(program.parent)
    return {**env, "PATH": os.pathsep.join(folders if folder in folders else [*folders, folder])}
