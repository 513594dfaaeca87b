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
# On a loaded machine, mpirun loses what a rank hands it to show ("Component: nonsense"), also without mpiddp:
# 4.1 in 21 of 40 starts, but says that it did. What a 5.0 rank writes by itself always arrives.
SHOWN_OR_LOST = r"Component: nonsense|ORTE_ERROR_LOG: .* in file \S+/show_help\.c"
NO_SUCH_NETWORK = {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "nonsense"}


@pytest.mark.parametrize(
    ("mpi", "options", "env", "reason"),
    [
        ("openmpi5", NO_SUCH_PART, {}, "An error occurred in MPI_Init"),
        ("openmpi4", NO_SUCH_PART, {}, SHOWN_OR_LOST),
        ("intelmpi", (), NO_SUCH_NETWORK, r"OFI fi_getinfo\(\) failed"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_sentence_says_that_mpi_init_failed(
    tmp_path: Path, mpi: str, options: tuple[str, ...], env: dict[str, str], reason: str
) -> None:
    command = ["--mpirun", mpirun_of(mpi), *options, "-H", "localhost:2"]
    done = launch(*command, script(tmp_path, "print('hello')"), **env)
    assert done.returncode == 1
    assert re.search(reason, done.stderr), done.stderr
    sentence = (
        r"^mpiddp: MPI_Init failed in rank [01] on \S+\. What the MPI has written above says why\. "
        r"The other ranks were stopped\.$"
    )
    assert len(re.findall(sentence, done.stderr, re.MULTILINE)) == 1, done.stderr
    assert "hello" not in done.stdout
