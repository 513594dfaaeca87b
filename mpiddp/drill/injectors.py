"""The faults themselves: what hits a rank from within, processes and links from outside, disks and files.

The drill, benchmarks/faults, benchmarks/random_faults and benchmarks/soak inject the same ones. Pids are
those of this machine, also for processes in containers or in the namespaces of test hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mpiddp.hosts.processes import descendants, signal_all

Damage = Callable[[bytearray, random.Random], None]
LINK_S = 20.0  # a cut lasts longer than the 12 s after which the launcher gives a silent host up
_FAMILIES = ("-4", "-6")
_CHUNK = 1 << 16
_TEXT = (".json", ".jsonl", ".log", ".txt", ".csv", ".yaml", ".out", ".err")


def _raise() -> None:
    raise RuntimeError("on purpose")


def _hang() -> None:
    while True:
        time.sleep(1)


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hold_the_interpreter() -> None:
    """Native code that deadlocks and holds the GIL."""
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def _crash() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


# What a rank does to itself.
ACTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "crash": _crash,
    "raise": _raise,
    "exit 3": lambda: sys.exit(3),
    "_exit(0)": lambda: os._exit(0),
    "_exit(3)": lambda: os._exit(3),
    "hang": _hang,
    "deadlock": _deadlock,
    "hold the interpreter": _hold_the_interpreter,
}


def send(number: int, *pids: int) -> None:
    """Send a signal to these processes. Those that have ended are passed over."""
    signal_all(lambda: pids, number)


def send_to_group(number: int, leader: int) -> None:
    """Send a signal to the process group of `leader`, as a terminal and `timeout` do."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(leader, number)


def to_all(launcher: int) -> None:
    """SIGTERM to every process of the job on this host, as a scheduler and systemd send it."""
    signal_all(lambda: {launcher: "", **descendants(launcher)}, signal.SIGTERM)


def ctrl_c(launcher: int) -> None:
    send_to_group(signal.SIGINT, launcher)


def time_limit(launcher: int) -> None:
    send_to_group(signal.SIGTERM, launcher)


def kill(process: int) -> None:
    send(signal.SIGKILL, process)


def cut_link(process: int = 0) -> None:
    """Let every packet that the host of a process sends vanish; 0 for this host. It needs root there.

    A rule of routing does it. Setting the interface down would lose the routes that lead through it.

    Raises:
        OSError: the host has no `ip`, or this user may not use it.
    """
    for family in _FAMILIES:
        ran = subprocess.run(_rule("add", family, process), capture_output=True, text=True)
        if ran.returncode != 0 and family == "-4":  # a host may do without IPv6
            raise PermissionError(f"ip rule add: {ran.stderr.strip()}")


def mend_link(process: int = 0) -> None:
    """Undo `cut_link`."""
    for family in _FAMILIES:
        subprocess.run(_rule("del", family, process), capture_output=True)


def cut_own_link(seconds: float) -> None:
    """Cut this host off for some time. A process that outlives the job mends the link.

    It reads no file meanwhile, because the file server is cut off as well.

    Raises:
        OSError: as for `cut_link`.
    """
    mend = "; ".join(shlex.join(_rule("del", family, 0)) for family in _FAMILIES)
    subprocess.Popen(
        ["setsid", "--fork", "sh", "-c", f"sleep {seconds}; {mend}"],
        env={"PATH": os.defpath + ":/sbin:/usr/sbin"},  # without the marks of the job
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ).wait()
    cut_link()  # last: a cut that nobody mends would stay


def _rule(verb: str, family: str, process: int) -> list[str]:
    enter = ["nsenter", f"--target={process}", "--net"] if process else []
    return [*enter, "ip", family, "rule", verb, "pref", "1", "blackhole"]


def fill_disk(filler: Path, leave: int = 0) -> None:
    """Write into `filler` until its disk is full, then give `leave` bytes back."""
    with filler.open("ab", buffering=0) as file:
        with contextlib.suppress(OSError):  # it is full
            while file.write(bytes(_CHUNK)):
                pass
        file.truncate(max(0, file.tell() - leave))


def flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def tear(data: bytearray, rng: random.Random) -> None:
    """Cut the end off: all, one byte, or anything between."""
    del data[rng.choice((0, len(data) - 1, rng.randrange(len(data)))) :]


def damage(file: Path, how: Damage, rng: random.Random) -> None:
    """Change the bytes of a file in place."""
    data = bytearray(file.read_bytes())
    how(data, rng)
    file.write_bytes(data)


def newest_save(folder: Path) -> Path | None:
    """The weights of the newest checkpoint: the largest of the files written with the newest one."""
    found = [each for each in folder.rglob("*") if each.is_file() and not each.is_symlink()]
    files = [(each, each.stat()) for each in found if each.suffix not in _TEXT]
    files = [(file, stat) for file, stat in files if stat.st_size >= 64]
    if not files:
        return None
    newest, _ = max(files, key=lambda pair: pair[1].st_mtime)
    near = [(file, stat) for file, stat in files if file.parent == newest.parent]
    step = newest.stat().st_mtime
    together = [(file, stat) for file, stat in near if step - stat.st_mtime < 0.05]
    return max(together, key=lambda pair: pair[1].st_size)[0]
