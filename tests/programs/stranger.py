"""A stranger who speaks to ports for SECONDS, as port scanners do and as an attacker may.

    python tests/programs/stranger.py ADDRESS SECONDS PORT…

To each port it sends requests of other protocols, messages without a right proof, and a line without an
end. Some connections stay open, and nothing is read from them.
"""

import json
import os
import socket
import sys
import time
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


def main(address: str, seconds: float, ports: list[int]) -> None:
    until = time.monotonic() + seconds
    held: list[socket.socket] = []
    while time.monotonic() < until:
        for port in ports:
            for words in (*WORDS, b""):
                with suppress(OSError):
                    stranger = socket.create_connection((address, port), timeout=0.2)
                    held = [*held[-50:], stranger]
                    stranger.sendall(words)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), [int(port) for port in sys.argv[3:]])
