"""The input from which `mpiddp launch` composes a command: options, hosts, GPUs, the MPI.

Tests mpiddp/launch/place.py, network.py and starters.py.
"""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import parse_host_list
from mpiddp.hosts.interfaces import Interface
from mpiddp.launch import network
from mpiddp.launch.network import find_network
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.place import Past, choose, place
from mpiddp.launch.preflight import HostInfo
from mpiddp.launch.starters import find_starter
from tests.support.machine import an_mpirun
from tests.unit.launch.test_starters import MPIS


def test_ranks_fill_the_slots_in_order():
    hosts = parse_host_list("c.invalid:1,none.invalid:0,a.invalid:3,b.invalid:2")
    starter = MPIS["mpich"]
    for n, npernode, past, wanted, expected in (
        (None, None, Past(hosts, {}), 3, "c1 a3 b2"),
        (2, None, Past(hosts, {}), 3, "c1 a1"),
        (None, 1, Past(hosts, {}), 3, "c1 a1 b1"),
        (2, 1, Past(hosts, {}), 3, "c1 a1"),
        (None, None, Past(hosts, {}, max_ranks=3), 3, "c1 a2"),
        (4, None, Past(hosts, {}, max_ranks=5), 3, "c1 a3"),
        (9, None, Past(hosts, {}), 4, "c1 a3 b2"),  # a host is missing
        (9, 1, Past(hosts, {}, enough=4), 3, "c1 a1 b1"),
    ):
        options = LaunchOptions(n=n, npernode=npernode)
        found = place(hosts, {}, starter, options, past, wanted)
        assert " ".join(f"{host.name[0]}{host.ranks}" for host in found.hosts) == expected
    with pytest.raises(UserError, match="-n 7 is more than the 6 slots"):
        place(hosts, {}, starter, LaunchOptions(n=7), Past(hosts, {}, enough=3), 3)


def test_tasks_of_slurm_that_are_too_few(capfd, monkeypatch):
    hosts = replace(parse_host_list("a.invalid:1,b.invalid:1"), starter="srun")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    for options, more in (
        (LaunchOptions(npernode=8), "To start more: #SBATCH --ntasks-per-node=8"),
        (LaunchOptions(n=7), "To start more: #SBATCH --ntasks=7"),
    ):
        with pytest.raises(UserError, match=more):
            place(hosts, {}, MPIS["mpich"], options, Past(hosts, {}), 2)
        hint = "slots=2; for a rank on each GPU: #SBATCH --ntasks-per-node=8\n"
        assert hint in capfd.readouterr().err


def test_the_only_host_of_a_job_is_not_to_be_excluded(capfd):
    for listed, number in (("a.invalid:1,b.invalid:1", 2), ("a.invalid:1", 1)):
        past = Past(parse_host_list(listed), {"a.invalid": "a ended two"}, enough=number)
        choose(past, {}, number, number)
        assert ("--exclude a.invalid" in capfd.readouterr().err) is (number > 1)


ETH0 = Interface("eth0", "10.0.0.1", "10.0.0.0/24")
IB0 = Interface("ib0", "10.1.0.1", "10.1.0.0/16")
LO = Interface("lo", "127.0.0.1", "127.0.0.0/8")
BY_ETH0, BY_IB0, ROUTED = (
    ("10.0.0.1", "10.0.0.2"),
    ("10.1.0.1", "10.1.9.2"),
    ("10.0.0.1", "172.16.0.1"),
)
SIX = Interface("eth0", "fd77::1", "fd77::/64")
BY_SIX = ("fd77::1", "fd77::2")


def of(family: socket.AddressFamily, route: tuple[str, str] | None) -> tuple[str, str] | None:
    return route if route and (":" in route[0]) == (family == socket.AF_INET6) else None


@pytest.mark.parametrize(
    ("routes", "theirs", "expected"),
    [
        # ssh takes IPv6, and all hosts have IPv4 on the same link; then one has not.
        ([BY_SIX, BY_SIX], ["eth0", "eth0"], ("eth0", ("eth0",), "10.0.0.1")),
        ([BY_SIX, BY_SIX], ["eth0", "ens1"], ("eth0", ("fd77::/64",), "fd77::1")),
        ([BY_ETH0, BY_SIX], ["eth0", "eth0"], (None, (), "10.0.0.1")),
        ([BY_ETH0, ("10.0.0.1", "10.0.0.3")], ["eth0", "eth0"], ("eth0", ("eth0",), "10.0.0.1")),
        ([BY_IB0, BY_IB0], ["eth0", "eth0"], ("ib0", ("10.1.0.0/16",), "10.1.0.1")),
        ([BY_ETH0, BY_ETH0], ["eth0", "ens1"], ("eth0", ("10.0.0.0/24",), "10.0.0.1")),
        ([BY_ETH0, BY_ETH0], [], ("eth0", ("10.0.0.0/24",), "10.0.0.1")),
        ([BY_ETH0, ROUTED], ["eth0", "eth0"], ("eth0", (), "10.0.0.1")),
        ([BY_IB0, BY_ETH0], ["eth0", "eth0"], (None, (), "10.1.0.1")),
        ([None, BY_ETH0], ["eth0", "eth0"], (None, (), "10.0.0.1")),
        ([("127.0.0.1", "127.0.0.2")] * 2, [], (None, (), "127.0.0.1")),
    ],
)
def test_the_network_by_the_routes_to_the_other_hosts(monkeypatch, routes, theirs, expected):
    """The routes are this machine's address and the host's. `theirs` are the names of their links."""
    hosts = parse_host_list("localhost:1,a.invalid:1,b.invalid:1")
    by_name = dict(zip(("a.invalid", "b.invalid"), routes, strict=True))
    monkeypatch.setattr(network, "_route", lambda name, login, family: of(family, by_name[name]))
    monkeypatch.setattr(network, "interfaces", lambda: [LO, ETH0, IB0, SIX])
    infos = {
        host: HostInfo(
            host, True, True, True, "", "", "", None, (Interface(name, "10.0.0.2", "10.0.0.0/24"),)
        )
        for host, name in zip(hosts.hosts[1:], theirs, strict=False)
    }
    found = find_network(hosts, infos, None)
    name = found.interface.name if found.interface else None
    assert (name, found.networks, found.control_address) == expected


@pytest.mark.parametrize(
    ("answer", "name", "daemon"),
    [
        ("mpirun (Open MPI) 4.1.8", "Open MPI 4.1.8", "orted"),
        ("mpirun (Open MPI) 5.0.9rc1", "Open MPI 5.0.9rc1", "prted"),
        ("mpirun (Open MPI) 10.0.0", "Open MPI 10.0.0", "prted"),
        ("HYDRA build details:\n    Version:      4.3.0", "MPICH 4.3.0", "hydra_pmi_proxy"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 2026",
            "Intel MPI 2021.18.1",
            "hydra_bstrap_proxy",
        ),
        ("slurm-wlm 22.05.8", "Slurm's srun 22.05.8", ""),
    ],
)
def test_kind_and_version(tmp_path, answer, name, daemon):
    starter = find_starter(
        "mpirun", an_mpirun(tmp_path, answer), Path("/venv/bin/python"), os.environ
    )
    assert (starter.name, starter.daemon) == (name, daemon)


def test_a_folder_that_has_been_removed(tmp_path: Path) -> None:
    """A command in a folder that somebody has removed says so in one line."""
    line = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m mpiddp launch x.py"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    said = "mpiddp: this folder has been removed. Change to another.\n"
    assert (done.returncode, done.stderr) == (2, said)
