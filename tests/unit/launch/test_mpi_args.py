"""--mpi-args: the MPI's own options reach it, unless they contradict the launcher's.

Tests mpiddp/launch/options.py, mpiddp/launch/starters/openmpi.py.
python -m pytest tests/unit/launch/test_mpi_args.py
"""

from __future__ import annotations

import pytest

from mpiddp.launch.options import parse_mpi_args
from mpiddp.launch.starters.command import JobNetwork
from tests.unit.launch.test_starters import JOB, MPIS, UNEQUAL

REQUEST = UNEQUAL._replace(network=JobNetwork(networks=("10.0.0.0/24",)))


@pytest.mark.parametrize("mpi", MPIS)
def test_the_arguments_come_last_before_the_job_and_a_dry_run_shows_them(mpi: str) -> None:
    arguments = parse_mpi_args(["--verbose '--name=a b'", "-q"])
    request = REQUEST._replace(mpi_args=arguments)
    command = MPIS[mpi].compose(request)
    assert command.argv[-len(JOB) - 3 :] == ["--verbose", "--name=a b", "-q", *JOB]
    assert (
        "\n  --verbose '--name=a b' -q\n      --mpi-args, as you wrote them" in command.explained()
    )


def test_a_parameter_of_open_mpi_replaces_the_launchers() -> None:
    arguments = parse_mpi_args(["--mca pml ucx -mca oob_tcp_keepalive_time 9"])
    argv = MPIS["openmpi5"].compose(REQUEST._replace(mpi_args=arguments)).argv
    assert argv.count("pml") == argv.count("oob_tcp_keepalive_time") == 1
    assert "ob1" not in argv
    assert "btl_tcp_if_include" in argv


@pytest.mark.parametrize("option", ["--mca", "-mca", "--gmca", "--omca", "--prtemca", "--pmixmca"])
def test_each_option_that_sets_a_parameter_of_open_mpi(option: str) -> None:
    arguments = parse_mpi_args([f"{option} oob_tcp_keepalive_time 9 --tag pml"])
    argv = MPIS["openmpi5"].compose(REQUEST._replace(mpi_args=arguments)).argv
    assert argv.count("oob_tcp_keepalive_time") == 1
    assert argv.count("pml") == 2  # as the value of another option it replaces nothing
