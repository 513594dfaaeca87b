"""Every command takes its hosts in the same ways."""

import os

import pytest

from mpiddp import cli
from mpiddp.doctor import main as doctor
from mpiddp.errors import UserError
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


@pytest.mark.parametrize("command", ["check", "keys", "run", "doctor"])
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["hosts.txt", "-H", "node1"], "hosts.txt and -H both name the hosts"),
        (["--hostfile", "a", "-H", "node1"], "--hostfile and -H both name the hosts"),
        (
            ["node1"],
            r"node1 not found \(looked in .*\)\. If it is a host: -H node1",
        ),
    ],
)
def test_hosts_that_are_named_twice_or_wrongly(command, words, why):
    parse, before, behind = COMMANDS[command]
    with pytest.raises(UserError, match=why):
        parse([*before, *words, *behind])


def test_no_hosts_at_all(capsys):
    assert cli.main(["hosts", "check"]) == 2
    assert "on which hosts? Name them: FILE, --hostfile FILE or -H" in capsys.readouterr().err
