"""The public names are loaded on first use, and the check of imports detects a heavy one.

Tests mpiddp/.
python -m pytest tests/integration/test_loaded_names.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.imports import loaded


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
    """The tests of imports can fail: an indirect import of a heavy package is detected too."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package import deep\n")
    (package / "deep.py").write_text(f"import {heavy}\n")
    assert heavy in loaded("import package", path=tmp_path)
