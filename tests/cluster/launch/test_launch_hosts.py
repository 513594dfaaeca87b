"""`mpiddp launch` over real hosts by ssh: variables reach the ranks, and no process is left at the end.

Tests mpiddp/launch/.
python -m pytest tests/cluster/launch/test_launch_hosts.py
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.errors import error
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import CTRL_C_AGAIN_S, LAUNCH, ROOT

MPIS = ("openmpi5", *PACKAGES)
# Print a short line: mpirun splits long ones, and mixes the pieces of several ranks.
PRINT_AND_SLEEP = """
import json, os, socket, time
names = {"NCCL_DEBUG", "HF_TOKEN", "EDITOR", "MY_KEY", "MODE"} & os.environ.keys()
received = {name: os.environ[name] for name in names}
print(json.dumps([int(os.environ["RANK"]), socket.gethostname(), received]), flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(3) as standing:
        yield standing


def job_processes(hosts: Cluster) -> list[str]:
    return [process.command for host in hosts.hosts for process in host.processes()]


@pytest.mark.parametrize("mpi", MPIS)
def test_only_allowed_variables_reach_the_ranks_and_ctrl_c_leaves_no_process(
    hosts: Cluster, mpi: str
) -> None:
    """The hostfile has a user and a port, which ssh needs."""
    script = hosts.shared / "variables.py"
    script.write_text(PRINT_AND_SLEEP)
    hostfile = hosts.shared / "hosts"
    hostfile.write_text("node1 slots=2 port=22\nnode0\nroot@node2 slots=1\n")
    env = {"NCCL_DEBUG": "WARN", "HF_TOKEN": "private-value", "EDITOR": "vi", "MY_KEY": "requested"}
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), "--hostfile", str(hostfile)]
    command += ["-x", "MY_KEY", "-x", "MODE=a b", str(script)]
    with hosts["node0"].popen(command, cwd=ROOT, env=env) as launcher:
        assert launcher.stdout is not None
        printed = sorted(json.loads(launcher.stdout.readline()) for _ in range(4))
        arguments = [argument for line in job_processes(hosts) for argument in line.split()]
        launcher.send_signal(signal.SIGINT)
        stderr = launcher.communicate(timeout=PATIENCE_S)[1]

    assert [host for _, host, _ in printed] == ["node1", "node1", "node0", "node2"]
    for _, host, received in printed:
        assert (received["NCCL_DEBUG"], received["MY_KEY"]) == ("WARN", "requested")
        assert received["MODE"] == "a b"
        if host != "node0":  # on node0, mpirun's children inherit the environment of the shell
            assert not {"HF_TOKEN", "EDITOR"} & received.keys()
    assert not [each for each in arguments if "private-value" in each or "requested" in each]

    assert launcher.returncode == 130, stderr
    # mpirun's own last line may lack a newline.
    assert stderr.endswith("mpiddp: interrupted: the job was stopped.\n"), stderr
    assert processes_left(hosts) == []


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4"])
def test_a_second_ctrl_c_ends_the_launcher_at_once_and_then_the_ranks(
    hosts: Cluster, mpi: str
) -> None:
    script = hosts.shared / "ignores_sigterm.py"
    script.write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'received\\n'))\n"
        "print('ready', flush=True); time.sleep(1000)\n"
    )
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), "--grace", "300"]
    command += ["-H", "node1:1,node0:1", str(script)]
    with hosts["node0"].popen(command, cwd=ROOT) as launcher:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        launcher.send_signal(signal.SIGINT)
        assert [launcher.stdout.readline() for _ in range(2)] == ["received\n"] * 2
        time.sleep(CTRL_C_AGAIN_S)
        start = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        launcher.wait(timeout=PATIENCE_S)
        assert time.monotonic() - start < 100  # the grace period is 300 s
        launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 130
    assert processes_left(hosts) == []


def processes_left(hosts: Cluster) -> list[str]:
    """The job's processes that still run at last; daemons notice the end late."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := job_processes(hosts)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), error("slots of", "-n 4 ", "3 slots", "-H (node1=2, node0=1)")),
        (("--no-check",), error("and without", "-H: node1 ", "Write: node1 slots=N")),
    ],
)
def test_the_preflight_counts_a_bare_hosts_gpus(
    hosts: Cluster, options: tuple[str, ...], sentence: str
) -> None:
    """node1 has two, node0 has none and gets one slot. Output of node1's .bashrc is ignored."""
    tools = hosts.shared / "tools"
    tools.mkdir(exist_ok=True)
    stub = tools / "nvidia-smi"  # no machine of the tests has a GPU
    stub.write_text('#!/bin/sh\necho "GPU 0: A (UUID: x)"\necho "GPU 1: B (UUID: y)"\n')
    stub.chmod(0o755)
    startup = hosts["node1"].path(f"{hosts['node1'].home()}/.bashrc")  # bash reads it under sshd
    startup.write_text(f"PATH={tools}:$PATH\necho 9 welcome\n")
    command = [*LAUNCH, *options, "-H", "node1,node0", "-n", "4", "-m", "platform"]
    try:
        done = hosts["node0"].run(command, cwd=ROOT)
    finally:
        startup.unlink()
    assert done.returncode == 2
    assert re.fullmatch(sentence, done.stderr.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4", "mpich"])
def test_the_hosts_of_a_list_in_a_file_keep_their_order(hosts: Cluster, mpi: str) -> None:
    """The file replaces a list that is too long for an argument."""
    (hosts.shared / "where.py").write_text(
        "import os, socket; print(f\"{os.environ['RANK']} {socket.gethostname()}\\n\", end='')"
    )
    code = (
        "import sys; from mpiddp import cli; from mpiddp.launch.starters import command\n"
        "command.LONGEST_ARGUMENT = 0; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "launch", "--mpirun", mpirun_of(mpi)]
    command += ["-H", "node1:2,node0:1", str(hosts.shared / "where.py")]
    done = hosts["node0"].run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 node1", "1 node1", "2 node0"]
