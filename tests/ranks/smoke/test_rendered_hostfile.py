"""Open MPI accepts a hostfile that mpiddp hosts has converted.

Tests mpiddp/hosts/hostfile.py, mpiddp/hosts/main.py.
python -m pytest tests/ranks/smoke/test_rendered_hostfile.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.hosts.formats import render
from mpiddp.hosts.hostfile import parse_hostfile
from tests.support.patience import PATIENCE_S


def test_open_mpi_accepts_a_rendered_hostfile(tmp_path: Path) -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python")
    file = tmp_path / "hosts.txt"
    file.write_text(render(parse_hostfile(b"localhost:2 # two\n", "hosts.txt"), "openmpi"))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(mpirun), "--hostfile", str(file), "--bind-to", "none", "echo", "here"]
    done = subprocess.run(
        command, env=os.environ | root, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout.split()) == (0, ["here", "here"]), done.stderr
