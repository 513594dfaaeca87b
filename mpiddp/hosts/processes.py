"""The processes of a job on this host: find them, end them, and tell whether the kernel has killed some.

The kernel kills processes for lack of memory, and counts that in their control group. The source of this
module travels to the host of a rank that was killed, and to hosts where a job has left processes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from stat import S_ISCHR
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from subprocess import Popen

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
KILL_S = 5.0  # for killed processes to end, unless a disk or a driver blocks them
OPEN_BESIDES = 1024  # open files beyond those that a caller of allow_open counts
_PAUSE_S = 0.02
_LONGEST_COMMAND = 60  # characters
_CGROUPS = Path("/sys/fs/cgroup")
# The files of a control group with its kills and its limit, of cgroup v2 and v1.
_V2, _V1 = ("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes")
# It is looked up here, because a child that was forked beside threads may not look it up.
_prctl = ctypes.CDLL(None).prctl


def signal_at_parents_end(number: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def end_with_parent(number: int) -> None:
    """Prepare a process that was just forked: this signal ends it when its parent ends, also if that is killed.

    With another signal than SIGTERM, it is shielded from SIGTERM: a service manager or a batch system may send
    one to every process of a job while the ranks save.
    """
    signal_at_parents_end(number)
    signal.signal(number, signal.SIG_DFL)  # under nohup, it would be ignored
    if number != signal.SIGTERM:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


@contextmanager
def child_process(
    argv: Sequence[str], stdout: int | IO[str], stderr: int | IO[str], **more: Any
) -> Iterator[Popen[str]]:
    """A process that ends with the body, by SIGTERM and 40 s later SIGKILL, and with this process, by SIGTERM."""
    from subprocess import DEVNULL, Popen  # takes 5 ms of each rank

    # It ends with this process even if a Ctrl-C comes before its number is known.
    ends, how = (
        partial(end_with_parent, signal.SIGTERM),
        {"encoding": "utf-8", "errors": "replace", **more},
    )
    with Popen(
        argv, stdin=DEVNULL, stdout=stdout, stderr=stderr, preexec_fn=ends, **how
    ) as process:
        try:
            yield process
        finally:
            end_all(
                lambda: [process.pid] if process.poll() is None else [], grace_s=8 * KILL_S
            )  # ranks have 30 s


def adopt_orphans() -> None:
    """Become the parent of all processes that this process has started when their own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def allow_open(count: int) -> int:
    """Raise this process's limit of open files to `count`, or to the hard limit. Returns the lower one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return needed


def room_for(most: int) -> int:
    """How many more threads, and so processes, the kernel gives this user now; at most `most`."""
    over, started = threading.Event(), 0
    with suppress(RuntimeError):
        while started < most:
            threading.Thread(target=over.wait, daemon=True).start()
            started += 1
    over.set()
    return started


def descendants(ancestor: int, but: Collection[int] = (), spared: str = "") -> dict[int, str]:
    """The pids and names of the running descendants of `ancestor`.

    Those of `but`, and those with the name `spared`, are left out, with all that they have started.
    They include orphans that it has adopted.
    """
    children: dict[int, list[tuple[int, str]]] = defaultdict(list)
    if ancestor == os.getpid():
        try:  # to read all of /proc takes 10 ms, twice for each script
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has no child, not even a zombie
            return {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in but:
            with suppress(OSError):  # it has ended
                # "pid (name) state ppid …". The name may contain any bytes, including parentheses.
                head, _, tail = (entry / "stat").read_bytes().rpartition(b")")
                state, parent = tail.split()[:2]
                if state != b"Z":
                    name = os.fsdecode(head.partition(b"(")[2])
                    if name != spared:
                        children[int(parent)].append((int(entry.name), name))
    below = [*children[ancestor]]
    for pid, _ in below:
        below += children[pid]
    return dict(below)


def fact_of(pid: int | str, name: str) -> bytes:
    """A file of a process, as proc(5) describes it; b"" if it has ended, or belongs to another user."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def command_of(pid: int) -> str:
    """The beginning of a process's command line; "" if it has none, or has ended."""
    line = fact_of(pid, "cmdline").rstrip(b"\0").replace(b"\0", b" ")
    return line.decode(errors="replace")[:_LONGEST_COMMAND]


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    signals = fact_of(pid, "status").partition(b"SigCgt:")[2].split()
    return bool(signals and int(signals[0], 16) >> (number - 1) & 1)


