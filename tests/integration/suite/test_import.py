"""What an import loads, in a fresh interpreter. import-linter holds what the launcher may import.

python -m pytest tests/integration/suite/test_import.py
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.ranks import clean_env

HEAVY = ("torch", "mpi4py", "numpy", "PIL", "bokeh")
EVERY_NAME = "import mpiddp\nfor name in mpiddp.__all__: getattr(mpiddp, name)"


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("from mpiddp import UserError, World", set()),
        ("import mpiddp.cli, mpiddp.launch.main, mpiddp.hosts.main", set()),
        ("import mpiddp.train.main, mpiddp.checkpoints.main, mpiddp.report.main", set()),
        ("import mpiddp.runtime.agent, mpiddp.spawning.spawn", set()),
        (EVERY_NAME, {"torch", "numpy"}),  # only ranks that mpirun started need mpi4py
    ],
)
def test_what_an_import_loads(statement: str, heavy: set[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == heavy
