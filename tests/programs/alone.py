"""Each rank makes steps by itself, and rank 1 fails or hangs at step 10.

    mpiddp launch -H localhost:3 tests/programs/alone.py HOW [FOLDER]

HOW is a name of `HOW`. Each rank prints "ready" before its first step, and rank 0 prints every 50th step.
The ranks end with code 0 once FOLDER/finish exists, and with 75 after a request to stop. In one_fails.py they
wait for each other in every step, and take seconds longer to start.
"""

import ctypes
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mpiddp

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else None


def fail() -> None:
    raise RuntimeError("a bug")


def crash() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def leave_a_process() -> None:
    """It has a session of its own, ignores SIGTERM, and gets no signal that is sent to the rank."""
    text = "trap '' TERM; echo ready; exec sleep 6000"
    process = subprocess.Popen(["setsid", "sh", "-c", text], stdout=subprocess.PIPE)
    process.stdout.readline()
    sys.exit(3)


def hold_the_interpreter() -> None:
    """Wait in native code without releasing the interpreter's lock."""
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(lock)


def load() -> None:
    """Wait for a pipe until somebody writes to it."""
    (FOLDER / "pipe").read_text()


HOW = {
    "never": lambda: None,
    "raise": fail,
    "exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), 9),
    "crash": crash,
    "os._exit": lambda: os._exit(3),
    "leave a process": leave_a_process,
    "stop": lambda: os.kill(os.getpid(), 19),
    "native": hold_the_interpreter,
    "load": load,
}


def main(any_rank: Callable[[bool], bool] = bool) -> int:
    """Make steps. `any_rank` says in each step whether a rank wants to end."""
    rank = int(os.environ["RANK"])
    print("ready\n", end="", flush=True)
    for step in range(1, 1_000_000):
        if any_rank(FOLDER is not None and (FOLDER / "finish").exists()):
            return 0
        if mpiddp.should_stop():
            return 75
        if rank == 1 and step == 10:
            HOW[sys.argv[1]]()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}\n", end="", flush=True)
        time.sleep(0.02)
    return 1


if __name__ == "__main__":
    sys.exit(main())
