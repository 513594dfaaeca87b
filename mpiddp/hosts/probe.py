"""The preflight's probe. It runs on each host, over ssh, and reports what that host has.

The launcher sends the source of this file and of the modules that it imports from this package, so a
host needs only a Python 3. See `mpiddp.launch.preflight`.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpiddp.hosts.gpus import TIMEOUT_S, gpu_names
from mpiddp.hosts.interfaces import interfaces

VERSION_S, _VERSION_BYTES = 10.0, 1 << 16  # of an mpirun --version
LONGEST_S = TIMEOUT_S + VERSION_S + 5.0  # that a host with slow tools takes


def host_info(needs: dict[str, Any]) -> dict[str, Any]:
    """The fields of HostInfo except `host`, as JSON. `needs` is `preflight.Needs` as JSON.

    "mpirun" is the first line of its --version output, None if it cannot run. "gpus" is None if the
    vendor's tool does not answer.
    """
    path = f"{needs['path']}:{os.environ.get('PATH', os.defpath)}"
    names = gpu_names(path)
    version = program_version(needs["mpirun"], os.environ)
    return {
        "has_folder": os.path.isdir(needs["folder"]),  # noqa: PTH112 - False for any error
        "has_program": _has_program(needs),
        "has_daemon": os.access(needs["daemon"], os.X_OK),
        "mpirun": None if version is None else version.partition("\n")[0][:500],
        "torch": package_version("torch"),
        "mpi4py": package_version("mpi4py"),
        "gpus": None if names is None else len(names),
        "interfaces": [asdict(interface) for interface in interfaces()],
    }


def _has_program(needs: dict[str, Any]) -> bool:
    program = needs["program"]
    if program is None:
        return True
    if os.sep in program:  # relative to the working folder
        program = str(Path(needs["folder"], program))
    return shutil.which(program, path=needs["path"]) is not None


def package_version(package: str) -> str | None:
    """The version in the package's metadata, None if it is not installed.

    Importing torch to read its version would take seconds.
    """
    from importlib.metadata import PackageNotFoundError, version  # 20 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def program_version(program: str, env: Mapping[str, str]) -> str | None:
    """What `program --version` prints first; None if it cannot run, or prints nothing within VERSION_S.

    A program that is no mpirun may print without end, and what a shell script has started may hold the pipe.
    """
    try:
        running = subprocess.Popen(
            [program, "--version"],
            env=with_own_folder(Path(program), env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError:
        return None
    assert running.stdout is not None
    text, ended = b"", False
    deadline = time.monotonic() + VERSION_S
    with running.stdout as stdout:
        while not ended and len(text) < _VERSION_BYTES:
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                break
            chunk = os.read(stdout.fileno(), _VERSION_BYTES)
            text += chunk
            ended = not chunk
    running.kill()
    running.wait()
    return text.decode(errors="replace") if text or ended else None


def with_own_folder(program: Path, env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the program's folder on PATH, where Intel's mpirun looks for its other programs."""
    folders = env.get("PATH", os.defpath).split(os.pathsep)
    own = str(program.parent)
    return {**env, "PATH": os.pathsep.join(folders if own in folders else [*folders, own])}
