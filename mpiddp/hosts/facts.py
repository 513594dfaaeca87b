"""What a host says of itself: the one program that the preflight and `mpiddp doctor` ask.

Its source travels to the hosts, with those of the modules that it imports. It needs Python 3.8 and
the standard library. What a host cannot tell is None.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiddp.hosts.files import files_of
from mpiddp.hosts.gpu_health import MORE_S, read_health
from mpiddp.hosts.gpus import TIMEOUT_S, tool_output
from mpiddp.hosts.interfaces import interfaces, own_addresses

VERSION_S = 10.0  # of an mpirun --version
LONGEST_S = TIMEOUT_S + 3 * MORE_S + VERSION_S + 5.0  # that a host with slow tools takes
LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
}
_RESOLVERS = 64


def host_info(needs: dict[str, Any]) -> dict[str, Any]:
    """The fields of the preflight's HostInfo except `host`, as JSON. `needs` is its Needs as JSON."""
    path = f"{needs['path']}:{os.environ.get('PATH', os.defpath)}"
    health = read_health(path)
    program = needs["program"]
    if program is not None and os.sep in program:  # relative to the working folder
        program = str(Path(needs["folder"], program))
    version = program_version(needs["mpirun"], os.environ)
    return {
        "has_folder": os.path.isdir(needs["folder"]),
        "has_program": program is None or shutil.which(program, path=needs["path"]) is not None,
        "has_script": os.path.exists(os.path.join(needs["folder"], needs.get("script") or "")),
        "has_daemon": os.access(needs["daemon"], os.X_OK),
        "mpirun": None if version is None else version.partition("\n")[0][:500],
        "machine": machine(),
        "python": sys.version.split()[0],
        "torch": package_version("torch"),
        "mpi4py": package_version("mpi4py"),
        "health": health,
        "interfaces": [interface._asdict() for interface in interfaces()],
        "address": [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""][2],
    }


def doctor_facts(wanted: dict[str, Any]) -> dict[str, Any]:
    """What `mpiddp doctor` compares. `wanted` has names of hosts, folders, a program and a PATH."""
    from concurrent.futures import ThreadPoolExecutor  # 10 ms

    names = {*wanted["names"], socket.gethostname()}
    with ThreadPoolExecutor(_RESOLVERS) as threads:
        resolved = dict(zip(names, threads.map(_resolve, names)))
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "hostname": socket.gethostname(),
        "addresses": list(own_addresses()),
        "links": links(),
        "names": resolved,
        "limits": {name: resource.getrlimit(kind)[1] for name, kind in LIMITS.items()},  # -1: none
        "cores": os.cpu_count(),
        "cores for a process": len(os.sched_getaffinity(0)),
        "shm": shared.f_blocks * shared.f_frsize if shared else 0,
        "infiniband": os.path.isdir("/sys/class/infiniband"),
        "folders": {label: _folder(path, label) for label, path in wanted["folders"].items()},
        "files": dict(files_of(*wanted["program"])),
        "clock": time.time(),  # the last one: the others may take seconds
    }


def machine() -> str:
    """What tells this host from others, whatever its names: its boot, its network, and a container's pids."""
    try:
        namespaces = [os.readlink(f"/proc/self/ns/{each}") for each in ("net", "pid")]
    except OSError:
        return ""
    boot = _text(Path("/proc/sys/kernel/random/boot_id"))
    return " ".join([boot, *namespaces]) if boot else ""


def links(root: str = "/sys/class/net") -> list[dict[str, Any]]:
    """Each interface that is up, with its speed in Gbit/s, "" where it is not known, and its MTU."""
    found = []
    for each in interfaces():
        speed, mtu = (_text(Path(root, each.name, name)) for name in ("speed", "mtu"))
        known = f"{int(speed) / 1000:g} Gbit/s" if speed.isdigit() else ""  # -1: not known
        found.append({**each._asdict(), "speed": known, "mtu": mtu})
    return found


def package_version(package: str) -> str | None:
    """The version in the package's metadata, None without it. To import torch would take seconds."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def program_version(program: str, env: Mapping[str, str]) -> str | None:
    """What `program --version` prints; None if it cannot run, or does not answer within VERSION_S."""
    own = with_own_folder(Path(program), env)
    return tool_output(program, ("--version",), None, VERSION_S, own) or None


def with_own_folder(program: Path, env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the program's folder on PATH, where Intel's mpirun looks for its other programs."""
    folders = env.get("PATH", os.defpath).split(os.pathsep)
    own = str(program.parent)
    return {**env, "PATH": os.pathsep.join(folders if own in folders else [*folders, own])}


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({str(each[4][0]) for each in found})


def _folder(path: str, label: str) -> dict[str, Any]:
    """Whether a folder can be used. That of a run need not exist yet: then it is that above it."""
    is_written = label == "run"
    while is_written and not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    found = {"path": path, "is_written": is_written, "error": "", "free": 0}
    try:
        os.listdir(path)
        space = os.statvfs(path)
        found["free"] = space.f_bavail * space.f_frsize
        if is_written and space.f_flag & os.ST_RDONLY:
            found["error"] = "Read-only file system"
        elif is_written and not os.access(path, os.W_OK):
            found["error"] = "Permission denied"
    except OSError as error:
        found["error"] = str(error.strerror)
    return found


def _text(path: Path) -> str:
    """The line of a file of sysfs, "" where it cannot be read: the speed of a link that is down."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
