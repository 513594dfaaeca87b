"""An output process that is killed, as by the OOM killer: its rank goes on, and one sentence says so.

Tests mpiddp/runtime/launcher/output.py.
python -m pytest tests/ranks/launch/test_killed_output.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.ranks import launch, script

KILLS = """
import os, signal, sys, time
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
dist.barrier()
dist.destroy_process_group()
"""
SENTENCE = r"^mpiddp: .*rank {rank} on \S+.*output.*$"


@pytest.mark.xfail(
    strict=True, reason="the rank's next write is an OSError, and the rank is blamed"
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_job_goes_on_and_one_sentence_says_it(tmp_path: Path, rank: str) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, KILLS), rank)
    assert done.returncode == 0, done.stderr
    assert "before" in done.stdout
    assert len(re.findall(SENTENCE.format(rank=rank), done.stderr, re.MULTILINE)) == 1, done.stderr
    assert "Input/output error" not in done.stderr
    assert "Broken pipe" not in done.stderr


@pytest.mark.xfail(
    strict=True, reason="the rank's next write is an OSError, and the rank is blamed"
)
def test_its_files_still_get_everything(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    done = launch("--log-dir", str(logs), "-H", "localhost:2", script(tmp_path, KILLS), "1")
    assert done.returncode == 0, done.stderr
    printed = (logs / "rank_00001.out").read_text()
    assert printed == "before\nafter 0\nafter 1\nafter 2\nfrom a child\n"
    assert "error 0\nerror 1\nerror 2\n" in (logs / "rank_00001.err").read_text()
