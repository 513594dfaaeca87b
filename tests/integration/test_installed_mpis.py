"""CI has every MPI that the tests run under.

Tests mpiddp/runtime/rendezvous/mpi.py.
python -m pytest tests/integration/test_installed_mpis.py
"""

from __future__ import annotations

from tests.support.mpis import find


def test_every_mpi_is_installed_for_ci() -> None:
    """If one is installed, all must be: an incomplete .mpi would skip tests unnoticed."""
    installed = [mpi for mpi in ("openmpi4", "mpich", "intelmpi") if find(mpi)]
    assert len(installed) in (0, 3), installed
