"""What a rank tells of itself when the launcher looks at it.

Tests mpiddp/runtime/launcher/stacks.py.
python -m pytest tests/unit/runtime/test_stacks.py
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.patience import PATIENCE_S

# A thread looks, as in a rank: it leaves out its own stack.
WITHOUT_FILES = """
import os, resource, threading, traceback
from mpiddp.hosts import processes
from mpiddp.runtime.launcher.stacks import look

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = []
try:
    while True:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
thread = threading.Thread(target=lambda: print(look()))
thread.start()
thread.join()
"""


def test_a_rank_without_a_file_left_tells_its_stacks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert 'File "<string>", line 14, in <module>' in done.stdout
    assert "'cpu_s': 0.0" in done.stdout
