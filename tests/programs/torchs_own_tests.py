"""torch's own DistributedTest, by the ranks of whatever launcher has started this (`tests.support.peers`).

    torchrun --nproc-per-node 2 torchs_own_tests.py FOLDER

torch starts a process for each rank of each test. Here the ranks are there already, so each test gets a process group
of its own, over the store at MASTER_ADDR and MASTER_PORT. A rank writes FOLDER/RANK.json: for each test "ok", "skip",
or the class of its error.
"""

import json
import os
import re
import sys
import time
import unittest
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

GROUP_S, PEERS_S, WORST_S = 15, 40, 900  # of a test's group, of a test's other ranks, of all tests
# They need a GPU, or end their process on purpose.
LEFT_OUT = re.compile("nccl|_cuda|gpu|has_finalized|hook_pickling")

os.environ["BACKEND"] = "gloo"  # the module of the tests reads it while it is imported
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(*place, world_size, rank == 0, timedelta(seconds=60))

from torch.testing._internal import common_distributed, common_utils  # noqa: E402 - after BACKEND

if rank == 0:
    common_distributed.initialize_temp_directories()
    store.set("folder", os.environ["TEMP_DIR"])
os.environ["TEMP_DIR"] = store.get("folder").decode()

from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402 - after TEMP_DIR

SKIPS = {skip.exit_code for skip in common_distributed.TEST_SKIPS.values()}


class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """All of them. This name is part of none of their results."""


def run(number: int, name: str) -> str:
    """The result of a test on this rank."""
    test = Tests(name)
    test.rank, test.file_name = rank, f"{os.environ['TEMP_DIR']}/file{number}"
    suite.Barrier.barrier_id = 0
    if rank == 0:
        for file in Path(os.environ["TEMP_DIR"], "barrier").iterdir():
            file.unlink()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"test{number}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_S),
    )
    try:
        test._barrier()
        common_utils.set_rng_seed()
        getattr(test, name)()
    except unittest.SkipTest:
        return "skip"
    except SystemExit as end:
        return "skip" if end.code in SKIPS else f"exit {end.code}"
    except BaseException as error:
        return type(error).__name__  # its text has times and addresses
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "ok"


def meet(number: int) -> None:
    """Go on together with the other ranks, whatever has happened to them in this test."""
    store.add(f"end{number}", 1)
    deadline = time.monotonic() + PEERS_S
    while store.add(f"end{number}", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.002)


names = [n for n in unittest.TestLoader().getTestCaseNames(Tests) if not LEFT_OUT.search(n)]
results, began = {}, time.monotonic()
for number, name in enumerate(names):
    results[name] = run(number, name) if time.monotonic() < began + WORST_S else "no time was left"
    meet(number)
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(results, indent=0), encoding="utf-8")