@contextmanager
def opened(pid: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that sends a signal to the process that has this pid now.

    With it, the caller first checks that this is the right process. Without pidfds (Linux before 5.3, a
    container that forbids them), a signal right after this check may reach another process. If the process
    has ended, both this and the function raise ProcessLookupError.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # no pidfds, or too many open files
        yield lambda number: os.kill(pid, number)
        return
    try:
        yield lambda number: signal.pidfd_send_signal(process, number)
    finally:
        os.close(process)


def kill_marked(mark: bytes, outputs: Collection[str] = ()) -> list[int]:
    """Kill all processes that `marked` finds. Returns their pids."""
    return signal_all(lambda: marked(mark, outputs), signal.SIGKILL)


def marked(mark: bytes, outputs: Collection[str] = ()) -> list[int]:
    """The pids of all processes that were started with the environment variable `mark`, b"NAME=VALUE".

    A process that changes its title overwrites its variables, but is found if it writes to one of `outputs`,
    which are keys of `key_of_output`.
    """
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended, or belongs to another user
                if mark in (entry / "environ").read_bytes().split(b"\0") or any(
                    key_of_output(entry / f"fd/{number}") in outputs for number in (1, 2) if outputs
                ):
                    pids.append(int(entry.name))
    return pids


def key_of_output(file: Path) -> str:
    """A key of a pipe or a terminal, by its link in /proc/PID/fd; "" if it is closed.

    Another terminal may get the same name later, so the time of its creation is a part of the key.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        name, status = str(file.readlink()), file.stat()
        return f"{boot} {name} {status.st_ctime_ns if S_ISCHR(status.st_mode) else ''}"
    return ""


def signal_all(find: Callable[[], Collection[int]], number: int) -> list[int]:
    """Send a signal to the processes that `find` returns. Returns the pids of those that got it."""
    signalled = []
    with ExitStack() as stack:
        processes = {}
        for pid in find():
            with suppress(OSError):  # it has ended
                processes[pid] = stack.enter_context(opened(pid))
        # A process may have ended before it was opened, and its pid may be a stranger's.
        for pid in processes.keys() & find():
            with suppress(OSError):  # it has ended, or belongs to another user
                processes[pid](number)
                signalled.append(pid)
    return signalled


def end_all(find: Callable[[], Collection[int]], *, grace_s: float) -> Collection[int]:
    """End the processes that `find` returns: SIGTERM, then SIGKILL after `grace_s`. Returns the survivors."""
    if not (left := find()):
        return left
    if grace_s:
        signal_all(find, signal.SIGTERM)
        signal_all(find, signal.SIGCONT)
    deadline = time.monotonic() + grace_s
    while (left := find()) and time.monotonic() < deadline + KILL_S:
        if time.monotonic() >= deadline:
            signal_all(find, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return left


class OomKills(NamedTuple):
    """How many processes of a control group the kernel has killed for lack of memory."""

    kills: int
    limit_bytes: int | None  # the group's limit of memory, None if it has none


def group_of(of: str = "memory") -> Path | None:
    """The folder of the control group in which the kernel limits this process's memory, or its "cpu"."""
    with suppress(ValueError):
        lines = os.fsdecode(fact_of("self", "cgroup")).splitlines()
        groups = {
            controller: path.lstrip("/")
            for _, controllers, path in (line.split(":", 2) for line in lines)
            for controller in controllers.split(",")
        }
        if of in groups:  # cgroup v1
            return _CGROUPS / of / groups[of]
        if "" in groups:  # cgroup v2
            return _CGROUPS / groups[""]
    return None


def cores_of_group(folder: Path | None) -> float:
    """How many of this host's cores a control group, and those above it, may use at the same time."""
    cores = float(os.cpu_count() or 1)
    for group in (folder, *folder.parents) if folder is not None else ():
        # v2: "150000 100000" or "max 100000"; v1 has -1 for no limit
        with suppress(OSError, ValueError):
            if (group / "cpu.max").exists():
                quota, period = map(int, (group / "cpu.max").read_text(encoding="ascii").split())
            else:
                quota = int((group / "cpu.cfs_quota_us").read_text(encoding="ascii"))
                period = int((group / "cpu.cfs_period_us").read_text(encoding="ascii"))
            cores = min(cores, quota / period) if quota > 0 else cores
    return max(1.0, cores)


def kills_in(folder: Path | None) -> OomKills | None:
    """The kills of a control group; None if the kernel does not tell."""
    if folder is None:
        return None
    for events, limit in (_V2, _V1):
        with suppress(OSError, ValueError, KeyError):
            lines = (folder / events).read_text("utf-8").splitlines()
            counts = dict(line.split() for line in lines)
            text = (folder / limit).read_text("utf-8").strip()
            no_limit = text == "max" or int(text) > 1 << 60  # v1 writes the largest number of pages
            return OomKills(int(counts["oom_kill"]), None if no_limit else int(text))
    return None
