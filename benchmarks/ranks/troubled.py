"""A training that knows nothing of mpiddp, in which rank 1 has a trouble from step 20 on.

    mpiddp launch -H localhost:3 benchmarks/ranks/troubled.py FOLDER TROUBLE

`HANGS` end all progress, `STRAGGLERS` slow it down. FOLDER gets a file `began` when the trouble begins.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

BEGINS_AT = 20  # steps
COMPUTE_S = 0.005  # of a core, in each step of each rank
SLOW_S = 0.2  # that a straggler takes longer
NEVER_S = 1e6

other_group: list[dist.ProcessGroup] = []  # of all ranks, too
folder, trouble = Path(sys.argv[1]), sys.argv[2]


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


# --- hangs ---


def wait_for_file() -> None:
    while not (folder / "ready").exists():
        time.sleep(0.1)


def wait_for_lock() -> None:
    with (folder / "lock").open("w") as first, (folder / "lock").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)


def wait_for_thread() -> None:
    threading.Event().wait()


def read_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).recv(1)


def read_pipe() -> None:
    command = ["sleep", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()


def join_another_collective() -> None:
    dist.all_reduce(torch.zeros(4), group=other_group[0])


def stop_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop_for_ever() -> None:
    number = 0
    while number >= 0:
        number += 1
        number %= 1000


def sleep_in_hook(*_: object) -> None:
    if (folder / "began").exists():
        time.sleep(NEVER_S)


HANGS: dict[str, Callable[[], None]] = {
    "file": wait_for_file,
    "lock": wait_for_lock,
    "thread": wait_for_thread,
    "socket": read_socket,
    "pipe": read_pipe,
    "collective": join_another_collective,
    "sigstop": stop_process,
    "busy": loop_for_ever,
}


# --- stragglers ---


def write_to_disk() -> None:
    with (folder / "log").open("wb") as file:
        until = time.monotonic() + SLOW_S
        while time.monotonic() < until:
            file.seek(0)
            file.write(bytes(16 << 20))
            os.fsync(file.fileno())


def pause_once() -> None:
    if not (folder / "paused").exists():
        (folder / "paused").touch()
        time.sleep(8.0)


STRAGGLERS: dict[str, Callable[[], None]] = {
    "sleep": lambda: time.sleep(SLOW_S),
    "disk": write_to_disk,
    "heavier": lambda: compute(SLOW_S),
    "pause": pause_once,
}


def share_core() -> None:
    """Another process computes on this rank's core."""
    core = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, [{core}])\nwhile os.getppid() != 1: pass"
    subprocess.Popen([sys.executable, "-c", program])  # until this rank ends
    os.sched_setaffinity(0, [core])


def be_nice() -> None:
    os.nice(19)
    share_core()


ONCE: dict[str, Callable[[], None]] = {"core": share_core, "nice": be_nice}


class Samples(Dataset[Tensor]):
    """Those of one rank; slow ones, or ones that never come, in a worker of rank 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        if self._rank == 1 and index >= BEGINS_AT:
            time.sleep({"worker": NEVER_S, "loader": SLOW_S}.get(trouble, 0.0))
        return torch.ones(64)


def main() -> None:
    if trouble == "pinned" and int(os.environ["RANK"]) > 0:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    other_group.append(dist.new_group())
    width = 512 if trouble == "link" else 64
    model = nn.Sequential(nn.Linear(64, width), nn.Linear(width, 512), nn.Linear(512, 4))
    if trouble == "hook" and rank == 1:
        model.register_forward_hook(sleep_in_hook)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-9)
    workers = 1 if trouble in ("worker", "loader") else 0
    batches = iter(
        DataLoader(Samples(rank), num_workers=workers, prefetch_factor=2 if workers else None)
    )
    step = 0
    while True:
        step += 1
        batch = next(batches)
        if rank == 1 and step >= BEGINS_AT:
            (folder / "began").touch()
            if trouble == "left":
                break
            if step == BEGINS_AT:
                ONCE.get(trouble, lambda: None)()
            HANGS.get(trouble, STRAGGLERS.get(trouble, lambda: None))()
        compute(COMPUTE_S)
        ddp(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    wait_for_thread()  # as one that writes its results, and then waits for others


if __name__ == "__main__":
    main()
