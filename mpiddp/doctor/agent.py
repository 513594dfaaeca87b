"""What a host says of itself for `mpiddp doctor`, which sends this source there.

It needs Python 3.8 and the standard library. It reads a JSON question a line, and answers each with one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from mpiddp.doctor import network
from mpiddp.hosts.interfaces import interfaces, own_addresses

STACK_S = 60.0  # for a cold import of torch
TOOL_S = 25.0  # nvidia-smi takes about 10 s to wake eight GPUs
LIMITS = {"open files": "NOFILE", "locked memory": "MEMLOCK", "processes": "NPROC"}
GPU_FIELDS = (
    *("index", "name", "memory.total", "memory.used", "driver_version"),
    *("clocks.max.sm", "ecc.errors.uncorrected.volatile.total"),
)
_SIOCGIFMTU = 0x8921  # linux/sockios.h
_MARK = ".mpiddp-doctor-"
_MOST_ENTRIES = 10_000  # of a data folder
_ROUND_S = 0.002  # short: the best of many is undisturbed by what else runs
_MOST_CORES = 4  # on which the processor is measured
_WRITTEN = 8 << 20  # bytes


def main() -> None:
    """Answer questions until the connection ends."""
    listener = network.Listener()
    marks: list[str] = []
    answers: dict[str, Any] = {
        "facts": lambda wanted: facts(wanted, marks),
        "stack": stack,
        "marks": lambda wanted: sum(wanted["token"] in each for each in os.listdir(wanted["path"])),
        "listen": lambda wanted: listener.listen(**wanted),
        "reach": network.reach,
        "rate": network.rate,
        "speed": speed,
    }
    try:
        for line in sys.stdin.buffer:
            question, argument = json.loads(line)
            try:
                answer = {"answer": answers[question](argument), "clock": time.time()}
            except Exception as error:
                answer = {"failed": f"{question}: {type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        for mark in marks:
            with contextlib.suppress(OSError):  # its file system may be away by now
                os.unlink(mark)


def facts(wanted: dict[str, Any], marks: list[str]) -> dict[str, Any]:
    """All that the host knows without another. `wanted` has names, folders, files, a token and a PATH."""
    folders = {label: _folder(path, label) for label, path in wanted["folders"].items()}
    for each in folders.values():
        if each["keeps"]:
            marks += _leave_mark(each, wanted["token"])
    names = {*wanted["names"], socket.gethostname()}
    with ThreadPoolExecutor(64) as threads:
        resolved = dict(zip(names, threads.map(_resolve, names)))
    return {
        "hostname": socket.gethostname(),
        "addresses": list(own_addresses()),
        "interfaces": [{**asdict(each), "mtu": _mtu(each.name)} for each in interfaces()],
        "names": resolved,
        "ports": _port_range(),
        "load": os.getloadavg()[0],
        **process_facts(),
        "folders": folders,
        "files": {path: _file(path) for path in wanted["files"]},
        "gpus": _gpus(wanted["path"]),
    }


def process_facts() -> dict[str, Any]:
    """The limits of this process, its cores, and the shared memory that it sees."""
    limits = {}
    for name, kind in LIMITS.items():
        value = resource.getrlimit(getattr(resource, f"RLIMIT_{kind}"))[1]
        limits[name] = -1 if value == resource.RLIM_INFINITY else value
    try:
        shared = os.statvfs("/dev/shm")
        memory = {
            "total": shared.f_blocks * shared.f_frsize,
            "free": shared.f_bavail * shared.f_frsize,
        }
    except OSError:
        memory = {"total": 0, "free": 0}
    return {
        "limits": limits,
        "cores": os.cpu_count(),
        "cores for a process": len(os.sched_getaffinity(0)),
        "shm": memory,
        "infiniband": os.path.isdir("/sys/class/infiniband"),
    }


def stack(wanted: dict[str, Any]) -> dict[str, str]:
    """What the interpreter of the ranks loads, by the program that tells it, see `mpiddp.doctor.stack`."""
    done = subprocess.run(
        [wanted["python"], "-c", wanted["program"]],
        cwd="/",
        env={**os.environ, **wanted["env"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=STACK_S,
    )
    for line in reversed(done.stdout.decode(errors="replace").splitlines()):
        if line.startswith("{"):
            return dict(json.loads(line))
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    raise OSError(f"{wanted['python']} ended with code {done.returncode}: {''.join(last)}")


def _folder(path: str, label: str) -> dict[str, Any]:
    """What can be said of a folder. That of a run need not exist yet: then it is that above it."""
    keeps = label == "run"
    while keeps and not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    found = {"path": path, "keeps": keeps, "error": "", "free": 0, "entries": ""}
    try:
        names = sorted(os.listdir(path))[:_MOST_ENTRIES]
        space = os.statvfs(path)
        found["free"] = space.f_bavail * space.f_frsize
        if label == "data":
            rows = [(name, _size(os.path.join(path, name))) for name in names]
            found["entries"] = hashlib.sha256(repr(rows).encode()).hexdigest()[:12]
    except OSError as error:
        found["error"] = str(error.strerror)
    return found


def _size(path: str) -> int | None:
    """The bytes of a regular file. That of a folder is the file system's, and a link may lead anywhere."""
    status = os.lstat(path)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _leave_mark(folder: dict[str, Any], token: str) -> list[str]:
    """Write a file for the others to see, which also proves that the folder can be written."""
    path = os.path.join(folder["path"], f"{_MARK}{token}-{socket.gethostname()}")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        folder["error"] = folder["error"] or str(error.strerror)
        return []
    return [path]


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({str(each[4][0]) for each in found})


