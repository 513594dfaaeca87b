"""Connections from clients outside the job. Their data must have no effect."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from benchmarks.faults.job import Job
from mpiddp.protocol.messages import LINE_LIMIT
from mpiddp.protocol.variables import ADDRESS

# Sends each text (given as an expression) on a new connection. A last connection sends half a line and
# stays open while the job runs.
_CLIENT = """
import os, socket, sys, time
address = sys.argv[1], int(sys.argv[2])
texts = [os.urandom(4096), b"\\0" * 65536, b"GET / HTTP/1.1\\r\\n\\r\\n", *map(eval, sys.argv[3:])]
for text in texts:
    with socket.create_connection(address, timeout=2) as connection:
        connection.settimeout(0.1)
        try:
            connection.sendall(text)
            while connection.recv(65536):
                pass
        except (TimeoutError, ConnectionError):
            pass
half = socket.create_connection(address)
half.sendall(b'{"type": "hel')
print("sent", flush=True)
time.sleep(60)
"""


def connect_to_control_channel(job: Job) -> None:
    """Send garbage, overlong lines and messages without a valid proof from another host."""
    pid = job.pid_of("node0", ".*mpiddp run")
    environment = job.hosts["node0"].path(f"/proc/{pid}/environ").read_text()
    found = re.search(rf"{ADDRESS}=([^\0:]+):(\d+)", environment)
    assert found is not None
    lines = (
        f"b'x' * {3 * LINE_LIMIT}",
        "b'[' * 50_000 + b'\\n'",
        repr(b'{"type": "done"}\n'),
        repr(b'{"type": "hello", "rank": 1, "proof": "?"}\n'),
    )
    _send(job, found[1], found[2], lines)


def connect_to_store(job: Job) -> None:
    """Send garbage, and garbage after the first bytes of a valid client of torch's store."""
    magic = b"\x00" + (0x3C85F7CE).to_bytes(
        4, "little"
    )  # VALIDATE, the first query of a TCPStore client
    address, port = (job.folder / "store").read_text().split()
    texts = [repr(magic + bytes([query]) + b"\xff" * 100) for query in range(20)]
    _send(job, address, port, texts)


def _send(job: Job, address: str, port: str, expressions: Sequence[str]) -> None:
    command = [sys.executable, "-c", _CLIENT, address, port, *expressions]
    client = job.hosts["node2"].popen(command)
    assert client.stdout is not None
    line = client.stdout.readline()
    assert line == "sent\n", client.communicate()[1]
    job.foreign_clients.append(client)
