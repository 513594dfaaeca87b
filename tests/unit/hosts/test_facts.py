"""What a host says of itself. Its program is sent as source, and needs only Python's standard library there.

Tests mpiddp/hosts/facts.py, and what travels with it.
"""

import ast
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from mpiddp.doctor import there
from mpiddp.hosts import facts, files, gpu_health, gpus, interfaces, network, processes
from mpiddp.hosts.ssh import CHECK_PYTHON, program_that_prints
from mpiddp.launch.preflight import TRAVELLING, Needs
from tests.support.patience import PATIENCE_S

SENT = (interfaces, gpus, gpu_health, files, facts, network, there, processes)


def run_bare(program, folder):
    """Run a program without site-packages, user folders and environment, in another folder."""
    return subprocess.run(
        [sys.executable, "-I", "-S"],
        input=program,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_the_program_needs_only_the_standard_library(tmp_path):
    packages = tmp_path / "of PYTHONPATH/mpi4py-4.0.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text("Name: mpi4py\nVersion: 4.0\n")
    of_ranks = {"path": "", "packages": [packages.parent.name]}
    needs = Needs(sys.executable, "/nowhere/mpirun", "/bin/sh", str(tmp_path), **of_ranks)
    program = program_that_prints(TRAVELLING, f"host_info({asdict(needs)!a})")
    done = run_bare(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    info = json.loads(done.stdout)
    assert {"name": "lo", "address": "127.0.0.1", "network": "127.0.0.0/8"} in info["interfaces"]
    assert (info["has_folder"], info["has_daemon"], info["mpirun"]) == (True, True, None)
    assert (info["torch"], info["mpi4py"]) == (None, "4.0")  # torch is in site-packages
    assert "No module named 'mpiddp'" in run_bare("import mpiddp", tmp_path).stderr


def test_a_python_that_is_too_old_says_so(tmp_path):
    program = f"import sys; sys.version_info = (3, 6, 9)\n{CHECK_PYTHON}\nprint('more')"
    done = run_bare(program, tmp_path)
    sentence = "it is Python 3.6, and 3.8 or newer is needed\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)


@pytest.mark.parametrize("module", SENT, ids=lambda module: module.__name__)
def test_what_is_sent_runs_on_python_3_8(module):
    """It imports the standard library and what travels with it, and evaluates no generic of Python 3.9."""
    parsed = ast.parse(Path(module.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))
    nodes = list(evaluated(parsed))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert "annotations" in {alias.name for node in imports for alias in node.names}
    generics = {"list", "dict", "set", "frozenset", "tuple", "type"}
    for node in imports:
        if node.module in ("collections", "collections.abc"):
            generics |= {alias.name for alias in node.names}
    subscripted = [node.value for node in nodes if isinstance(node, ast.Subscript)]
    names = {each.id for each in subscripted if isinstance(each, ast.Name)}
    assert names & generics == set()
    if module in TRAVELLING:
        roots = {str(node.module).partition(".")[0] for node in imports}
        assert roots <= {*sys.stdlib_module_names, "mpiddp"}


def evaluated(node):
    """A node and all below it, without annotations: `from __future__ import annotations` keeps them text."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from evaluated(child)
