"""The preflight, on real hosts: it names every broken host in one sentence before anything starts.

Tests mpiddp/launch/preflight.py.
python -m pytest tests/cluster/launch/test_preflight.py
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, faults
from tests.support.cluster.host import Host
from tests.support.errors import error
from tests.support.ranks import ROOT

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(3) as standing:
        yield standing


def launch(
    hosts: Cluster,
    *arguments: str,
    env: dict[str, str] | None = None,
    cwd: Path = ROOT,
    python: Path = BIN / "python",
) -> CompletedProcess[str]:
    """`mpiddp launch` of a job that prints "started", from node0."""
    command = [str(python), "-m", "mpiddp", "launch", *arguments, str(hosts.shared / "job.py")]
    (hosts.shared / "job.py").write_text("print('started')\n")
    return hosts["node0"].run(command, cwd=cwd, env=env)


def refusal(done: CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return done.stderr.strip()


def test_hosts_are_checked_in_parallel(hosts: Cluster) -> None:
    """A login to each of two hosts waits for a login to the other, so checks in sequence time out."""
    logins = hosts.shared / "logins"
    logins.mkdir()
    with ExitStack() as stack:
        for here, there in (("node1", "node2"), ("node2", "node1")):
            wait = f"for _ in $(seq 100); do [ -e {there} ] && exit; sleep 0.1; done; touch alone"
            command = f"cd {shlex.quote(str(logins))}; touch {here}; {wait}"
            stack.enter_context(faults.slow_login(hosts[here], command))
        done = launch(hosts, "-H", "node0:1,node1:9,node2:1", "-n", "99")  # refused after the check
    assert re.search(error("slots of", "-n 99 ", "11 slots"), refusal(done))
    assert sorted(path.name for path in logins.iterdir()) == ["node1", "node2"]


NO_KEY = error("Run: ssh-copy-id", "ssh node1: ", "(publickey)", "Run: ssh-copy-id node1 ")


def test_a_refused_ssh_key(hosts: Cluster) -> None:
    with faults.key_refused(hosts["node1"]):
        sentence = refusal(launch(hosts, "-H", "node0:1,node1:1"))
    assert re.fullmatch(NO_KEY, sentence), sentence


def test_an_unknown_host_key(hosts: Cluster) -> None:
    with faults.unknown_key(hosts, hosts["node2"]):
        sentence = refusal(launch(hosts, "-H", "node0:1,node2:1"))
    mend = "ssh-keyscan node2 >> ~/.ssh/known_hosts"
    assert re.fullmatch(error(">> ~/.ssh/known_hosts", "ssh node2: ", mend), sentence), sentence


def test_every_broken_host_is_named_at_once(hosts: Cluster) -> None:
    with faults.key_refused(hosts["node1"]), faults.no_sshd(hosts["node2"]):
        sentences = refusal(launch(hosts, "-H", "node0:1,node1:1,node2:1,nowhere:1"))
    no_sshd = error("connection refused", "ssh node2: ", "sshd", "node2 port=N")
    no_name = error("be resolved", "nowhere: ", "node0", "/etc/hosts")
    assert re.fullmatch("\n".join([NO_KEY, no_sshd, no_name]), sentences), sentences


def test_a_login_that_ends_at_once(hosts: Cluster) -> None:
    with faults.login_fails(hosts["node1"]):
        sentence = refusal(launch(hosts, "-H", "node0:1,node1:1"))
    assert re.fullmatch(error("failed:", "ssh node1 ", "ssh node1 true "), sentence), sentence


def test_a_folder_that_one_host_lacks(hosts: Cluster) -> None:
    folder = Path("/run/only-here")  # each host has its own /run
    hosts["node0"].run(["mkdir", "-p", str(folder)], check=True)
    sentence = refusal(launch(hosts, "-H", "node0:1,node1:1", cwd=folder))
    values = ("node1: ", f"{folder} ", "mpiddp hosts push")
    assert re.fullmatch(error("missing. Copy", *values), sentence), sentence


def test_more_slots_than_gpus(hosts: Cluster) -> None:
    tools = hosts.shared / "tools"
    tools.mkdir(exist_ok=True)
    stub = tools / "nvidia-smi"  # no machine of the tests has a GPU
    stub.write_text('#!/bin/sh\necho "GPU 0: A"\necho "GPU 1: B"\n')
    stub.chmod(0o755)
    path = hosts["node0"].run(["sh", "-c", "echo $PATH"]).stdout.strip()
    env = {"PATH": f"{tools}:{path}"}
    where = ("-H", "node0:2,node1:4", "-n", "1")
    train = [str(BIN / "python"), "-m", "mpiddp", "launch", *where, "-m", "mpiddp", "train"]
    done = hosts["node0"].run(train, cwd=ROOT, env=env)
    assert re.fullmatch(error("share GPUs", "node1 ", "2 GPUs", "4 slots"), refusal(done))
    done = launch(hosts, *where, env=env)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    assert done.stderr.startswith(
        "mpiddp: node1 has 2 GPUs but 4 slots: ranks that use GPUs would share them"
    )
    done = launch(hosts, *where, "--share-gpus", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


def gpu_tool(hosts: Cluster, text: str) -> dict[str, str]:
    """An environment in which every host has an nvidia-smi that runs `text`."""
    tools = hosts.shared / "own tools"
    tools.mkdir(exist_ok=True)
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\ncd '{tools}'\n{text}\n")
    (tools / "nvidia-smi").chmod(0o755)
    path = hosts["node0"].run(["sh", "-c", "echo $PATH"]).stdout.strip()
    return {"PATH": f"{tools}:{path}"}


def test_every_host_is_asked_once(hosts: Cluster) -> None:
    """A host that breaks right after its answer cannot make the launch forget the others."""
    calls = hosts.shared / "own tools" / "calls"
    env = gpu_tool(
        hosts, "if [ -e calls ] && grep -q $(hostname) calls; then sleep 600; fi\nhostname >>calls"
    )
    where = ("-H", "node0:1,node1:1,node2:1,nowhere:1", "--min-hosts", "2")
    done = launch(hosts, *where, env=env)
    assert (done.returncode, done.stdout) == (0, "started\n" * 3), done.stderr
    assert sorted(calls.read_text().split()) == ["node0", "node1", "node2"]


def test_gpus_that_take_long_to_wake_are_waited_for(hosts: Cluster) -> None:
    """Longer than a login may take, as without persistence mode on a machine with many GPUs."""
    env = gpu_tool(hosts, '[ "$(hostname)" = node0 ] || sleep 16\necho "GPU 0: A"')
    done = launch(hosts, "-H", "node0:1,node1:1", "-n", "99", env=env)  # refused after the check
    too_many = error("slots of", "-n 99 ", "2 slots", "-H (node0=1, node1=1)")
    assert re.fullmatch(too_many, refusal(done))


def test_a_bare_host_without_gpus_gets_one_rank(hosts: Cluster) -> None:
    done = launch(hosts, "-H", "node1,node2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["started", "started"]


def test_the_check_can_be_skipped(hosts: Cluster) -> None:
    done = launch(hosts, "-H", "node0:1,node1:1", "--no-check")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["started", "started"]


@pytest.fixture
def linked_environment(hosts: Cluster) -> Iterator[Path]:
    """The Python environment under a path that exists on node0 only."""
    folder = Path("/run/env")
    hosts["node0"].run(["ln", "-sfn", str(BIN.parent), str(folder)], check=True)
    yield folder
    for host in hosts.hosts:
        host.run(["rm", "-rf", str(folder), "/run/other"], check=True)


def test_an_interpreter_that_one_host_lacks(hosts: Cluster, linked_environment: Path) -> None:
    sentence = refusal(
        launch(hosts, "-H", "node0:1,node1:1", python=linked_environment / "bin" / "python")
    )
    values = ("node1: ", "/run/env/bin/python ", ": mpiddp hosts push")
    assert re.fullmatch(error("Install it at", *values), sentence), sentence


def give_own_python(host: Host, wrapper: str) -> None:
    """On this host, make /run/env/bin/python the script `wrapper`, beside links to the other programs."""
    script = (
        f"mkdir -p /run/env/bin && ln -s {BIN}/* /run/env/bin/ && "
        "rm /run/env/bin/python && cat >/run/env/bin/python && chmod +x /run/env/bin/python"
    )
    host.run(["sh", "-c", script], stdin=wrapper, check=True)


def test_versions_that_differ(hosts: Cluster, linked_environment: Path) -> None:
    """node1's Python finds the metadata of another torch."""
    node1, metadata = hosts["node1"], "/run/other/torch-2.12.1.dist-info"
    give_own_python(node1, f'#!/bin/sh\nPYTHONPATH=/run/other exec {sys.executable} "$@"\n')
    text = "Metadata-Version: 2.1\nName: torch\nVersion: 2.12.1\n"
    script = f"mkdir -p {metadata} && cat >{metadata}/METADATA"
    node1.run(["sh", "-c", script], stdin=text, check=True)
    sentence = refusal(
        launch(hosts, "-H", "node0:1,node1:1", python=linked_environment / "bin" / "python")
    )
    here = importlib.metadata.version("torch")
    values = ("torch ", f"{here} on node0", "2.12.1 on node1")
    assert re.fullmatch(error("same version", *values), sentence), sentence


def test_a_host_whose_python_has_only_the_standard_library(
    hosts: Cluster, linked_environment: Path
) -> None:
    """mpiddp cannot be imported there, but the probe still reports on the host."""
    give_own_python(hosts["node1"], f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python = linked_environment / "bin" / "python"
    bare = hosts["node1"].run([str(python), "-c", "import mpiddp"])
    assert "No module named 'mpiddp'" in bare.stderr
    torch, mpi4py = (importlib.metadata.version(name) for name in ("torch", "mpi4py"))
    sentences = refusal(launch(hosts, "-H", "node0:1,node1:1", python=python))
    expected = [
        error("same version", f"{name} ", f"{version} on node0", "missing on node1")
        for name, version in (("torch", torch), ("mpi4py", mpi4py))
    ]
    assert re.fullmatch("\n".join(expected), sentences), sentences
