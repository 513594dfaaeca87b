"""A process has one session, which a forked child does not share, and a script begins after few modules.

Tests mpiddp/runtime/job/session.py, mpiddp/runtime/script.py.
python -m pytest tests/ranks/runtime/test_session.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mpiddp.hosts.gpus import VISIBLE  # a rank with a choice of GPUs imports more
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, script

# The modules of mpiddp, without packages, before a script's first line.
COUNT = """
import sys
ours = {name for name, each in sys.modules.items() if name.startswith("mpiddp.")}
print(*sorted(name for name in ours if not hasattr(sys.modules[name], "__path__")))
"""


def modules(*command: str) -> list[str]:
    env = {name: value for name, value in clean_env().items() if name not in VISIBLE}
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0].split()  # of one rank


def test_a_script_alone_begins_after_few_modules(tmp_path: Path) -> None:
    found = modules(sys.executable, "-m", "mpiddp", "run", script(tmp_path, COUNT))
    assert len(found) <= 15, found


def test_a_script_under_the_launcher_begins_after_few_modules(tmp_path: Path) -> None:
    found = modules(*LAUNCH, "-H", "localhost:2", "--prefix", "never", script(tmp_path, COUNT))
    assert len(found) <= 15, found
    assert not [name for name in found if name.startswith("mpiddp.runtime.torch")]
