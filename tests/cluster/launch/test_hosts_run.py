"""`mpiddp hosts run`, on hosts whose file systems are apart: outputs, exit codes, and its end everywhere.

Tests mpiddp/hosts/run.py.
python -m pytest tests/cluster/launch/test_hosts_run.py
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from subprocess import CompletedProcess

import pytest

from mpiddp.hosts.allocations import compress_names, expand_nodelist
from tests.support.cluster import Cluster
from tests.support.cluster.host import Process
from tests.support.errors import error
from tests.support.hosts_verb import HOSTS, on_node0, three_hosts_apart
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with three_hosts_apart() as standing:
        yield standing


def run(hosts: Cluster, *arguments: str, file: str = "hosts") -> CompletedProcess[str]:
    return on_node0(hosts, "run", *arguments, file=file)


def test_hosts_are_apart(hosts: Cluster) -> None:
    """The hosts after the first see no file of this machine but the system's."""
    done = run(hosts, "--", "ls", str(ROOT))
    assert done.returncode == 1
    assert "node0: README.md\n" in done.stdout
    assert "node[1-2]: README.md" not in done.stdout
    assert "node[1-2]: exit code 2\n" in done.stderr


def test_equal_outputs_are_printed_once(hosts: Cluster) -> None:
    done = run(hosts, "--", "sh", "-c", "echo same; uname -n; echo why >&2")
    assert done.stdout == "".join(f"node{n}: same\nnode{n}: node{n}\n" for n in range(3))
    assert (done.returncode, done.stderr) == (0, "node[0-2]: why\n")
    done = run(hosts, "--", "printf", "%s\n", "$HOME; *", "--", "-x")
    assert done.stdout == "node[0-2]: $HOME; *\nnode[0-2]: --\nnode[0-2]: -x\n"


def test_exit_codes_by_host(hosts: Cluster) -> None:
    code = "test $(uname -n) = node1 && kill -9 $$; exit 7"
    done = run(hosts, "--parallel", "2", "--", "sh", "-c", code)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "node[0,2]: exit code 7\nnode1: exit code 137\n"
    done = run(hosts, "--", "--no-such-program")
    assert done.stderr == (
        "node[0-2]: --no-such-program: No such file or directory\nnode[0-2]: exit code 127\n"
    )


def test_output_without_effects_on_the_terminal(hosts: Cluster) -> None:
    done = run(hosts, "--", "printf", "\033[31mred")
    assert done.stdout == "node[0-2]: \\x1b[31mred\n"


def test_the_own_line_of_ssh(hosts: Cluster) -> None:
    (hosts.shared / "odd").write_text("node0\nnode1 port=7\n")
    done = run(hosts, "--", "echo", "here", file="odd")
    assert (done.returncode, done.stdout) == (1, "node0: here\n")
    first, second = done.stderr.splitlines()
    assert first == "node1: ssh: connect to host node1 port 7: Connection refused"
    assert re.fullmatch(error("connection refused", "node1: ssh node1: ", "sshd"), second), second


def test_a_host_without_python(hosts: Cluster) -> None:
    hide = ["mount", "--bind", "/dev/null", "/usr/bin/python3"]
    hosts["node1"].run(hide, check=True)
    try:
        done = run(hosts, "--", "echo", "here")
    finally:
        hosts["node1"].run(["umount", "/usr/bin/python3"], check=True)
    assert done.stdout == "node[0,2]: here\n"
    sentence = error("mpiddp needs", "node1: python3 ")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


def test_bad_input(hosts: Cluster) -> None:
    for arguments, sentence in (
        ((), error("hosts run", "FILE -- nvidia-smi -L")),
        (("--",), error("hosts run", "FILE -- nvidia-smi -L")),
        (("--parallel", "0", "--", "true"), error("--help", "--parallel", "'0'")),
        (("--timeout", "soon", "--", "true"), error("--help", "--timeout", "'soon'")),
    ):
        done = run(hosts, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr
    (hosts.shared / "dash").write_text("-oProxyCommand=x\n")
    done = run(hosts, "--", "true", file="dash")
    assert done.returncode == 2
    assert re.search(error("and would", "dash:1: ", '"-oProxyCommand=x"'), done.stderr)


def sleepers(hosts: Cluster) -> list[list[Process]]:
    return [
        [process for process in host.processes() if process.command == "sleep 1000"]
        for host in hosts.hosts
    ]


def wait_for_sleepers(hosts: Cluster, count: int) -> None:
    while [len(found) for found in sleepers(hosts)] != [count] * 3:
        time.sleep(0.02)


# A shell, its child, and a child that SIGTERM does not end.
SLEEP = "(trap '' TERM; exec sleep 1000) & sleep 1000; wait"


def test_a_timeout_ends_it_everywhere(hosts: Cluster) -> None:
    done = run(hosts, "--timeout", "2s", "--", "sh", "-c", f"echo begun; {SLEEP}")
    assert (done.returncode, done.stdout) == (1, "node[0-2]: begun\n")
    assert done.stderr == "node[0-2]: no end in 2 s; stopped\n"
    wait_for_sleepers(hosts, 0)


def test_ctrl_c_ends_it_everywhere(hosts: Cluster) -> None:
    command = [*HOSTS, "run", str(hosts.shared / "hosts"), "--", "sh", "-c", SLEEP]
    with hosts["node0"].popen(command, cwd=ROOT) as running:
        wait_for_sleepers(hosts, 2)
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=PATIENCE_S)
    assert (running.returncode, stderr) == (130, "interrupted\n")
    wait_for_sleepers(hosts, 0)


def test_names_are_folded_and_unfolded() -> None:
    names = ["node1", "node2", "node3", "node10", "login", "gpu07", "gpu08", "gpu10", "a9.x.org"]
    folded = "node[1-3,10],login,gpu[07-08,10],a9.x.org"
    assert compress_names(names) == folded
    assert expand_nodelist(folded) == names
    assert sorted(expand_nodelist(compress_names(["n9", "n10", "n09", "n9"]))) == [
        "n09",
        "n10",
        "n9",
    ]
    assert compress_names(["10.0.0.1", "10.0.0.2", "::1"]) == "10.0.0.1,10.0.0.2,::1"
