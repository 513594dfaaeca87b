"""An environment of run.sh for another MPI is removed with a message.

Tests run.sh.
python -m pytest tests/ranks/examples/test_run_sh_other_mpi.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, find_mpirun
from tests.support.run_sh import copy, run_sh


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all files that a training needs, in a folder with a space, not set up yet."""
    root = copy(tmp_path_factory.mktemp("run_sh") / "a tree")
    shutil.copy(ROOT / "README.md", root)
    for name in ("mpiddp", "hostfiles"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


THIS_PYTHON_AND_MPIRUN = {"MPIDDP_PYTHON": sys.executable, "MPIDDP_MPIRUN": find_mpirun()}


@pytest.fixture(scope="module")
def failed(tree: Path) -> subprocess.CompletedProcess[str]:
    """A first set-up that fails halfway, over a .venv that was made for another MPI."""
    venv = tree / ".venv"
    venv.mkdir()
    (venv / ".set-up").write_text(f"{tree}\n\n/another/mpirun\n")
    (venv / "of another MPI").touch()
    good = (tree / "constraints.txt").read_text()
    (tree / "constraints.txt").write_text(f"{good}pytest==0.0.1\n")
    done = run_sh(tree, "setup", env={"PIP_NO_INDEX": "1", **THIS_PYTHON_AND_MPIRUN})
    (tree / "constraints.txt").write_text(good)
    return done


@pytest.mark.slow
def test_an_environment_of_another_mpi_is_removed_with_a_message(
    tree: Path, failed: subprocess.CompletedProcess[str]
) -> None:
    assert failed.stderr.splitlines()[0] == (
        f"run.sh: {tree}/.venv was made for {tree} with python3 and /another/mpirun, but "
        f"{tree} with {sys.executable} and {find_mpirun()} is requested; removing and rebuilding it"
    )
    assert not (tree / ".venv" / "of another MPI").exists()
