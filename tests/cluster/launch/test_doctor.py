"""`mpiddp doctor` on real hosts: each fault has its line, and a healthy cluster none.

Tests mpiddp/checks.
python -m pytest tests/cluster/launch/test_doctor.py
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, faults, needs
from tests.support.cluster.host import ROOT_PATH, Host
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

BIN = Path(sys.executable).parent
WORK = "/run/work"  # each host has its own /run
PYTHON = "/run/env/bin/python"
NAMES = "node0,node1,node2,node3"
GPU_TOOL = """#!/bin/sh
case "$*" in
  -L) echo "GPU 0: NVIDIA H200 (UUID: GPU-1)" ;;
  *query-gpu*) echo "0, NVIDIA H200, 143771, 0, {driver}, 1980, {errors}" ;;
  *query-compute*) {users} ;;
esac
"""
# As a firewall does: byte 47 of a frame has TCP's flags, and 30 to 33 the target.
# A SYN alone to 10.77.0.2 is dropped (2), all else passes (0).
NO_SYN_TO_NODE1 = "6,48 0 0 47,21 0 3 2,32 0 0 30,21 0 1 172818434,6 0 0 2,6 0 0 0"
AFTERWARDS = {"no job after that": "job unknown not run: the preflight or the versions"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """Hosts with folders of their own, an environment under a path of its own, and one GPU each."""
    with cluster.up_or_skip(4) as standing:
        for host in standing.hosts:
            shell(host, f"mkdir -p {WORK}/runs {WORK}/data /run/env /run/tools")
            shell(host, f"ln -s {BIN.parent}/* /run/env; rm /run/env/bin; mkdir /run/env/bin")
            shell(host, f"ln -s {BIN}/* /run/env/bin; echo 1 >{WORK}/data/file")
            shell(host, f"echo 'print(1)' >{WORK}/train.py; echo 'X = 1' >{WORK}/model.py")
            gpu_tool(host)
        yield standing


def shell(host: Host, script: str, stdin: str | None = None) -> None:
    host.run(["sh", "-ec", script], stdin=stdin, check=True)


def gpu_tool(host: Host, driver: str = "570.1", errors: str = "0", users: str = ":") -> None:
    text = GPU_TOOL.format(driver=driver, errors=errors, users=users)
    shell(host, "cat >/run/tools/nvidia-smi; chmod +x /run/tools/nvidia-smi", text)


def doctor(hosts: Cluster, *arguments: str, names: str = NAMES) -> tuple[int, list[dict[str, str]]]:
    """The exit code of `mpiddp doctor` on node0, and its lines that are not ok."""
    command = [PYTHON, "-m", "mpiddp", "doctor", "-H", names, "--json", *arguments]
    env = {"PATH": f"/run/tools:{ROOT_PATH}"}
    done = hosts["node0"].run(command, cwd=WORK, env=env, timeout_s=2 * PATIENCE_S)
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    print(f"{result['seconds']} s")
    # Whether the kernel's log may be read depends on this machine.
    lines = [line for line in result["lines"] if "no Xid was sought" not in line["fact"]]
    return done.returncode, [line for line in lines if line["status"] != "ok"]


def require_found(
    hosts: Cluster, expected: Mapping[str, str], *arguments: str, names: str = NAMES
) -> None:
    """The doctor finds these faults, no other, and ends with code 1."""
    code, lines = doctor(hosts, *arguments, names=names)
    check(lines, expected)
    assert code == 1


def check(lines: Sequence[Mapping[str, str]], expected: Mapping[str, str]) -> None:
    """Every fault has its line ("check status pattern"), and there is no other."""
    said = [f"{line['check']} {line['status']} {line['fact']} → {line['mend']}" for line in lines]
    print("\n".join(said))
    missed = {fault for fault, pattern in expected.items() if not matching(pattern, said)}
    assert missed == set(), said
    assert [
        line for line in said if not any(matching(each, [line]) for each in expected.values())
    ] == []


def matching(pattern: str, said: Sequence[str]) -> list[str]:
    return [line for line in said if re.match(pattern, line)]


def test_a_healthy_cluster_has_no_false_alarm(hosts: Cluster) -> None:
    code, lines = doctor(hosts, "--script", "train.py", "--data", "data")
    assert lines == []
    assert code == 0
    for host in hosts.hosts:  # nothing of the doctor stays
        assert host.run(["ls", "-A", f"{WORK}/runs"]).stdout == ""
        assert "mpiddp" not in str(host.processes())


def test_hosts_that_ssh_does_not_reach(hosts: Cluster) -> None:
    """The other host is checked all the same."""
    expected = {
        "wrong key": r"preflight fail ssh node1: permission denied \(publickey\) → Run: ssh-copy-id node1",
        "unknown host key": r"preflight fail ssh node2: its host key is unknown → .*ssh-keyscan node2",
        "stopped sshd": "preflight fail ssh node3: connection refused → Start sshd there",
        "unresolvable name": "preflight fail nowhere: cannot be resolved from node0 → Add it to DNS",
        **AFTERWARDS,
    }
    with (
        faults.key_refused(hosts["node1"]),
        faults.unknown_key(hosts, hosts["node2"]),
        faults.no_sshd(hosts["node3"]),
    ):
        require_found(hosts, expected, names=f"{NAMES},nowhere")


def test_hosts_that_lack_what_a_job_needs(hosts: Cluster) -> None:
    expected = {
        "interpreter missing": f"preflight fail node1: {PYTHON} is missing → Install it",
        "daemon missing": "preflight fail node2: /run/env/bin/prted is missing or does not run → Install",
        "host down": "preflight fail ssh node3: no (answer in|route from) .* → Check that the host is on",
    }
    with (
        renamed(hosts["node1"], "/run/env/bin/python"),
        renamed(hosts["node2"], "/run/env/bin/prted"),
        faults.unreachable(hosts["node3"]),
    ):
        require_found(hosts, expected, "--quick")


def test_a_folder_that_is_missing_and_an_mpi_of_another_version(hosts: Cluster) -> None:
    expected = {
        "working folder missing": f"preflight fail node1: the working folder {WORK} is missing",
        "Open MPI 4 beside 5": r"versions fail .*mpirun differs: .*4\.1\.8 on node2 → Install the same MPI",
    }
    with renamed(hosts["node1"], WORK), renamed(hosts["node2"], "/run/env/bin/mpirun"):
        stub = "#!/bin/sh\necho 'mpirun (Open MPI) 4.1.8'\n"
        shell(hosts["node2"], "cat >/run/env/bin/mpirun; chmod +x /run/env/bin/mpirun", stub)
        require_found(hosts, expected, "--quick")


EVERYWHERE = {
    "own name is 127.0.1.1": "names warn node1's own name resolves to 127.0.1.1 there",
    "name unknown on one host": "names warn node2 cannot be resolved from node1 → add node2 to DNS",
    "name leads elsewhere": "names warn node3 resolves to 10.77.0.99 on node2, which is no address of node3",
    "banner in a start-up file": 'ssh warn the start-up files .* on node2 print "Welcome"',
    "another torch": r"versions fail torch differs: .*2\.12\.1 on node1 → Install the same version",
    "torch does not load": "versions fail torch does not load on node1: no libcudart",
    "mpi4py does not load": "versions fail mpi4py does not load on node3: no libmpi",
    "another mpiddp": "versions fail mpiddp is [0-9a-f]+ on node3, [0-9a-f]+ on the other 3 hosts",
    "another driver": r"GPUs fail driver_version of the GPUs is 535\.2 on node1, 570\.1 on the other 3",
    "memory errors of a GPU": "GPUs fail uncorrected memory errors on node2: GPU 0: 3",
    "another user of a GPU": r"GPUs warn the GPUs of node2 are in use \(pid, MiB\): 4711, 90000",
    "script changed": f"files fail {WORK}/train.py is [0-9a-f]+ on node2, [0-9a-f]+ on the other 3",
    "module missing": f"files fail {WORK}/model.py is missing on node1",
    "data missing": f"folders fail the data folder {WORK}/data cannot be used on node2: No such file",
    "run folder read-only": f"folders fail the run folder {WORK}/runs cannot be used on node1: Read-only",
    "run folder nearly full": f"folders fail the run folder {WORK}/runs has .* MB left on node2",
    "port blocked one way": r"network fail node2 → node1 \(10.77.0.2\) fails: no answer in 3 s; "
    "node1 → node2 is open",
    "blackholed route": r"network fail (node3 → node2 .*: no route|node2 → node3 .*: no answer)",
    "small MTU": "network warn the MTU is 1400 on node3, 1500 on the other 3 hosts",
    "slow link": r"bandwidth warn node3 → node[01] carries .*/s, the middle pair .*/s → see the cable",
    "low nofile": "limits fail a process may open 256 files on node3 ",
    "low memlock": r"limits warn the limit of locked memory is 65536 on node1, .* on the other 3",
    "small /dev/shm": "limits warn /dev/shm holds 16.8 MB on node3 → mount -o remount",
    **AFTERWARDS,
}


def test_faults_everywhere_at_once(hosts: Cluster) -> None:
    """One run with all of them: each has its line, none hides another."""
    node1, node2, node3 = (hosts[name] for name in ("node1", "node2", "node3"))
    with ExitStack() as stack:
        own_name = (
            node1.path("/etc/hosts").read_text().replace("10.77.0.2 node1", "127.0.1.1 node1")
        )
        for host, path, text in (
            (node1, "/etc/hosts", own_name.replace("10.77.0.3 node2\n", "")),
            (
                node2,
                "/etc/hosts",
                node2.path("/etc/hosts").read_text().replace("10.77.0.4", "10.77.0.99"),
            ),
            (node2, "/root/.bashrc", "echo Welcome\n"),
            (node2, f"{WORK}/train.py", "print(2)\n"),
        ):
            stack.enter_context(written(host, path, text))
        other_python(node1, torch="raise ImportError('no libcudart')", version="2.12.1")
        other_python(node3, mpi4py="raise ImportError('no libmpi')")
        shell(node3, f"cp -r {ROOT}/mpiddp /run/other/; echo >>/run/other/mpiddp/text.py")
        gpu_tool(node1, driver="535.2")
        gpu_tool(node2, errors="3", users="echo 4711, 90000")
        stack.enter_context(renamed(node1, f"{WORK}/model.py"))
        stack.enter_context(renamed(node2, f"{WORK}/data"))
        stack.enter_context(mounted(node1, f"{WORK}/runs", "ro,size=9g"))
        stack.enter_context(mounted(node2, f"{WORK}/runs", "size=50m"))
        stack.enter_context(mounted(node3, "/dev/shm", "size=16m"))
        for host, limit in ((node3, "--nofile=256:256"), (node1, "--memlock=65536:65536")):
            sshd = host.path("/run/sshd.pid").read_text().strip()
            shell(host, f"prlimit --pid={sshd} {limit}")
        tc(node2, "qdisc add dev eth0 clsact")
        tc(node2, f"filter add dev eth0 egress bpf da bytecode '{NO_SYN_TO_NODE1}'")
        tc(node3, "qdisc add dev eth0 root tbf rate 20mbit burst 64kb latency 50ms")
        shell(node3, "ip link set dev eth0 mtu 1400; ip route add blackhole 10.77.0.3/32")
        require_found(hosts, EVERYWHERE, "--script", "train.py", "--data", "data")


def other_python(host: Host, version: str = "", **packages: str) -> None:
    """Give this host an interpreter that finds these packages first, each with this text."""
    for name, text in packages.items():
        shell(host, f"mkdir -p /run/other/{name}; cat >/run/other/{name}/__init__.py", text)
        if version:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            info = f"/run/other/{name}-{version}.dist-info"
            shell(host, f"mkdir -p {info}; cat >{info}/METADATA", metadata)
    wrapper = f'#!/bin/sh\nPYTHONPATH=/run/other exec {sys.executable} "$@"\n'
    shell(host, f"rm {PYTHON}; cat >{PYTHON}; chmod +x {PYTHON}", wrapper)


@contextmanager
def renamed(host: Host, path: str) -> Iterator[None]:
    shell(host, f"mv {path} {path}.away")
    try:
        yield
    finally:
        shell(host, f"rm -rf {path}; mv {path}.away {path}")


@contextmanager
def written(host: Host, path: str, text: str) -> Iterator[None]:
    file = host.path(path)
    before = file.read_text() if file.exists() else ""
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(before)


@contextmanager
def mounted(host: Host, path: str, options: str) -> Iterator[None]:
    shell(host, f"mount -t tmpfs -o {options} none {path}")
    try:
        yield
    finally:
        shell(host, f"umount {path}")


def tc(host: Host, command: str) -> None:
    enter = [needs.tool("nsenter"), f"--target={host.pid}", "--net", needs.tool("tc")]
    subprocess.run([*enter, *shlex.split(command)], check=True, timeout=PATIENCE_S)
