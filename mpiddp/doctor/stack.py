"""What the interpreter of the ranks loads, and from where. It may lack what this imports.

`mpiddp doctor` sends this source to each host, and its small job imports it. It needs Python 3.8.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

LIGHT, HEAVY = ("mpi4py", "mpiddp"), ("torch",)  # that takes seconds to load


def stack(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions, mpi4py's MPI, the libraries' paths, the hash of this package; "missing" or "broken: …"."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found.update(_READ[name]())
        except ModuleNotFoundError as error:
            found[name] = "missing" if error.name == name else f"broken: {error}"
        except BaseException as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            found[name] = f"broken: {lines[0][:200]}"
    return found


def _loaded(part: str) -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(None, 5)[5].strip() for line in lines if "/" in line}
    return ", ".join(sorted(path for path in paths if part in Path(path).name))


def _mpi() -> dict[str, str]:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    version = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
    return {
        "mpi4py": mpi4py.__version__,
        "mpi4py's MPI": version,
        "libmpi": _loaded("libmpi.so"),
    }


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
    spec = PathFinder.find_spec("mpiddp")  # the sender of this source has a module of that name
    if spec is None or not spec.submodule_search_locations:
        return {"mpiddp": "missing"}
    digest, (folder,) = hashlib.sha256(), spec.submodule_search_locations
    for at, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".ini")):
                digest.update(name.encode() + b"\0" + Path(at, name).read_bytes())
    return {"mpiddp": digest.hexdigest()[:12]}


_READ: dict[str, Callable[[], dict[str, str]]] = {
    "mpi4py": _mpi,
    "mpiddp": _package,
    "torch": _torch,
}
