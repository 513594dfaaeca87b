"""A job that saves every 10 steps and at a stop, and resumes from its checkpoints.

Its first attempt causes a fault.

    mpiddp launch -H node0,node1,node2 tests/jobs/faulty.py FOLDER STEPS ACT STEP

ACT is the fault of rank 1 at STEP (see mpiddp/drill/injectors.py). FOLDER then has: checkpoints/, steps (a
line for each step: its time, the step from which the attempt resumed, its number), fault (the time of the
fault) and store (the address of rank 0's store). The job has no model, because importing torch.optim takes
seconds.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import mpiddp
from mpiddp.checkpoints import folder as directory
from mpiddp.drill.injectors import ACTS
from mpiddp.runtime.job import session
from tests.support import checkpoint_folders

SAVE_EVERY = 10
FAULTY_RANK = 1
ANSWER_S = 2.0
SLOW_SAVE_S = 3.0


NO_ANSWER = "no answer"
LATE = "late "  # before an act that happens at the end, in a handler of atexit


def main(folder: Path, steps: int, act: str, act_at: int) -> int:
    fault = folder / "fault"
    with mpiddp.process_group() as world:
        is_first_attempt = not fault.exists()
        is_faulty = world.rank == FAULTY_RANK and is_first_attempt

        def fail(how: Callable[[], object]) -> None:
            fault.write_text(str(time.time()))
            how()

        def fail_at(step: int) -> None:
            if is_faulty and step == act_at and (act in ACTS or act == NO_ANSWER):
                fail(ACTS["hang" if act == NO_ANSWER else act])
            if act == NO_ANSWER and step == act_at and is_first_attempt:
                coordinator = session.current().coordinator
                assert coordinator is not None
                coordinator.all_gather_json(None, timeout_s=ANSWER_S)

        if is_faulty and act.startswith(LATE):
            atexit.register(fail, ACTS[act.removeprefix(LATE)])

        if world.rank == 0:
            address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
            (folder / "store").write_text(f"{address} {port}")
        newest, _ = checkpoint_folders.survey(folder / "checkpoints")
        first = directory.step_of(newest) if newest else 0
        fail_at(0)
        for step in range(first + 1, steps + 1):
            dist.all_reduce(torch.ones(1))
            if world.rank == 0:
                with (folder / "steps").open("a") as file:
                    file.write(f"{time.time()} {first} {step}\n")
                if step % SAVE_EVERY == 0:
                    checkpoint_folders.write(folder / "checkpoints", step, write_files)
            if mpiddp.should_stop():
                if is_faulty and act == "slow stop":
                    time.sleep(SLOW_SAVE_S)
                if world.rank == 0 and step % SAVE_EVERY:
                    checkpoint_folders.write(folder / "checkpoints", step, write_files)
                return 75
            fail_at(step)
            time.sleep(0.02)
    return 0


def write_files(folder: Path) -> None:
    torch.save({"weight": torch.ones(100, 100)}, folder / "model.pt")


if __name__ == "__main__":
    folder, steps, act, act_at = sys.argv[1:]
    sys.exit(main(Path(folder), int(steps), act, int(act_at)))
