"""The health of a host's GPUs: the processes that hold their memory, and their errors in the kernel's log.

Standard library only: the launcher sends this file to other hosts. gpu_faults.py makes sentences of it.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import AF_UNIX, socket

from mpiddp.hosts.gpus import TIMEOUT_S, Gpu, Holder, Xid, read_gpus, tool_output
from mpiddp.hosts.interfaces import machine
from mpiddp.hosts.processes import command_of, fact_of, marked

MORE_S = 3.0  # the query for processes, and each log of the kernel, may take so long
SINCE_S = 3600  # older entries of the logs do not count
_AGENT = b"mpiddp-agent"  # AGENT_NAME, the name of an agent's process
_MARK = b"MPIDDP_JOB="
_USERS = ("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
_LOGS = (
    ("journalctl", ("-k", "-b", "-q", f"--since=-{SINCE_S}s", "-o", "short-monotonic")),
    ("dmesg", ()),
)
_LOADED = re.compile(r"(?m)^\[ *(\d+\.\d+)\].*NVRM: loading NVIDIA UNIX ")
# "[ 5000.1] NVRM: Xid (PCI:0000:44:00): 79, pid=…" has the seconds since the start, an address and a number.
_XID = re.compile(r"(?m)^\[ *(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9A-Fa-f:]{10,13})[^)]*\): (\d+)")


def read_health(path: str | None, *, timeout_s: float = TIMEOUT_S) -> list[Gpu] | None:
    """The GPUs of this host, with their holders and errors; None if a tool does not answer."""
    gpus = read_gpus(path, timeout_s=timeout_s)
    if not gpus or not any(gpu.uuid for gpu in gpus):  # only nvidia-smi tells of holders and errors
        return gpus
    users = tool_output("nvidia-smi", _USERS, path, MORE_S) or ""
    holders: dict[str, list[Holder]] = defaultdict(list)
    for uuid, pid, memory in re.findall(r"(?m)^(\S+), (\d+), (\S+)$", users):
        size = int(memory) << 20 if memory.isdigit() else None  # MiB
        holders[uuid].append(Holder(int(pid), size, *who(pid), _is_left(pid)))
    xids = _xids(path)
    # The address of a Xid has no ".0".
    return [gpu._replace(holders=holders[gpu.uuid], xids=xids[gpu.address[:-2]]) for gpu in gpus]


def who(pid: str) -> tuple[str, str, float]:
    """The user and the command of a process, and when it began; "" and 0.0 where this host does not show it."""
    user, command, began_at = "", "", 0.0
    with suppress(OSError, IndexError):
        user, command = _name_of(Path("/proc", pid).stat().st_uid), command_of(int(pid))
        ticks = int(
            fact_of(pid, "stat").rpartition(b")")[2].split()[19]
        )  # since the start of the machine
        began_at = (
            time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
        )
    return user, command, began_at


def _name_of(user: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(user).pw_name
    return str(user)


def claim(addresses: Mapping[str, Sequence[str]]) -> str:
    """Claim GPUs of this machine for as long as this process lives: all, or none if another launch has one.

    `addresses` has them by `machine`. Returns "", or the user of the other launch. Linux gives the name of an
    abstract socket to one process, and shows it to all users of the machine.
    """
    names = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
    claimed: list[socket] = []
    for address in addresses.get(machine("net", "pid"), ()):
        gpu, mine = f"mpiddp-gpu-{address}", f"mpiddp-gpu-{address}/{os.getuid()}/{os.getpid()}"
        try:
            for name in (
                () if f"@{mine}\n" in names else (gpu, mine)
            ):  # a restart has its claim still
                claimed.append(socket(AF_UNIX))
                claimed[-1].bind(f"\0{name}")
        except OSError:
            for each in claimed:
                each.close()
            owner = re.search(rf"@{re.escape(gpu)}/(\d+)/", names)
            return _name_of(int(owner[1])) if owner else "another user"
    for each in claimed:
        each.detach()
    return ""


def _is_left(pid: str) -> bool:
    """Whether the process belongs to a job of mpiddp that has no agent on this host any more."""
    for variable in fact_of(pid, "environ").split(b"\0"):
        if variable.startswith(_MARK):
            # All processes of the job count: one in a container is no descendant of the agent.
            return not any(
                fact_of(member, "comm").startswith(_AGENT) for member in marked(variable)
            )
    return False


def _xids(path: str | None) -> dict[str, list[Xid]]:
    """By address, the errors of the last hour, if a log of the kernel can be read."""
    xids: dict[str, list[Xid]] = defaultdict(list)
    for program, arguments in _LOGS:
        log = tool_output(program, arguments, path, MORE_S) or ""
        loaded = max(map(float, _LOADED.findall(log)), default=0.0)
        for at, address, number in _XID.findall(log):
            xid = Xid(int(number), time.monotonic() - float(at), float(at) < loaded)
            if xid.ago_s < SINCE_S:
                xids[address.lower()[-10:]].append(xid)
    return xids
