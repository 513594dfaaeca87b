"""A rank whose MPI_Init fails is named with that, and what its MPI has written stays in sight.

Most MPIs end the process within MPI_Init, so the rank itself cannot report anything.

Tests mpiddp/launch/supervise/verdict.py, mpiddp/runtime/rendezvous/mpi.py.
python -m pytest tests/ranks/launch/test_mpi_init.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.mpis import mpirun_of
from tests.support.ranks import launch, script

NO_SUCH_PART = ("--mpi-args", "--mca pml nonsense")
NO_SUCH_NETWORK = {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "nonsense"}


@pytest.mark.parametrize(
    ("mpi", "options", "env", "reason"),
    [
        ("openmpi5", NO_SUCH_PART, {}, "Component: nonsense"),
        ("openmpi4", NO_SUCH_PART, {}, "Component: nonsense"),
        ("intelmpi", (), NO_SUCH_NETWORK, "OFI fi_getinfo() failed"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_sentence_says_that_mpi_init_failed(
    tmp_path: Path, mpi: str, options: tuple[str, ...], env: dict[str, str], reason: str
) -> None:
    command = ["--mpirun", mpirun_of(mpi), *options, "-H", "localhost:2"]
    done = launch(*command, script(tmp_path, "print('hello')"), **env)
    assert done.returncode == 1
    assert reason in done.stderr
    sentence = (
        r"^mpiddp: MPI_Init failed in rank [01] on \S+\. What the MPI has written above says why\. "
        r"The other ranks were stopped\.$"
    )
    assert len(re.findall(sentence, done.stderr, re.MULTILINE)) == 1, done.stderr
    assert "hello" not in done.stdout
