"""torchrun's variables in a rank, and the processes that a rank starts: children, torchrun, another job.

Tests mpiddp/runtime/start/join.py, mpiddp/runtime/rendezvous/mpi.py.
python -m pytest tests/ranks/runtime/test_script_environment.py
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.ranks import launch, script

# Each rank starts a child that joins the children of the other ranks, twice.
CHILDREN = """
import os, subprocess, sys
import torch, torch.distributed as dist
CHILD = '''
import mpiddp, torch, torch.distributed as dist
world = mpiddp.init(backend="gloo")
total = torch.tensor([world.rank + 1])
dist.all_reduce(total)
print(f"child {world.rank} of {world.world_size}: {total.item()}\\\\n", end="", flush=True)
'''
if sys.argv[1] == "group":
    dist.init_process_group("gloo")
for _ in range(2):
    subprocess.run([sys.executable, "-c", CHILD], check=True)
"""


@pytest.mark.parametrize("group", ["group", "no group"])
def test_child_processes_that_call_init_join_each_other(tmp_path: Path, group: str) -> None:
    done = launch("-n", "2", script(tmp_path, CHILDREN), group)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["child 0 of 2: 3"] * 2 + ["child 1 of 2: 3"] * 2


# argv[1] is a port for a second group that the script forms by itself.
SECOND_PORT = """
import os, sys, torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[1]}", rank=rank, world_size=size)
total = torch.tensor([rank + 1])
dist.all_reduce(total)
print(f"{total.item()}\\n", end="", flush=True)
"""


def test_a_group_on_another_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = launch("-n", "2", script(tmp_path, SECOND_PORT), str(port))
    assert (done.returncode, done.stdout) == (0, "3\n3\n"), done.stderr


# Rank 0 starts torchrun, whose two workers are a job of their own.
NESTED = """
import os, subprocess, sys
WORKER = '''
import mpiddp
world = mpiddp.init(backend="gloo")
print(f"worker {world.rank} of {world.world_size} by {world.launcher.name}\\\\n", end="", flush=True)
'''
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "w") as file:
        file.write(WORKER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    subprocess.run([*torchrun, "--standalone", sys.argv[1]], check=True)
"""


def test_a_torchrun_inside_of_a_rank_is_torchruns_job(tmp_path: Path) -> None:
    done = launch("-n", "2", script(tmp_path, NESTED), str(tmp_path / "worker.py"))
    assert done.returncode == 0, done.stderr
    workers = [f"worker {rank} of 2 by torchrun" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == workers


# Rank 0 starts a job of its own.
NESTED_LAUNCH = """
import os, subprocess, sys
if os.environ["RANK"] == "0":
    rank, size = "os.environ['RANK']", "os.environ['WORLD_SIZE']"
    inner = f"import os; print('inner ' + {rank} + ' of ' + {size} + chr(10), end='')"
    with open(sys.argv[1], "w") as file:
        file.write(inner)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    launch = [sys.executable, "-m", "mpiddp", "launch", "-H", "localhost:3", sys.argv[1]]
    subprocess.run(launch, env=env, check=True)
"""


def test_a_launch_inside_of_a_rank_is_a_job_of_its_own(tmp_path: Path) -> None:
    done = launch("-n", "2", script(tmp_path, NESTED_LAUNCH), str(tmp_path / "inner.py"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"inner {rank} of 3" for rank in range(3)]


SPAWN = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="spawn")
    print(sum(int(batch.sum()) for (batch,) in loader), flush=True)
"""


def test_spawned_workers_of_a_data_loader(tmp_path: Path) -> None:
    done = launch("-n", "2", script(tmp_path, SPAWN))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["28", "28"]


def test_mpi4py_is_not_there_after_mpi_is_finalized(tmp_path: Path) -> None:
    text = "try:\n    from mpi4py import MPI\nexcept ImportError as error:\n    print(error)"
    done = launch("-n", "2", script(tmp_path, text))
    (sentence,) = set(done.stdout.splitlines())
    assert sentence == (
        "mpiddp has finalized the MPI of this rank. To use mpi4py in the script, start it with "
        "mpirun itself, and call mpiddp.init(keep_mpi=True)"
    )


DIVERGED = """
import mpiddp, torch, torch.distributed as dist
dist.init_process_group()
model = torch.nn.Linear(2, 2)
torch.nn.init.constant_(model.weight, dist.get_rank())
mpiddp.check_divergence(model)
"""


def test_ranks_of_a_group_without_a_named_backend_are_compared(tmp_path: Path) -> None:
    done = launch("-n", "2", script(tmp_path, DIVERGED))
    assert "the ranks have diverged" in done.stderr, done.stderr
    assert done.returncode == 1
