"""Who may connect: the processes of a job reach each other, and nobody else does.

docs/security.md has the table of what listens.
"""

import re
import subprocess
import sys
from typing import NamedTuple

from tests.support.cluster import needs
from tests.support.cluster.host import USER
from tests.support.place import Done, Hosts, Job, Place, program
from tests.support.ranks import ROOT, run_command

SS = ("ss", "-Hltnp")
PORTS_FILE = "/proc/sys/net/ipv4/ip_local_port_range"  # each network namespace has its own
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
    for mode, verb in (
        (0o755, "ps"),
        (0o755, "top"),
        (0o755, "stop"),
        (0o700, "ps"),
        (0o700, "logs"),
    ):
        (hosts.folder / "state").chmod(mode)
        mpiddp = [sys.executable, "-m", "mpiddp", verb]
        theirs = node0.run(mpiddp, env=state, cwd=ROOT, user=USER)
        assert not re.search("one_fails.py|Traceback", theirs.stdout + theirs.stderr), theirs
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

    The job listens on its network's addresses and the loopback only, except mpirun and its daemons. All its
    ports are in net.ipv4.ip_local_port_range.
    """
    for name in ("node0", "node1"):
        hosts[name].run(["tee", PORTS_FILE], stdin="41000 41999", check=True)
    job = started(hosts, *hosts.where(2))
    for name in ("node0", "node1"):
        ports = of_host(hosts, name)
        assert {listener.port // 1000 for listener in ports} == {41}, ports
        addresses = {listener.address for listener in ports if not is_of_mpi(listener)}
        assert addresses
        assert addresses <= {hosts[name].address, "127.0.0.1"}, ports
        arguments = [hosts[name].address, *(str(listener.port) for listener in ports)]
        hosts["node2"].run([sys.executable, hosts.script(STRANGER), *arguments], check=True)
    job.until("step ", times=job.stdout.count("step ") + 2)
    assert ended(hosts, job).said == []


# From the switch, it notes the connections by which the host's agents said hello, and their last packets.
# At a line on stdin, it writes that line into each of them, as the next bytes of the agent.
FORGER = r"""
import select, socket, struct, sys
link, to_launcher, address = *sys.argv[1:3], socket.inet_aton(sys.argv[3])

def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF

wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.bind((link, 3))
wire.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
agents, last = set(), {}
print("listens", flush=True)
while wire in select.select([wire, sys.stdin], [], [])[0]:
    frame = wire.recv(1 << 16)
    ip, tcp = frame[14:34], frame[34:]
    if frame[12:14] != b"\x08\x00" or frame[23] != 6 or ip[12:16] != address:
        continue
    source, _, sequence, acknowledged = struct.unpack("!HHII", tcp[:12])
    offset = (tcp[12] >> 4) * 4
    body = tcp[offset:][: struct.unpack("!H", ip[2:4])[0] - 20 - offset]
    if body.startswith(b'{"type": "hello"') and b'"role": "rank"' in body:
        agents.add(source)
    next_byte = (sequence + len(body)) & 0xFFFFFFFF
    after = struct.pack("!II", (sequence + len(body)) & 0xFFFFFFFF, acknowledged)
    last[source] = frame[:34], tcp[:4] + after + tcp[12:13], tcp[14:16], tcp[20:offset]
line = sys.stdin.readline().encode()
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
wire.bind((to_launcher, 0))
for source in agents:
    head, tcp, window, options = last[source]
    ip = bytearray(head[14:34])
    ip[2:4], ip[10:12] = struct.pack("!H", 40 + len(options) + len(line)), bytes(2)
    ip[10:12] = struct.pack("!H", checksum(bytes(ip)))
    segment = tcp + b"\x18" + window + bytes(4) + options + line
    pseudo = bytes(ip[12:20]) + struct.pack("!BBH", 0, 6, len(segment))
    check = checksum(pseudo + segment + bytes(len(segment) % 2))
    wire.send(head[:14] + bytes(ip) + segment[:16] + struct.pack("!H", check) + segment[18:])
print("forged", len(agents), flush=True)
"""
FORGED = (
    '{"type": "failed", "code": 1, "error": "I was forged", "traceback": "", "is_verdict": true}\n'
)


def test_somebody_who_reads_the_traffic(hosts):
    """Who can read the traffic between the hosts cannot speak as a rank: the job ends, and says why."""
    node1 = hosts["node1"]
    command = ["nsenter", f"--target={node1.hub_pid}", "--net", sys.executable, "-c", FORGER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [*command, node1.port, hosts["node0"].port, node1.address], **pipes
    ) as forger:
        assert forger.stdout.readline() == "listens\n"
        job = started(hosts, *hosts.where(2))
        out, _ = forger.communicate(FORGED)
    assert out == "forged 1\n"
    done = job.wait().assert_code(1)
    assert "I was forged" not in done.stderr
    assert "the connection of rank 1 on node1 brought a line without its proof" in done.stderr
