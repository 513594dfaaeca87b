"""A job that saves every 10 steps and at a stop, and resumes from its checkpoints.

Its first attempt causes a fault.

    mpiddp launch -H node0,node1,node2 tests/jobs/faulty.py FOLDER STEPS ACT STEP

ACT is the fault of rank 1 at STEP. FOLDER then has: checkpoints/, steps (a line for each step: its time,
the step from which the attempt resumed, its number), fault (the time of the fault) and store (the address
of rank 0's store). The job has no model, because importing torch.optim takes seconds.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import mpiddp
from mpiddp.checkpoints import directory
from mpiddp.runtime.job import session

SAVE_EVERY = 10
FAULTY_RANK = 1
ANSWER_S = 2.0
SLOW_SAVE_S = 3.0


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def crash() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def hold_the_interpreter() -> None:
    """Native code that deadlocks and holds the GIL."""
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def raise_an_error() -> None:
    raise RuntimeError("on purpose")


ACTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit 3": lambda: sys.exit(3),
    "raise": raise_an_error,
    "_exit(0)": lambda: os._exit(0),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "deadlock": deadlock,
    "hold the interpreter": hold_the_interpreter,
    "crash": crash,
    "no answer": lambda: time.sleep(1000),
}
AT_EXIT = {
    "late kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "late _exit(3)": lambda: os._exit(3),
}


def main(folder: Path, steps: int, act: str, act_at: int) -> int:
    fault = folder / "fault"
    with mpiddp.process_group() as world:
        is_first_attempt = not fault.exists()
        is_faulty = world.rank == FAULTY_RANK and is_first_attempt

        def fail(how: Callable[[], object]) -> None:
            fault.write_text(str(time.time()))
            how()

        def fail_at(step: int) -> None:
            if is_faulty and step == act_at and act in ACTS:
                fail(ACTS[act])
            if act == "no answer" and step == act_at and is_first_attempt:
                coordinator = session.current().coordinator
                assert coordinator is not None
                coordinator.all_gather_json(None, timeout_s=ANSWER_S)

        if is_faulty and act in AT_EXIT:
            atexit.register(fail, AT_EXIT[act])

        if world.rank == 0:
            address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
            (folder / "store").write_text(f"{address} {port}")
        newest, _ = directory.survey(folder / "checkpoints")
        first = directory.step_of(newest) if newest else 0
        fail_at(0)
        for step in range(first + 1, steps + 1):
            dist.all_reduce(torch.ones(1))
            if world.rank == 0:
                with (folder / "steps").open("a") as file:
                    file.write(f"{time.time()} {first} {step}\n")
                if step % SAVE_EVERY == 0:
                    directory.write(folder / "checkpoints", step, write_files)
            if mpiddp.should_stop():
                if is_faulty and act == "slow stop":
                    time.sleep(SLOW_SAVE_S)
                if world.rank == 0 and step % SAVE_EVERY:
                    directory.write(folder / "checkpoints", step, write_files)
                return 75
            fail_at(step)
            time.sleep(0.02)
    return 0


def write_files(folder: Path) -> None:
    torch.save({"weight": torch.ones(100, 100)}, folder / "model.pt")


if __name__ == "__main__":
    folder, steps, act, act_at = sys.argv[1:]
    sys.exit(main(Path(folder), int(steps), act, int(act_at)))
