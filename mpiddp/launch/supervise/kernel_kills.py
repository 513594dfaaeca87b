"""Whether the kernel killed the rank that failed first for lack of memory, on whichever host.

Each rank tells its control group and the group's count of kills when it starts. After its end the launcher
reads the count again: here, or over the transport.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpiddp.hosts import processes
from mpiddp.hosts.hostfile import Hosts
from mpiddp.hosts.names import is_this_host
from mpiddp.hosts.processes import OomKills, kills_in
from mpiddp.hosts.remote import program_with
from mpiddp.hosts.ssh import run_on_hosts
from mpiddp.launch.supervise.verdict import History, killed_first
from mpiddp.text import size_text

_TIMEOUT_S = 5.0
_PRINT = """
import json, pathlib
from dataclasses import asdict
kills = sys.modules[{module!r}].kills_in(pathlib.Path({folder!a}))
print(json.dumps(kills and asdict(kills)))
"""


def kernel_kill(history: History, hosts: Hosts, python: str, *, asks: bool) -> str:
    """A sentence if the kernel has killed in the group of the rank that failed first; "" if not, or unknown.

    Args:
        python: an interpreter that every host has.
        asks: other hosts may be asked.
    """
    rank = killed_first(history)
    if rank is None:
        return ""
    told: dict[str, Any] = history.ranks.started.get(rank, {})
    folder, before = told.get("memory_group"), told.get("oom_kills")
    if not isinstance(folder, str) or not isinstance(before, int):
        return ""
    name = history.ranks.hosts[rank]
    if is_this_host(name):
        return sentence(before, kills_in(Path(folder)), "here")
    if not asks or not hosts.transport.is_installed:
        return ""
    return sentence(before, _kills_there(name, folder, hosts, python), f"on {name}")


def sentence(before: int, after: OomKills | None, where: str) -> str:
    """What the kernel's count says about the job; "" if it has killed nothing meanwhile."""
    if after is None or after.count <= before:
        return ""
    count, limit = after.count - before, after.limit_bytes
    killed = "a process" if count == 1 else f"{count} processes"
    full = f"its control group's limit of {size_text(limit)}" if limit else "this host's memory"
    return (
        f"the kernel has killed {killed} {where} since the start, because {full} was reached (oom_kill). "
        "Fix: a smaller batch, fewer DataLoader workers, or more memory. "
        "More: docs/troubleshooting.md#system-out-of-memory"
    )


def _kills_there(name: str, folder: str, hosts: Hosts, python: str) -> OomKills | None:
    program = program_with((processes,), _PRINT.format(module=processes.__name__, folder=folder))
    there = [host for host in hosts.hosts if host.name == name][:1]
    answers = run_on_hosts(there, python, program, timeout_s=_TIMEOUT_S, transport=hosts.transport)
    for answer in answers.values():
        for line in reversed(answer.stdout.splitlines()):
            try:
                return OomKills(**json.loads(line))
            except (ValueError, TypeError):  # "null", or what a shell's start-up file prints
                continue
    return None
