"""A script that knows nothing of mpiddp hangs: the launcher says who waits where, and ends nothing by itself.

Tests mpiddp/launch/monitor/hang.py, mpiddp/runtime/start/join.py.
python -m pytest tests/ranks/launch/test_unmodified_hangs.py
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from threading import Timer

from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, launch, script

# Rank 1 waits for a pipe that nobody writes to.
TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def load(path):
    return open(path)

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    if step == 5 and dist.get_rank() == 1:
        load(sys.argv[1])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_hang_is_named_without_an_option_and_ends_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [*LAUNCH, "-H", "localhost:3", script(tmp_path, TRAINING), str(pipe)],
        env=clean_env(), cwd=ROOT, stderr=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        assert job.stderr is not None
        limit = Timer(PATIENCE_S, job.kill)
        limit.start()
        said = next(line for line in job.stderr if "no rank has made a step" in line)
        assert re.fullmatch(
            r"mpiddp: no rank has made a step for \d+ s: rank 0 on \S+, rank 2 on \S+ wait in backward "
            r"\(script\.py:16\); rank 1 on \S+ is in load \(script\.py:8\): return open\(path\)\.\n",
            said,
        )
        limit.cancel()
        pipe.write_text("")  # what rank 1 has waited for
        _, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, stderr


def test_hang_timeout_counts_the_steps_of_an_unmodified_script(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = script(tmp_path, TRAINING)
    done = launch("-H", "localhost:2", "--hang-timeout", "3", path, str(pipe))
    assert done.returncode == 1
    said = (
        r"rank 1 on \S+ has made no step for 3 s while the others wait at step 5\. Its Python stack"
    )
    assert re.search(said, done.stderr), done.stderr
    assert "return open(path)" in done.stderr
    assert done.stderr.endswith("mpiddp: the job hung and was stopped.\n")
