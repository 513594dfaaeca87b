"""Connections that are not the job's: what they send has to be without effect."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from benchmarks.faults.job import Job
from mpiddp.protocol import ADDRESS, LINE_LIMIT

# Each text, given as an expression, on a connection of its own; the last one stays open in the middle of
# a line while the job goes on.
_STRANGER = """
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


def at_the_channel(job: Job) -> None:
    """Garbage, a line without an end, messages without a proof, from another host."""
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


def at_the_store(job: Job) -> None:
    """Garbage, and what begins as a client of torch's store does."""
    magic = b"\x00" + (0x3C85F7CE).to_bytes(4, "little")  # VALIDATE, as TCPStore's clients say it
    address, port = (job.folder / "store").read_text().split()
    texts = [repr(magic + bytes([query]) + b"\xff" * 100) for query in range(20)]
    _send(job, address, port, texts)


def _send(job: Job, address: str, port: str, expressions: Sequence[str]) -> None:
    command = [sys.executable, "-c", _STRANGER, address, port, *expressions]
    stranger = job.hosts["node2"].popen(command)
    assert stranger.stdout is not None
    line = stranger.stdout.readline()
    assert line == "sent\n", stranger.communicate()[1]
    job.bystanders.append(stranger)
