"""The public names are loaded on first use, and the check of imports detects a heavy one.

Tests mpiddp/.
python -m pytest tests/integration/test_loaded_names.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ranks import clean_env

HEAVY = ("torch", "mpi4py", "numpy", "PIL")


def loaded(statement: str, *, path: Path | None = None) -> set[str]:
    """The HEAVY packages that `statement` loads in a new interpreter."""
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    env = clean_env({"PYTHONPATH": str(path)} if path else None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_public_names_are_loaded_on_first_use() -> None:
    assert loaded("import mpiddp\nassert {'World', 'init', 'mesh'} <= set(mpiddp.__all__)") == set()
    assert loaded("from mpiddp import UserError, World") == set()
    use_all = "import mpiddp\nfor name in mpiddp.__all__: getattr(mpiddp, name)"
    needed = loaded(use_all)
    assert "torch" in needed
    assert "mpi4py" not in needed  # only ranks that mpirun started need it
    with pytest.raises(AssertionError, match="module 'mpiddp' has no attribute 'nonsense'"):
        loaded("import mpiddp\nmpiddp.nonsense")


@pytest.mark.parametrize("heavy", ["torch", "mpi4py", "numpy"])
def test_a_heavy_import_is_detected(heavy: str, tmp_path: Path) -> None:
    """The tests above can fail: an indirect import of a heavy package is detected too."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package import deep\n")
    (package / "deep.py").write_text(f"import {heavy}\n")
    assert heavy in loaded("import package", path=tmp_path)
