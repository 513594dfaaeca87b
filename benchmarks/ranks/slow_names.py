"""A name server that answers after a pause, and the launcher's resolution of the hosts' names with it.

unshare --net --mount python -m benchmarks.ranks.slow_names 512      # prints the costs as JSON
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks.ranks.light_clients import report
from mpiddp.hosts.names import addresses_of, resolve_all

PAUSE_S = 0.2
_SERVER = "127.0.0.53"
_TYPE_A = 1
_ONE_ANSWER, _NO_ANSWER = 1, 0


def main(hosts: int) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.NamedTemporaryFile("w") as resolver:
        resolver.write(f"nameserver {_SERVER}\n")
        resolver.flush()
        subprocess.run(["mount", "--bind", resolver.name, "/etc/resolv.conf"], check=True)
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        server.bind((_SERVER, 53))
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        names = [f"node{number}.cluster.test" for number in range(hosts)]
        since = time.monotonic()
        resolve_all(names)
        assert all(map(addresses_of, names))
        report(since)


def _serve(server: socket.socket) -> None:
    while True:
        query, client = server.recvfrom(512)
        threading.Timer(PAUSE_S, server.sendto, (_answer(query), client)).start()


def _answer(query: bytes) -> bytes:
    """The answer to a query with one question: one address for type A, none for AAAA (RFC 1035, 4.1)."""
    end_of_name = query.index(b"\0", 12) + 1
    question = query[12 : end_of_name + 4]
    is_a = int.from_bytes(query[end_of_name : end_of_name + 2], "big") == _TYPE_A
    count = _ONE_ANSWER if is_a else _NO_ANSWER
    head = query[:2] + b"\x81\x80" + b"\0\1" + bytes([0, count]) + b"\0\0\0\0"
    record = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + bytes([10, 1, 2, 3])
    return head + question + (record if is_a else b"")


if __name__ == "__main__":
    main(int(sys.argv[1]))
