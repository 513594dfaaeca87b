"""The probe is sent to other hosts as source, and needs only Python's standard library there."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest

from mpiddp.hosts import probe
from mpiddp.launch import preflight
from mpiddp.launch.preflight import TRAVELLING, Needs, probe_program
from tests.support.patience import PATIENCE_S


def requirements(folder: Path) -> Needs:
    return Needs(
        python=sys.executable,
        mpirun="/nowhere/mpirun",
        daemon="/bin/sh",
        folder=str(folder),
        path="",
    )


def run_bare(program: str, folder: Path) -> CompletedProcess[str]:
    """Run a program without site-packages, user folders and environment, in another folder."""
    command = [sys.executable, "-I", "-S"]
    return subprocess.run(
        command, input=program, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_the_probe_needs_only_the_standard_library(tmp_path: Path) -> None:
    done = run_bare(probe_program(requirements(tmp_path)), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    login, found = done.stdout.splitlines()
    assert login == "login"
    info = json.loads(found)
    assert {"name": "lo", "address": "127.0.0.1", "network": "127.0.0.0/8"} in info["interfaces"]
    assert (info["has_folder"], info["has_daemon"], info["mpirun"]) == (True, True, None)
    assert (info["torch"], info["mpi4py"]) == (None, None)  # they are in site-packages


@pytest.mark.parametrize("module", TRAVELLING[:-1], ids=lambda module: module.__name__)
def test_a_module_that_is_not_sent_is_missing(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: a module of mpiddp that the probe imports must be sent with it."""
    travelling = tuple(each for each in TRAVELLING if each is not module)
    monkeypatch.setattr(preflight, "TRAVELLING", travelling)
    done = run_bare(probe_program(requirements(tmp_path)), tmp_path)
    assert done.returncode == 1
    assert f"No module named '{module.__name__}'" in done.stderr
    assert "No module named 'mpiddp'" in run_bare("import mpiddp", tmp_path).stderr


@pytest.mark.parametrize("module", TRAVELLING, ids=lambda module: module.__name__)
def test_modules_that_are_sent_import_only_the_standard_library(module: ModuleType) -> None:
    """Within functions too, which a test may not reach. The probe also imports the modules sent with it."""
    allowed = {each.__name__ for each in TRAVELLING[:-1]} if module is probe else set()
    foreign = {
        name for name in imports(module) if name.split(".")[0] not in sys.stdlib_module_names
    }
    assert foreign == allowed


def imports(module: ModuleType) -> set[str]:
    """All modules that a module's source imports; a relative one has its leading dots."""
    assert module.__file__ is not None
    names: set[str] = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/bin:/usr/bin", "/bin:/usr/bin:/opt/mpi"), ("/opt/mpi:/bin", "/opt/mpi:/bin"),
     (None, f"{os.defpath}:/opt/mpi")],
)  # fmt: skip
def test_the_folder_of_mpirun_is_on_its_path(path: str | None, expected: str) -> None:
    env = {"A": "1"} if path is None else {"A": "1", "PATH": path}
    found = probe.with_own_folder(Path("/opt/mpi/mpirun"), env)
    assert found == {"A": "1", "PATH": expected}
