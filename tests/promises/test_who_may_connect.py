"""Who may connect: the processes of a job reach each other, and nobody else does.

docs/security.md has the table of what listens.
"""

import sys
from typing import NamedTuple

from tests.support.cluster import needs
from tests.support.cluster.host import USER
from tests.support.place import Done, Hosts, Job, Place, program
from tests.support.ranks import ROOT, run_command

SS = ("ss", "-Hltnp")
OF_MPI = ("mpirun", "prterun", "prted")  # what they listen on is the MPI's choice


class Listener(NamedTuple):
    """What a process listens on."""

    address: str
    port: int
    process: str  # as ss names it: ("python3",pid=7,fd=3)


def listeners(ss: str) -> list[Listener]:
    """All of a host, as SS has printed them."""
    rows = [row.split() for row in ss.splitlines()]
    facts = [(*row[3].rpartition(":")[::2], row[-1]) for row in rows]
    return [Listener(address, int(port), process) for address, port, process in facts]


def of_host(hosts: Hosts, name: str) -> list[Listener]:
    """Those of a test host, without its sshd's."""
    rows = listeners(hosts[name].run(SS, check=True).stdout)
    return [row for row in rows if '"sshd"' not in row.process]


def is_of_mpi(listener: Listener) -> bool:
    return any(f'"{name}"' in listener.process for name in OF_MPI)


def started(place: Place, *where: str, **env: str) -> Job:
    """A job whose two ranks reduce numbers until `ended`."""
    script = (program("one_fails.py"), "never", str(place.folder))
    return place.start("launch", *where, *script, env=env).until("ready", times=2)


def ended(place: Place, job: Job) -> Done:
    (place.folder / "finish").touch()
    return job.wait().assert_ok()


def test_a_job_of_one_host(here):
    """On one host, no process of a job can be reached over the network, except mpirun."""
    needs.need("ss")
    job = started(here, *here.where(2))
    pids = [f"pid={process.pid}," for process in here.processes()]
    rows = listeners(run_command(SS).stdout)
    of_job = [row for row in rows if any(pid in row.process for pid in pids)]
    assert of_job  # gloo's at least
    assert {row.address for row in of_job if not is_of_mpi(row)} == {"127.0.0.1"}, of_job
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
    job = started(hosts, "-H", "node0:2", **state)
    node0 = hosts["node0"]
    ours = node0.run([sys.executable, "-m", "mpiddp", "ps"], env=state, cwd=ROOT).stdout
    assert "one_fails.py" in ours
    for verb in ("ps", "top", "stop"):
        mpiddp = [sys.executable, "-m", "mpiddp", verb]
        theirs = node0.run(mpiddp, env=state, cwd=ROOT, user=USER)
        assert "one_fails.py" not in theirs.stdout + theirs.stderr, theirs
    unix = node0.run(["ss", "-Hlx"], check=True).stdout
    paths = [row.split()[4] for row in unix.splitlines() if "/mpiddp" in row]
    assert len(paths) >= 2  # the job channel, and the viewers'
    knocks = node0.run(["python3", "-c", KNOCKS, *paths], user=USER)
    assert knocks.stdout.splitlines() == ["refused"] * len(paths), (paths, knocks)
    ended(hosts, job)


# As port scanners do and as an attacker may, it sends requests of other protocols, messages without a right
# proof, and a line without an end to each port for 3 s. Some connections stay open, and it reads from none.
STRANGER = r"""
import json, os, socket, sys, time
from contextlib import suppress
MESSAGES = [
    {"type": "hello", "rank": 1, "role": "rank", "challenge": "", "proof": "0" * 64},
    {"type": "fail", "code": 3},
    {"type": "stop"},
    {"type": "done"},
]
WORDS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"".join(json.dumps(message).encode() + b"\n" for message in MESSAGES),
    os.urandom(4096),
    b"x" * 2_000_000,
    b"\n",
]
address, *ports = sys.argv[1:]
until, held = time.monotonic() + 3, []
while time.monotonic() < until:
    for port in ports:
        for words in (*WORDS, b""):
            with suppress(OSError):
                stranger = socket.create_connection((address, int(port)), timeout=0.2)
                held = [*held[-50:], stranger]
                stranger.sendall(words)
"""


def test_strangers(hosts):
    """Stray connections to a job's ports, as of a port scanner, do not stop or end it.

    The job listens on its network's addresses and the loopback only, except mpirun and its daemons.
    """
    job = started(hosts, *hosts.where(2))
    for name in ("node0", "node1"):
        ports = of_host(hosts, name)
        addresses = {listener.address for listener in ports if not is_of_mpi(listener)}
        assert addresses
        assert addresses <= {hosts[name].address, "127.0.0.1"}, ports
        arguments = [hosts[name].address, *(str(listener.port) for listener in ports)]
        hosts["node2"].run([sys.executable, hosts.script(STRANGER), *arguments], check=True)
    job.until("step ", times=job.stdout.count("step ") + 2)
    assert ended(hosts, job).said == []