def _port_range() -> list[int]:
    """The first and the last port that the kernel gives to whoever asks for any."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            first, last = map(int, file.read().split())
    except (OSError, ValueError):
        return []
    return [first, last]


def _mtu(interface: str) -> int:
    """0 for one that has just gone, as a container's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFMTU, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return 0
    return int(struct.unpack_from("i", answer, 16)[0])


def _file(path: str) -> dict[str, str]:
    """The hash of a file, or why it cannot be read."""
    try:
        with open(path, "rb") as file:
            return {"hash": hashlib.sha256(file.read()).hexdigest()[:12], "error": ""}
    except FileNotFoundError:
        return {"hash": "", "error": "is missing"}
    except OSError as error:
        return {"hash": "", "error": f"cannot be read ({error.strerror})"}


def _gpus(path: str) -> dict[str, Any] | None:
    """What nvidia-smi says; {} without it, None if it does not answer."""
    tool = shutil.which("nvidia-smi", path=path)
    if tool is None:
        return {}
    try:
        listing = _output(
            [tool, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
        )
        users = _output(
            [tool, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        )
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    return {
        "each": [dict(zip(GPU_FIELDS, row)) for row in rows if len(row) == len(GPU_FIELDS)],
        "users": [line.strip() for line in users.splitlines() if line.strip()],
        "xids": _xids(),
    }


def _xids() -> list[str] | None:
    """The driver's errors in the kernel's log; None if this user may not read it."""
    try:
        log = _output(["dmesg"])
    except (OSError, subprocess.SubprocessError):
        return None
    return re.findall(r"NVRM: (Xid.*)", log)[-3:]


def _output(command: list[str], timeout_s: float = TOOL_S) -> str:
    """What a command prints. Raises OSError, subprocess.SubprocessError if it fails, or takes too long."""
    tool = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert tool.stdout is not None
    with tool.stdout:
        try:
            printed, _ = tool.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            tool.kill()  # without waiting for its end: a driver that hangs holds even a killed process
            raise
    if tool.returncode:
        raise subprocess.CalledProcessError(tool.returncode, command)
    return printed.decode(errors="replace")


def speed(folder: str | None) -> dict[str, float]:
    """The host's speed, in products or bytes a second: the best of a few short rounds.

    Of the processor it is its own time: that is the speed of the machine, whoever else uses it. Its best core
    counts, because a core is slow while its other hyperthread works, maybe for another virtual machine.
    """
    size = 40
    rows = [[float(i * j % 7) for j in range(size)] for i in range(size)]
    columns = list(zip(*rows))
    # Larger than most caches: which of its lines a smaller block gets differs from one process to the next.
    # Untouched pages of zeros would be one page.
    memory = bytearray(b"\1") * (64 << 20)
    target = memoryview(bytearray(len(memory)))

    def product() -> None:
        [[sum(map(float.__mul__, row, column)) for column in columns] for row in rows]

    def copy() -> None:
        target[:] = memory

    products, copies = [], []
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)
    try:
        for core in cores[:: -(-len(cores) // _MOST_CORES)]:
            os.sched_setaffinity(0, {core})
            products.append(_best(product, 30, time.thread_time))
            copies.append(len(memory) * _best(copy, 8, time.thread_time))
    finally:
        os.sched_setaffinity(0, allowed)
    found = {"matrix product": max(products), "memory copy": max(copies)}
    if folder is not None:
        # In a shared folder another host may have a process of the same number.
        path = os.path.join(folder, f"{_MARK}disk-{socket.gethostname()}-{os.getpid()}")

        def write() -> None:
            with open(path, "wb") as file:
                file.write(memory[:_WRITTEN])
                os.fsync(file.fileno())

        try:
            found["disk"] = _WRITTEN * _best(write, 5, time.perf_counter)
        finally:
            if os.path.exists(path):
                os.unlink(path)
    return found


def _best(work: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(rounds):
        began, count = clock(), 0
        while count == 0 or clock() - began < _ROUND_S:
            work()
            count += 1
        times.append((clock() - began) / count)
    return 1 / min(times)
