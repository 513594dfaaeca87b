"""An output process that is killed, as by the OOM killer: its rank goes on, and one sentence says so.

Tests mpiddp/runtime/launcher/output.py.
python -m pytest tests/ranks/launch/test_killed_output.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.ranks import launch, script

KILLS = """
import os, signal, subprocess, sys, time
from pathlib import Path
import torch.distributed as dist
from mpiddp.protocol.messages import OUTPUT_PROCESS

def output_process():
    "The one that reads this rank's stderr."
    ours = os.readlink("/proc/self/fd/2")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "comm").read_text().strip() == OUTPUT_PROCESS and any(
                os.readlink(file) == ours for file in (entry / "fd").iterdir()
            ):
                return int(entry.name)
        except OSError:
            continue

if os.environ["RANK"] == sys.argv[1] and len(sys.argv) > 2:
    child = subprocess.Popen([sys.executable, "-c", "print(input())"], stdin=subprocess.PIPE)
dist.init_process_group("gloo")
print("before\\n", end="", flush=True)
if os.environ["RANK"] == sys.argv[1]:
    time.sleep(0.5)
    os.kill(output_process(), signal.SIGKILL)
    time.sleep(0.5)
    for number in range(3):
        print(f"after {number}\\n", end="", flush=True)
        print(f"error {number}\\n", end="", flush=True, file=sys.stderr)
        time.sleep(0.2)
    os.system("echo from a child")
    if len(sys.argv) > 2:
        child.communicate(b"from an older child")
dist.barrier()
dist.destroy_process_group()
"""
SENTENCE = r"^mpiddp: .*rank {rank} on \S+.*output.*$"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_job_goes_on_and_one_sentence_says_it(tmp_path: Path, rank: str) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, KILLS), rank)
    assert done.returncode == 0, done.stderr
    assert "before" in done.stdout
    assert len(re.findall(SENTENCE.format(rank=rank), done.stderr, re.MULTILINE)) == 1, done.stderr
    assert "Input/output error" not in done.stderr
    assert "Broken pipe" not in done.stderr


def test_its_files_still_get_everything(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    done = launch("--log-dir", str(logs), "-H", "localhost:2", script(tmp_path, KILLS), "1")
    assert done.returncode == 0, done.stderr
    printed = (logs / "rank_00001.out").read_text()
    assert printed == "before\nafter 0\nafter 1\nafter 2\nfrom a child\n"
    assert "error 0\nerror 1\nerror 2\n" in (logs / "rank_00001.err").read_text()


def test_a_child_that_has_the_old_pipe_loses_nothing(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    options = ["--log-dir", str(logs), "-H", "localhost:2"]
    done = launch(*options, script(tmp_path, KILLS), "1", "with a child")
    assert done.returncode == 0, done.stderr
    printed = (logs / "rank_00001.out").read_text().splitlines()
    assert printed[-2:] == ["from a child", "from an older child"]


def test_a_command_goes_on_too(tmp_path: Path) -> None:
    """It has the pipes to its end, and what is shown of it then comes through the MPI."""
    command = ["--", sys.executable, script(tmp_path, KILLS), "0"]
    done = launch("-H", "localhost:2", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("from a child")
    assert len(re.findall(SENTENCE.format(rank=0), done.stderr, re.MULTILINE)) == 1, done.stderr
