"""The TCP addresses on which a process listens, from /proc."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path


def listening_addresses(pid: int) -> list[tuple[str, int]]:
    """Address and port of every TCP socket that this process listens on."""
    links = [_target(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:  # TCP_LISTEN
                digits, port = local.split(":")
                words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
                found.append((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return sorted(found)


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except FileNotFoundError:  # it was open for reading the folder itself
        return ""
