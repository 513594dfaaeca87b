"""Every command takes its hosts in the same ways. tests/refusals has wrong ones."""

import os

import pytest

from mpiddp.doctor import main as doctor
from mpiddp.hosts import main as hosts
from mpiddp.hosts.where import named_hosts

# The arguments before and behind the hosts.
COMMANDS = {
    "check": (hosts._parse, ["check"], []),
    "keys": (hosts._parse, ["keys"], []),
    "push": (hosts._parse, ["push"], []),
    "push of a folder": (hosts._parse, ["push"], ["."]),
    "pull": (hosts._parse, ["pull"], ["runs/a"]),
    "run": (hosts._parse, ["run"], ["--", "uptime", "-H", "x"]),
    "doctor": (lambda argv: doctor._parse(argv)[0], [], ["--quick"]),
}


@pytest.fixture(autouse=True)
def hostfile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PBS_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "hosts.txt").write_text("node1 slots=2\nnode2 slots=4\n")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "where", [["hosts.txt"], ["--hostfile", "hosts.txt"], ["-H", "node1:2,node2:4"], []]
)
def test_one_way_to_name_hosts(command, where, tmp_path, monkeypatch):
    parse, before, behind = COMMANDS[command]
    if not where:  # an allocation
        (tmp_path / "nodes").write_text("node1\n" * 2 + "node2\n" * 4)
        monkeypatch.setenv("PBS_JOBID", "7")
        monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    options = parse([*before, *where, *behind])
    found = named_hosts(options.hostfile, options.host_list, os.environ, options.login_s)
    assert [(host.name, host.slots) for host in found.hosts] == [("node1", 2), ("node2", 4)]
    if command == "run":
        assert options.command == ["uptime", "-H", "x"]
    if command.startswith("pu"):
        assert options.folders == behind
