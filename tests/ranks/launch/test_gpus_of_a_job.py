"""The GPUs of the ranks of a job on one host.

Tests mpiddp/hosts/gpus.py, mpiddp/launch/variables.py, mpiddp/runtime/start/own_gpu.py.
python -m pytest tests/ranks/launch/test_gpus_of_a_job.py
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from tests.support.errors import error
from tests.support.gpu_tools import NVIDIA, PRINT_GPUS, tool
from tests.support.ranks import launch, script

HOST = socket.gethostname()


def test_a_rank_without_a_gpu_stays_where_it_is_and_says_so(tmp_path: Path) -> None:
    job = script(tmp_path, "import os; print(len(os.sched_getaffinity(0)), flush=True)")
    done = launch("--bind", "gpu", "-n", "1", job)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(os.sched_getaffinity(0))}\n"
    assert done.stderr.endswith(f"\nrank 0 on {HOST} is not bound: its GPU is not known\n")


def test_a_job_without_gpus_leaves_the_hostfiles_numbers_alone(tmp_path: Path) -> None:
    """They are not checked either: no rank uses them."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost gpus=0,9\n")
    path = f"{tool(tmp_path / 'tools', 'nvidia-smi', NVIDIA)}:{os.environ['PATH']}"
    job = script(tmp_path, PRINT_GPUS)
    done = launch("--hostfile", str(hostfile), job, PATH=path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"0 {HOST} ", f"1 {HOST} "]
    refused = launch("--hostfile", str(hostfile), job, PATH=path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.search(error("They are", " GPU 9 (gpus=0,9)"), refused.stderr), refused.stderr
