"""The input from which `mpiddp launch` composes a command: options, hosts, GPUs, the MPI.

Tests mpiddp/launch/place.py and starters.py.
python -m pytest tests/unit/launch/test_launch_input.py
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.gpu_health import Health
from mpiddp.hosts.gpus import Gpu
from mpiddp.hosts.hostfile import Hosts, parse_host_list
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.names import is_this_host
from mpiddp.launch import place as places
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.place import (
    Past,
    find_network,
    place,
    requested_network,
)
from mpiddp.launch.preflight import HostInfo
from mpiddp.launch.starters import find_starter
from tests.support.errors import error
from tests.support.machine import TWO_GPUS, tool
from tests.unit.launch.test_starters import MPIS


def placed(hosts: Hosts, gpus: dict[str, int], backend: str | None = None) -> Hosts:
    """The hosts with their ranks, if the preflight has found `gpus`."""
    known = {host: Health([Gpu()] * gpus[host.name]) for host in hosts.hosts if host.name in gpus}
    options = LaunchOptions(backend=backend, host_list="-H")
    return place(hosts, known, MPIS["openmpi5"], options, Past(hosts, {}), 0)


def ranks(hosts: Hosts) -> list[int]:
    return [host.ranks for host in hosts.hosts]


def test_ranks_fill_the_slots_in_order() -> None:
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


def test_slots_of_a_bare_host_are_its_gpus_or_one() -> None:
    hosts = parse_host_list("gpus.invalid,cpu.invalid,few.invalid:2")
    found = {"gpus.invalid": 8, "cpu.invalid": 0, "few.invalid": 0}
    assert ranks(placed(hosts, found)) == [8, 1, 2]


def gpu_tool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi on PATH that lists two GPUs. No machine of the tests has one."""
    monkeypatch.setenv("PATH", tool(folder, "nvidia-smi", TWO_GPUS))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("1", 1), ("", 1)])
def test_the_ranks_of_a_bare_machine_are_the_gpus_that_they_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    gpu_tool(tmp_path, monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ranks(placed(parse_host_list("localhost"), {})) == [count]


def test_more_slots_than_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    """A scheduler counts in cores: its slots are reduced. The user's are kept, unless the job uses GPUs."""
    hosts = parse_host_list("n1.invalid:1,n2.invalid:4")
    found = {"n1.invalid": 2, "n2.invalid": 2}
    assert ranks(placed(hosts, found)) == [1, 4]
    note = "mpiddp: n2.invalid has 2 GPUs but 4 slots: "
    assert capfd.readouterr().err.startswith(f"{note}ranks that use GPUs would share them")
    sentence = error("share GPUs", "n2.invalid ", "2 GPUs", "4 slots")
    for backend in ("nccl", "auto"):
        with pytest.raises(UserError, match=f"^{sentence}$"):
            placed(hosts, found, backend)
    assert ranks(placed(hosts, found, "gloo")) == [1, 4]
    hosts = replace(hosts, scheduler="Slurm")
    assert ranks(placed(hosts, found)) == [1, 2]
    assert capfd.readouterr().err.startswith(f"{note}starting only 2 ranks there; ")
    assert ranks(placed(hosts, dict.fromkeys(found, 0))) == [1, 4]


def test_this_machine_gets_its_own_name() -> None:
    hosts = placed(parse_host_list("far.invalid:1,me@localhost:2"), {})
    own = socket.gethostname()
    assert [(host.name, host.ranks, host.user) for host in hosts.hosts] == [
        ("far.invalid", 1, None),
        (own, 2, None),
    ]
    assert is_this_host("127.0.0.1")
    assert not is_this_host("192.0.2.1")  # reserved for documentation


def test_the_network_is_the_requested_one_or_the_one_that_reaches_all_hosts() -> None:
    here, far = parse_host_list("localhost:1"), parse_host_list("localhost:1,far.invalid:1")
    requested = find_network(far, (), "127.0.0.1")
    assert (requested.interface and requested.interface.name) == "lo"
    assert requested.networks == ("127.0.0.0/8",)  # other hosts have other addresses on it
    assert requested.control_address == "127.0.0.1"
    assert requested_network("lo")[1] == ("lo",)
    missing = error("interface", '"nope"', socket.gethostname(), "lo (127.0.0.1)")
    with pytest.raises(UserError, match=missing):
        find_network(far, (), "nope")
    alone = find_network(here, (), None)
    assert (alone.interface, alone.networks, alone.control_address) == (None, (), "127.0.0.1")
    unknown = find_network(far, (), None, dry_run=True)
    assert (unknown.interface, unknown.networks, unknown.control_address) == (None, (), "")
    unreachable = error("reach. Name", " far.invalid ", ": --interface NAME ")
    with pytest.raises(UserError, match=f"^{unreachable}$"):
        find_network(far, (), None)


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
def test_the_network_by_the_routes_to_the_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
    routes: list[tuple[str, str] | None],
    theirs: list[str],
    expected: tuple[str | None, tuple[str, ...], str],
) -> None:
    """The routes are this machine's address and the host's. `theirs` are the names of their links."""
    hosts = parse_host_list("localhost:1,a.invalid:1,b.invalid:1")
    by_name = dict(zip(("a.invalid", "b.invalid"), routes, strict=True))
    monkeypatch.setattr(places, "_route", lambda name, login, family: of(family, by_name[name]))
    monkeypatch.setattr(places, "interfaces", lambda: [LO, ETH0, IB0, SIX])
    infos = [
        HostInfo(host, True, True, True, "", "", "", None, (Interface(name, "", "10.0.0.0/24"),))
        for host, name in zip(hosts.hosts[1:], theirs, strict=False)
    ]
    found = find_network(hosts, infos, None)
    name = found.interface.name if found.interface else None
    assert (name, found.networks, found.control_address) == expected


def fake_mpirun(folder: Path, answer: str) -> Path:
    """A program that prints `answer` for --version."""
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    return program


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
def test_kind_and_version(tmp_path: Path, answer: str, name: str, daemon: str) -> None:
    mpirun = str(fake_mpirun(tmp_path, answer))
    starter = find_starter("mpirun", mpirun, Path("/venv/bin/python"), os.environ)
    assert (starter.name, starter.daemon) == (name, daemon)
