"""--mpi-args: the MPI's own options reach it, unless they contradict the launcher's.

Tests mpiddp/launch/options.py, mpiddp/launch/starters/table.py.
python -m pytest tests/unit/launch/test_mpi_args.py
"""

from __future__ import annotations

import pytest

from mpiddp.errors import UserError
from mpiddp.launch.options import parse_mpi_args
from mpiddp.launch.starters.command import JobNetwork
from mpiddp.launch.starters.table import check_mpi_args
from tests.support.errors import error
from tests.unit.launch.test_starters import JOB, MPIS, UNEQUAL

REQUEST = UNEQUAL._replace(network=JobNetwork(networks=("10.0.0.0/24",)))


@pytest.mark.parametrize("mpi", MPIS)
def test_the_arguments_come_last_before_the_job_and_a_dry_run_shows_them(mpi: str) -> None:
    arguments = parse_mpi_args(["--verbose '--name=a b'", "-q"])
    check_mpi_args(MPIS[mpi].kind, arguments)
    request = REQUEST._replace(mpi_args=arguments)
    command = MPIS[mpi].compose(request)
    assert command.argv[-len(JOB) - 3 :] == ["--verbose", "--name=a b", "-q", *JOB]
    assert (
        "\n  --verbose '--name=a b' -q\n      --mpi-args, as you wrote them" in command.explained()
    )


def test_a_parameter_of_open_mpi_replaces_the_launchers() -> None:
    arguments = parse_mpi_args(["--mca pml ucx -mca oob_tcp_keepalive_time 9"])
    check_mpi_args(MPIS["openmpi5"].kind, arguments)
    argv = MPIS["openmpi5"].compose(REQUEST._replace(mpi_args=arguments)).argv
    assert argv.count("pml") == argv.count("oob_tcp_keepalive_time") == 1
    assert "ob1" not in argv
    assert "btl_tcp_if_include" in argv


def test_the_value_of_an_option_is_no_contradiction() -> None:
    check_mpi_args(MPIS["openmpi5"].kind, parse_mpi_args(["--mca pml n --output tag"]))


@pytest.mark.parametrize("option", ["--mca", "-mca", "--gmca", "--omca", "--prtemca", "--pmixmca"])
def test_each_option_that_sets_a_parameter_of_open_mpi(option: str) -> None:
    arguments = parse_mpi_args([f"{option} oob_tcp_keepalive_time 9 --tag pml"])
    argv = MPIS["openmpi5"].compose(REQUEST._replace(mpi_args=arguments)).argv
    assert argv.count("oob_tcp_keepalive_time") == 1
    assert argv.count("pml") == 2  # as the value of another option it replaces nothing


@pytest.mark.parametrize(
    ("mpi", "options"),
    [
        (
            "openmpi4",
            "-H --host --hostfile --machinefile -n -n4 -np -c -N --npernode --ppr --oversubscribe",
        ),
        ("openmpi5", "--map-by --rank-by --bind-to -x --wd --wdir --app"),
        (
            "intelmpi",
            "-f -hosts -host -hostfile -machinefile -machine -n -np -ppn -perhost -rr -grr",
        ),
        ("intelmpi", "-envall -envnone -genvlist -genvall -genvnone -wdir -bootstrap"),
        ("intelmpi", "-bootstrap-exec -iface -configfile"),
        (
            "mpich",
            "-f -hosts -host -hostfile -machinefile -rmk -n -np -ppn -bind-to -map-by -envall",
        ),
        ("mpich", "-envnone -genvlist -genvall -genvnone -wdir -launcher -launcher-exec -iface"),
        (
            "slurm",
            "-w --nodelist -F --nodefile -x --exclude -N --nodes -n --ntasks -m --distribution",
        ),
        ("slurm", "--ntasks-per-node --cpu-bind --export --mpi -D --chdir --multi-prog -K"),
    ],
)
def test_every_option_that_would_contradict(mpi: str, options: str) -> None:
    for option in options.split():
        sentence = error("would contradict", f"--mpi-args: {option} ")
        with pytest.raises(UserError, match=sentence):
            check_mpi_args(MPIS[mpi].kind, parse_mpi_args([option]))
