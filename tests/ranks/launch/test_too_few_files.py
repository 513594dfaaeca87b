"""A job with too few files says so and does not spin.

Tests mpiddp/runtime/launcher/client.py, mpiddp/launch/supervise/control.py.
python -m pytest tests/ranks/launch/test_too_few_files.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from mpiddp.launch.supervise.signals import AwakeSelector
waits = []
select = AwakeSelector.select
def counted(self, timeout=None):
    waits.append(timeout)
    return select(self, timeout)
AwakeSelector.select = counted
from mpiddp import cli
code = cli.main(sys.argv[1:])
print("waits", len(waits), file=sys.stderr)
sys.exit(code)
"""


def test_a_job_with_too_few_files_says_so_and_does_not_spin(tmp_path: Path) -> None:
    """Strangers take the files that are left."""
    job = tmp_path / "job.py"
    job.write_text(STRANGERS)
    command = [sys.executable, "-c", FEW_FILES, "launch", "-H", "localhost:1", str(job)]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("mpiddp: ranks cannot connect: Too many open files. ") == 1
    *_, waits = done.stderr.split()
    assert int(waits) < 2000, done.stderr


STRANGERS = """
import os, re, socket, time
path = re.search(rb"MPIDDP_CONTROL=unix:([^\\0]+)", open("/proc/self/environ", "rb").read())[1]
child = os.fork()
strangers = []
try:
    while True:
        stranger = socket.socket(socket.AF_UNIX)
        strangers.append(stranger)
        stranger.connect(path)
except OSError:
    time.sleep(3)
if child == 0: os._exit(0)
strangers.clear()
os.waitpid(child, 0)
"""
