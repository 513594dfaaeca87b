"""What a host tells of its GPUs beside their own facts: who holds their memory, and the errors of its kernel.

Standard library only: the launcher sends this file to other hosts. gpu_faults.py makes sentences of it.
"""

from __future__ import annotations

import pwd
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.hosts.gpus import TIMEOUT_S, Gpu, read_gpus, tool_output

MORE_S = 3.0  # for who uses the GPUs, and for each log of the kernel
SINCE_S = 3600  # of these logs
_LONGEST_COMMAND = 40  # characters
_AGENT = b"mpiddp-output"  # the name of an agent's process, see OUTPUT_PROCESS
_MARK = b"MPIDDP_JOB="
_USERS = ("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
_LOGS = (
    ("journalctl", ("-k", "-b", "-q", f"--since=-{SINCE_S}s", "-o", "short-monotonic")),
    ("dmesg", ()),
)
# "[ 5000.1] NVRM: Xid (PCI:0000:44:00): 79, pid=…": seconds since the start, address, number
_XID = re.compile(r"(?m)^\[ *(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9A-Fa-f:]{10,13})[^)]*\): (\d+)")


class Holder(NamedTuple):
    """A process that holds memory of a GPU."""

    gpu: str  # its UUID
    pid: int
    memory: int | None  # bytes
    user: str  # "" where this host does not show the process, as that of another container
    command: str
    job: str  # of mpiddp, "" for none: the value of MPIDDP_JOB
    is_left: bool  # that job has no agent on this host any more


class Xid(NamedTuple):
    """An error of a GPU in the kernel's log."""

    address: str  # of PCI, without the function: "0000:44:00"
    number: int
    ago_s: float


class Health(NamedTuple):
    """The GPUs of a host, and what else it tells of them."""

    gpus: Sequence[Gpu] = ()
    holders: Sequence[Holder] = ()
    xids: Sequence[Xid] = ()

    @classmethod
    def of_json(cls, rows: Sequence[Sequence[Sequence[Any]]]) -> Health:
        """What a host has sent as JSON."""
        gpus, holders, xids = rows
        return cls(
            [Gpu(*each) for each in gpus],
            [Holder(*each) for each in holders],
            [Xid(*each) for each in xids],
        )


def read_health(path: str | None, *, timeout_s: float = TIMEOUT_S) -> Health | None:
    """What this host tells of its GPUs; None if a tool does not answer."""
    gpus = read_gpus(path, timeout_s=timeout_s)
    if gpus is None or not any(gpu.uuid for gpu in gpus):  # nvidia-smi alone tells more
        return None if gpus is None else Health(gpus)
    users = tool_output("nvidia-smi", _USERS, path, MORE_S) or ""
    rows = re.findall(r"(?m)^(\S+), (\d+), (\S+)$", users)
    return Health(gpus, [_holder(*each) for each in rows], _xids(path))


def _holder(gpu: str, pid: str, memory: str) -> Holder:
    """A line of nvidia-smi, with what /proc tells of the process."""
    size = int(memory) << 20 if memory.isdigit() else None  # MiB
    job = _job_of(Path("/proc", pid))
    return Holder(gpu, int(pid), size, *who(pid), job, bool(job) and not _has_agent(job))


def who(pid: str) -> tuple[str, str]:
    """The user and the command of a process; "" where this host does not show it."""
    folder = Path("/proc", pid)
    try:
        number, line = folder.stat().st_uid, (folder / "cmdline").read_bytes()
    except OSError:
        return "", ""
    program, *words = line.rstrip(b"\0").decode(errors="replace").split("\0")
    command = " ".join([program.rpartition("/")[2], *words])[:_LONGEST_COMMAND]
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name, command
    return str(number), command


def _job_of(process: Path) -> str:
    """The job of mpiddp to which a process of /proc belongs, "" for none, and for another user's."""
    with suppress(OSError):
        for variable in (process / "environ").read_bytes().split(b"\0"):
            if variable.startswith(_MARK):
                return variable[len(_MARK) :].decode(errors="replace")
    return ""


def _has_agent(job: str) -> bool:
    """Whether an agent of the job runs on this host. A container of the job is no descendant of it."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            is_agent = (process / "comm").read_bytes().startswith(_AGENT)
            if is_agent and _job_of(process) == job:
                return True
    return False


def _xids(path: str | None) -> list[Xid]:
    """The errors of the last hour, each once with its latest time, where a log of the kernel can be read."""
    latest: dict[tuple[str, int], float] = {}
    for program, arguments in _LOGS:
        for at, address, number in _XID.findall(
            tool_output(program, arguments, path, MORE_S) or ""
        ):
            key, ago_s = (address.lower()[-10:], int(number)), time.monotonic() - float(at)
            if ago_s < SINCE_S:
                latest[key] = min(ago_s, latest.get(key, ago_s))
    return [Xid(*key, ago_s) for key, ago_s in latest.items()]
