"""The unit tests pass on a Python that has pytest alone, and without an mpirun.

python -m pytest tests/integration/suite/test_unit_tests_alone.py
"""

from __future__ import annotations

import subprocess
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

NEEDED = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


@pytest.mark.slow
def test_the_unit_tests_need_python_and_pytest_alone(tmp_path: Path) -> None:
    venv.create(tmp_path)
    [packages] = tmp_path.glob("lib/python*/site-packages")
    for name in NEEDED:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin)
        source = source.parent if source.name == "__init__.py" else source
        (packages / source.name).symlink_to(source)
    done = subprocess.run(
        [tmp_path / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit"],
        cwd=ROOT,
        env={**clean_env(), "PATH": f"{tmp_path}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
