"""A job that is watched, asked for its stacks and stopped from other processes, and one with a slow rank.

Tests mpiddp/watch/, mpiddp/launch/monitor/{console,skew}.py.
python -m pytest tests/ranks/launch/test_watched_job.py
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer

from mpiddp.protocol.viewers import JOB, STACKS
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, mpiddp, script

# Both ranks make steps. Once there is a file "wait", rank 1 waits for a pipe.
STEPS = """
import os, sys, time
import mpiddp

def load():
    return open("pipe").read()

for step in range(1, 1_000_000):
    time.sleep(0.01)
    if os.environ["RANK"] == "1" and os.path.exists("wait"):
        load()
        os.remove("wait")
    if mpiddp.should_stop():
        sys.exit(75)
    if step == 50:
        print("step 50", flush=True)
"""

# Rank 1 has a loop of its own in every step.
STRAGGLER = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    until = time.thread_time() + (0.1 if dist.get_rank() == 1 else 0.01)
    while time.thread_time() < until:
        pass
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def started(folder: Path, text: str) -> subprocess.Popen[str]:
    folder.chmod(0o700)
    return subprocess.Popen(
        [*LAUNCH, "-H", "localhost:2", script(folder, text)],
        env=clean_env({"XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT)}), cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_job_is_watched_and_stopped_from_another_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with started(tmp_path, STEPS) as job:
        limit = Timer(PATIENCE_S, job.kill)
        limit.start()
        assert job.stdout is not None
        assert job.stdout.readline() == "step 50\n"
        pid = str(job.pid)

        def view(*arguments: str) -> list[str]:
            done = mpiddp(*arguments, XDG_RUNTIME_DIR=str(tmp_path))
            assert (done.returncode, done.stderr) == (0, "")
            return done.stdout.splitlines()

        def steps() -> list[int]:
            table = [line.split() for line in view("top", pid, "--once")[-2:]]
            assert [row[:1] + row[2:3] for row in table] == [["0", "running"], ["1", "running"]]
            return [int(row[3]) for row in table if row[3] != "-"]

        (line,) = [line.split() for line in view("ps") if pid in line.split()]
        assert (line[1], line[3]) == ("script.py", "2")
        until(lambda: len(steps()) == 2)
        assert any("step 50" in line for line in view("top", pid))

        viewers = []  # that connect and never read
        for kind in (JOB, STACKS) * 20:
            (path,) = (tmp_path / "mpiddp").glob(f"*{kind}")
            viewers.append(socket.socket(socket.AF_UNIX))
            viewers[-1].connect(str(path))
        before = max(steps())
        until(lambda: min(steps()) > before)
        for viewer in viewers:
            viewer.close()

        (tmp_path / "wait").touch()
        is_in_load = re.compile(
            r'rank 1 on \S+ is in load \(script\.py:6\): return open\("pipe"\)\.read\(\)\.'
        )
        until(lambda: bool(is_in_load.search(view("stacks", pid)[0])))
        text = "\n".join(view("stacks", pid, "--rank", "1"))
        assert 'script.py", line 6, in load' in text
        assert text.index("thread MainThread:") < text.index("thread mpiddp-takeover:")
        (tmp_path / "pipe").write_text("")

        assert view("stop", pid) == [f"job {pid} (script.py) is requested to stop."]
        _, stderr = job.communicate(timeout=PATIENCE_S)
        limit.cancel()
    assert job.returncode == 75, stderr
    assert "mpiddp: SIGTERM: the ranks are saving and stopping" in stderr
    assert not (tmp_path / "mpiddp").exists()


def test_a_rank_that_holds_the_others_up_is_named(tmp_path: Path) -> None:
    with started(tmp_path, STRAGGLER) as job:
        limit = Timer(PATIENCE_S, job.kill)
        limit.start()
        assert job.stderr is not None
        said = next((line for line in job.stderr if "holds the others up" in line), "")
        shown = mpiddp("top", str(job.pid), XDG_RUNTIME_DIR=str(tmp_path)).stdout
        job.terminate()
        job.communicate(timeout=PATIENCE_S)
        limit.cancel()
    assert re.match(
        r"mpiddp: rank 1 on \S+ holds the others up: it works for \d+ ms in a step of \d+ ms, [\d.]+ times "
        r"as long as they do\.",
        said,
    )
    assert re.search(r"^rank 1 on \S+ holds the others up", shown, re.MULTILINE), shown
