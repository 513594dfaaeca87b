"""--mpi-args: each real MPI obeys its own option, and a contradiction starts nothing.

Tests mpiddp/launch/options.py, mpiddp/launch/starters/table.py.
python -m pytest tests/ranks/launch/test_mpi_options.py
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.support.errors import error
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.ranks import launch, script


def test_a_contradiction_starts_nothing(tmp_path: Path) -> None:
    done = launch("--mpi-args=-np 9", "-n", "1", script(tmp_path, "print('started')"))
    assert (done.returncode, done.stdout) == (2, "")
    values = ("--mpi-args: -np ", "mpiddp launch -n N or --npernode K")
    sentence = error("would contradict", *values)
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


# An option of each MPI that changes what it prints.
SEEN = {
    "openmpi5": ("--display map", "JOB MAP"),
    "openmpi4": ("--display-map", "JOB MAP"),
    "mpich": ("-verbose", "host: "),
    "intelmpi": ("-print-rank-map", ":0,1)"),
}


@pytest.mark.parametrize("mpi", ["openmpi5", *PACKAGES])
def test_each_mpi_obeys_its_own_option(tmp_path: Path, mpi: str) -> None:
    option, printed = SEEN[mpi]
    job = script(tmp_path, "import os; print('rank', os.environ['RANK'])")
    command = ("--mpirun", mpirun_of(mpi), "-n", "2", f"--mpi-args={option}", job)
    done = launch(*command, PATH=os.environ["PATH"])
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout, shlex.join(command)
    assert done.stdout.count("rank ") >= 2
