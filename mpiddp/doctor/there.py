"""The facts of a host for `mpiddp doctor`, among them the packages that the Python of the ranks loads there.

This module travels to the hosts as source. It needs Python 3.8, and works without the packages of `_stack`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mpiddp.hosts.interfaces import interfaces, own_addresses, resolved
from mpiddp.hosts.program_files import files_of

_RESOLVERS = 64


def facts(wanted: dict[str, Any]) -> dict[str, Any]:
    """The facts by which the doctor compares this host. `wanted` comes from the doctor's main.py."""
    from concurrent.futures import ThreadPoolExecutor  # 10 ms

    names = {*wanted["names"], socket.gethostname()}
    with ThreadPoolExecutor(_RESOLVERS) as threads:
        addresses = dict(zip(names, threads.map(_addresses, names)))
    shared = os.statvfs("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    return {
        "hostname": socket.gethostname(),
        "addresses": [*own_addresses(), *(interface.address for interface in interfaces())],
        "names": addresses,
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # -1: no limit
        "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        "shm": shared.f_bavail * shared.f_frsize if shared else 0,
        "infiniband": os.path.isdir("/sys/class/infiniband"),
        "folders": {path: _error_of(path) for path in wanted["folders"]},
        "files": dict(files_of(*wanted["program"])),
        "stack": _stack(wanted["library"], wanted["packages"]),
    }


def _addresses(name: str) -> list[str]:
    """The addresses of a host, [] if its name does not resolve."""
    with suppress(OSError):
        return sorted({str(address[0]) for _, address in resolved(name)})
    return []


def _error_of(folder: str) -> str:
    """Why a folder cannot be read, "" if it can."""
    try:
        os.listdir(folder)
    except OSError as error:
        return str(error.strerror)
    return ""


def _stack(library: str, packages: Sequence[str]) -> dict[str, str]:
    """The versions of packages, the MPI of mpi4py, the paths of libraries, and the hash of mpiddp here.

    A package that does not load has "missing" or "broken: …". `library` is the path of MPI's library, "" for
    the one that mpi4py finds. `packages` are the folders of PYTHONPATH.
    """
    sys.path[:0] = packages
    if library:
        os.environ["MPI4PY_LIBMPI"] = library
    stack = {"python": platform.python_version()}
    read = {"mpi4py": _mpi, "mpiddp": _package, "torch": _torch}
    for name, versions in read.items():
        try:
            stack.update(versions())
        except ModuleNotFoundError as error:
            stack[name] = "missing" if error.name == name else f"broken: {error}"
        except BaseException as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            stack[name] = f"broken: {lines[0][:200]}"
    return stack


def _loaded(part: str) -> str:
    lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    paths = {line.split(None, 5)[5].strip() for line in lines if "/" in line}
    return ", ".join(sorted(path for path in paths if part in Path(path).name))


def _mpi() -> dict[str, str]:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    version = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
    return {"mpi4py": mpi4py.__version__, "mpi4py's MPI": version, "libmpi": _loaded("libmpi.so")}


def _torch() -> dict[str, str]:
    import torch

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    return {
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl)) or "not loaded",
        "libnccl": _loaded("libnccl"),
    }


def _package() -> dict[str, str]:
    spec = PathFinder.find_spec("mpiddp")  # in sys.modules stands the one that has travelled
    if spec is None or not spec.submodule_search_locations:
        return {"mpiddp": "missing"}
    paths = sorted(Path(*spec.submodule_search_locations).rglob("*"))
    files = [path for path in paths if path.is_file() and path.suffix != ".pyc"]
    contents = b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in files)
    return {"mpiddp": hashlib.sha256(contents).hexdigest()[:12]}
