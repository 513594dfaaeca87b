"""Local ranks that no launcher sets: the ranks count them once they have joined.

Flux, PALS and jsrun cannot run here. Their variables are made from those of a real mpirun, so that real
ranks join over a real MPI.
Tests mpiddp/world.py, mpiddp/runtime/start/join.py, mpiddp/runtime/rendezvous/store.py.
python -m pytest tests/ranks/runtime/test_local_ranks.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.local_ranks import SHOW
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

RUN = (sys.executable, "-m", "mpiddp", "run")
WITHOUT_LOCALS = "env -u MPI_LOCALRANKID -u MPI_LOCALNRANKS"
AS_FLUX = "FLUX_TASK_RANK=$PMI_RANK FLUX_JOB_SIZE=$PMI_SIZE FLUX_TASK_LOCAL_ID=$MPI_LOCALRANKID"
AS_PALS = "PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$MPI_LOCALRANKID"


def shown(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("shown"))


@pytest.fixture
def show(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text(SHOW)
    return path


def without_threads(extra: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in clean_env(extra).items() if name != "OMP_NUM_THREADS"}


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(WITHOUT_LOCALS, id="hydra"),
        pytest.param(f"{AS_FLUX} {WITHOUT_LOCALS}", id="flux"),
        pytest.param(f"{AS_PALS} {WITHOUT_LOCALS}", id="pals"),
    ],
)
def test_ranks_of_an_mpi_without_local_sizes(show: Path, variables: str) -> None:
    shell = f'{variables} "$@"'
    command = [mpirun_of("mpich"), "-n", "3", "sh", "-c", shell, "sh", *RUN, str(show)]
    library = Path(mpirun_of("mpich")).parent.parent / "lib/libmpi.so.12"
    done = subprocess.run(
        command,
        env=without_threads({"MPI4PY_LIBMPI": str(library)}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert shown(done.stdout) == [f"shown {rank} {rank} 3 0 3 True" for rank in range(3)], (
        done.stderr
    )
    assert done.returncode == 0


def test_ranks_with_the_variables_of_jsrun(show: Path) -> None:
    """IBM's Spectrum MPI is an Open MPI."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    renamed = " ".join(f"JSM_NAMESPACE_{name}=$OMPI_COMM_WORLD_{name}" for name in names)
    hidden = " ".join(f"-u OMPI_COMM_WORLD_{name}" for name in names)
    shell = f'{renamed} env {hidden} "$@"'
    command = [mpirun_of("openmpi5"), "--allow-run-as-root", "--oversubscribe", "-n", "3"]
    done = subprocess.run(
        [*command, "sh", "-c", shell, "sh", *RUN, str(show)],
        env=without_threads({}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    lines = [line.split()[1:] for line in shown(done.stdout)]
    assert [line[0] for line in lines] == ["0", "1", "2"], done.stderr
    assert {line[1] for line in lines} == {"0", "1", "2"}  # Open MPI numbers them as it maps them
    assert {tuple(line[2:]) for line in lines} == {("3", "0", "3", "True")}


def test_ranks_of_one_host_without_local_variables(show: Path) -> None:
    env = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(29400 + os.getpid() % 500),
    }
    ranks = [
        subprocess.Popen(
            [*RUN, str(show)],
            env=without_threads(env | {"RANK": str(rank)}),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    assert shown("".join(outputs)) == ["shown 0 0 2 0 2 True", "shown 1 1 2 0 2 True"], outputs
