"""Who may connect: the processes of a job reach each other, and nobody else does.

docs/security.md has the table of what listens.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

from tests.support.cluster import needs
from tests.support.cluster.host import USER
from tests.support.place import Hosts, Job, Place, program
from tests.support.ranks import ROOT, run_command

# Its ranks have connected, and listen until the file appears.
GROUP = """
import os, time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("ready", flush=True)
while not os.path.exists("finish"):
    time.sleep(0.01)
"""
OF_MPI = ("mpirun", "prterun", "prted")  # what they listen on is the MPI's choice


class Listener(NamedTuple):
    """What a process listens on."""

    address: str
    port: int
    process: str  # as ss names it: ("python3",pid=7,fd=3)


def listeners(ss: Callable[..., str]) -> list[Listener]:
    """All of a host, whose `ss` this is."""
    rows = [row.split() for row in ss("-Hltnp").splitlines()]
    found = [(*row[3].rpartition(":")[::2], row[-1]) for row in rows]
    return [Listener(address, int(port), process) for address, port, process in found]


def of_host(hosts: Hosts, name: str) -> list[Listener]:
    """Those of a test host, without its sshd's."""
    found = listeners(lambda options: hosts[name].run(["ss", options], check=True).stdout)
    return [each for each in found if '"sshd"' not in each.process]


def is_of_mpi(listener: Listener) -> bool:
    return any(f'"{name}"' in listener.process for name in OF_MPI)


def ended(place: Place, job: Job) -> None:
    (place.folder / "finish").touch()
    job.wait().assert_ok()


def test_a_job_of_several_hosts(hosts):
    """A job listens on its network's addresses and the loopback only, except mpirun and its daemons."""
    job = hosts.start("launch", *hosts.where(2), hosts.script(GROUP)).until("ready", times=2)
    for name in ("node0", "node1"):
        found = [each for each in of_host(hosts, name) if not is_of_mpi(each)]
        assert found
        assert {each.address for each in found} <= {hosts[name].address, "127.0.0.1"}, found
    ended(hosts, job)


def test_a_job_of_one_host(here):
    """On one host, no process of a job can be reached over the network, except mpirun."""
    needs.need("ss")
    job = here.start("launch", *here.where(2), here.script(GROUP)).until("ready", times=2)
    pids = [f"pid={process.pid}," for process in here.processes()]
    found = listeners(lambda options: run_command(["ss", options]).stdout)
    own = [each for each in found if any(pid in each.process for pid in pids)]
    assert own  # gloo's at least
    assert {each.address for each in own if not is_of_mpi(each)} == {"127.0.0.1"}, own
    ended(here, job)


KNOCKS = """
import socket, sys
for path in sys.argv[1:]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("in", path)
    except PermissionError:
        print("refused")
"""


def test_another_user(hosts):
    """Another user of a host does not see a job, cannot stop it, and opens none of its sockets."""
    state = {"XDG_STATE_HOME": str(hosts.folder / "state")}
    job = hosts.start("launch", "-H", "node0:2", hosts.script(GROUP), env=state)
    job.until("ready", times=2)
    node0 = hosts["node0"]
    own = node0.run([sys.executable, "-m", "mpiddp", "ps"], env=state, cwd=ROOT).stdout
    assert "script.py" in own
    for verb in ("ps", "top", "stop"):
        mpiddp = [sys.executable, "-m", "mpiddp", verb]
        theirs = node0.run(mpiddp, env=state, cwd=ROOT, user=USER)
        assert "script.py" not in theirs.stdout + theirs.stderr, theirs
    unix = node0.run(["ss", "-Hlx"], check=True).stdout
    paths = [row.split()[4] for row in unix.splitlines() if "/mpiddp" in row]
    assert len(paths) >= 2  # the job channel, and the viewers'
    knocks = node0.run(["python3", "-c", KNOCKS, *paths], user=USER)
    assert knocks.stdout.splitlines() == ["refused"] * len(paths), (paths, knocks)
    ended(hosts, job)


def test_strangers(hosts):
    """A stranger who connects to the ports of a job cannot stop it or end it."""
    script = (program("one_fails.py"), "never", str(hosts.folder))
    job = hosts.start("launch", *hosts.where(2), *script).until("ready", times=2)
    ports = {name: [each.port for each in of_host(hosts, name)] for name in ("node0", "node1")}
    assert ports["node0"]  # of the launcher at least
    for host, found in ports.items():
        stranger = [sys.executable, program("stranger.py"), hosts[host].address, "3"]
        hosts["node2"].run([*stranger, *map(str, found)], check=True)
    job.until("step ", times=job.stdout.count("step ") + 2)
    (hosts.folder / "finish").touch()
    assert job.wait().assert_ok().said == []
