"""The imports of the package, in a fresh interpreter: the launcher needs neither torch nor MPI.

Tests mpiddp/.
python -m pytest tests/integration/suite/test_import.py
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.imports import loaded
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

PACKAGE = ROOT / "mpiddp"
# The launcher's modules. import-linter checks that they import no other module of mpiddp.
LAUNCHER = sorted(
    path
    for part in (
        "launch/**/*.py",
        "hosts/**/*.py",
        "meshes/**/*.py",
        "doctor/**/*.py",
        "watch/**/*.py",
        "checks/**/*.py",
        "*.py",
    )
    for path in PACKAGE.glob(part)
    if path.name not in ("__init__.py", "__main__.py", "cli.py", "job.py", "stack.py")
)
LIGHT_MODULES = (
    "mpiddp",
    "mpiddp.runtime.reports",
    "mpiddp.runtime.rendezvous.result",
    "mpiddp.checkpoints.main",
    "mpiddp.cli",
    "mpiddp.runtime.job.coordinator",
    "mpiddp.hosts.hostfile",
    "mpiddp.launch.main",
    "mpiddp.meshes.main",
    "mpiddp.doctor.main",
    "mpiddp.watch.top",
    "mpiddp.report.main",
    "mpiddp.report.runs",
    "mpiddp.checks.main",
    "mpiddp.runtime.rendezvous.mpi",
    "mpiddp.runtime.agent",
    "mpiddp.runtime.function",
    "mpiddp.runtime.rendezvous.address",
    "mpiddp.spawning.spawn",
    "mpiddp.train.main",
    "mpiddp.world",
)


def test_light_modules_import_nothing_heavy() -> None:
    assert loaded("import " + ", ".join(LIGHT_MODULES)) == set()


def imported(source: str) -> set[str]:
    """The top-level packages that a file imports, within functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("path", LAUNCHER, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_launcher_imports_only_the_standard_library(path: Path) -> None:
    assert imported(path.read_text()) <= {"mpiddp", *sys.stdlib_module_names}


def test_the_launcher_needs_no_installed_packages() -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in LAUNCHER]
    command = [sys.executable, "-S", "-c", f"import {', '.join(names)}"]
    done = subprocess.run(
        command, env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
