"""The small real job of `mpiddp doctor`: one rank on each host, an all-reduce with a known result.

    mpiddp launch -H node1:1,node2:1 -m mpiddp.doctor.job

Each rank also says which libraries it has loaded and how fast its device multiplies two matrices. The doctor
sends the source of this file to the hosts, too: it needs Python 3.8, and may lack all that it imports.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import socket
import time
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

PROOF = "mpiddp-doctor "
COUNT = 4 << 20  # floats: 16 MB
LEAST_SPEED = 0.8  # of the median of three hosts or more
LEAST_COMPARED = 3  # hosts: of two, either may be the odd one
LIGHT, HEAVY = ("mpi4py", "mpiddp"), ("torch",)  # that takes seconds to load
_SIZES = {"cpu": 256, "cuda": 4096}  # of the square matrices
_ROUNDS = 20
_MOST_TURNS = 20  # while a rank seems slow: other programs slow a host down for a moment


def main() -> None:
    """Sum a tensor over all ranks. Rank 0 prints what each rank says of itself."""
    import torch
    import torch.distributed as dist

    device = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # one rank on each host
        device = "cuda"
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.full((COUNT,), float(rank + 1), device=device)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(values)
    wrong = int((values != size * (size + 1) / 2).sum())
    own = {
        "hostname": socket.gethostname(),
        "wrong": wrong,
        "seconds": time.perf_counter() - began,
        "speed": _speed(device, rank, size),
        "stack": stack(HEAVY),
    }
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own)
    if rank == 0:
        print(PROOF + json.dumps(gathered), flush=True)
    dist.destroy_process_group()


def _speed(device: str, rank: int, size: int) -> float:
    """The matrix products a second of this rank's device, of the best one. All ranks take equal turns."""
    import torch
    import torch.distributed as dist

    clock = time.perf_counter
    if device == "cpu":  # the thread's own time, whoever else uses the processor
        torch.set_num_threads(1)
        clock = time.thread_time
    matrix = torch.ones(_SIZES[device], _SIZES[device], device=device)
    speeds, shortest = torch.zeros(size, device=device), math.inf
    for _ in range(_MOST_TURNS):
        for _ in range(_ROUNDS):
            began = clock()
            torch.mm(matrix, matrix)
            if device == "cuda":
                torch.cuda.synchronize()
            shortest = min(shortest, clock() - began)
        speeds[rank] = 1 / max(shortest, 1e-9)
        known = speeds.clone()
        dist.all_reduce(known, op=dist.ReduceOp.MAX)
        if size < LEAST_COMPARED or known.min() >= LEAST_SPEED * known.median():
            break
    return float(speeds[rank])


def stack(packages: tuple[str, ...], library: str = "") -> dict[str, str]:
    """Versions, mpi4py's MPI, the libraries' paths, the hash of this package; "missing" or "broken: …"."""
    if library:
        os.environ["MPI4PY_LIBMPI"] = library
    found = {"python": platform.python_version()}
    read = {"mpi4py": _mpi, "mpiddp": _package, "torch": _torch}
    for name in packages:
        try:
            found.update(read[name]())
        except ModuleNotFoundError as error:
            found[name] = "missing" if error.name == name else f"broken: {error}"
        except BaseException as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            found[name] = f"broken: {lines[0][:200]}"
    return found


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


if __name__ == "__main__":
    main()
