"""Every command takes its hosts in the same ways. tests/refusals has wrong ones."""

import pytest

from mpiddp.doctor import main as doctor
from mpiddp.hosts import main as hosts
from mpiddp.hosts.where import named_hosts

COMMANDS = {  # each with the folders, or the command, that it finds behind the hosts
    "check HOSTS": [],
    "keys HOSTS": [],
    "push HOSTS": [],
    "push HOSTS .": ["."],
    "pull HOSTS runs/a": ["runs/a"],
    "run HOSTS -- uptime -H x": ["uptime", "-H", "x"],
    "doctor HOSTS --quick": [],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "where", ["hosts.txt", "--hostfile hosts.txt", "-H node1:2,node2:4", "-H @gpu", ""]
)
def test_one_way_to_name_hosts(command, where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("node1 slots=2\nnode2 slots=4\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "mpiddp/hosts").mkdir(parents=True)
    (tmp_path / "mpiddp/hosts/gpu").symlink_to(tmp_path / "hosts.txt")
    (tmp_path / "nodes").write_text("node1\n" * 2 + "node2\n" * 4)
    env = {} if where else {"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "nodes")}
    verb, *words = command.replace("HOSTS", where).split()
    options = doctor._parse(words)[0] if verb == "doctor" else hosts._parse([verb, *words])
    found = named_hosts(options.hostfile, options.host_list, env, options.login_s)
    assert [(host.name, host.slots) for host in found.hosts] == [("node1", 2), ("node2", 4)]
    if verb in ("push", "pull", "run"):
        behind = options.command if verb == "run" else options.folders
        assert behind == COMMANDS[command]
