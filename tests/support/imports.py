"""What an import loads, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env

HEAVY = ("torch", "mpi4py", "numpy", "PIL", "bokeh")


def loaded(statement: str, *, path: Path | None = None) -> set[str]:
    """The HEAVY packages that `statement` loads in a new interpreter."""
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    env = clean_env({"PYTHONPATH": str(path)} if path else None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
