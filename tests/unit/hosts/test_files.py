"""Which files belong to a program, and what a host says of itself by a program that is sent as source."""

import ast
import json
import sys
from pathlib import Path

import pytest

from mpiddp import files
from mpiddp.doctor import there
from mpiddp.hosts import (
    facts,
    gpu_health,
    gpus,
    interfaces,
    processes,
    program_files,
    pushed,
    reachability,
)
from mpiddp.hosts.program_files import files_of, import_folders
from mpiddp.hosts.ssh import CHECK_PYTHON, program_that_prints
from mpiddp.launch.plan.preflight import TRAVELLING
from tests.support.ranks import run_command, script

TRAIN = """\
import os, random, helper, wandb, models as zoo
import mpiddp, numpy
if True:
    from pkg.sub import x
try: import optional
except ImportError: pass
from src.nets import (
    deep,  # a module
    blocks,
)
from src import \\
    wide
"""
FILES = {
    "train.py": TRAIN,
    "helper.py": "import deeper\n",
    "deeper.py": "import train\n",
    "optional.py": "",
    "stranger.py": "",
    "mpiddp.py": "",  # it has a version of its own
    "pkg/__init__.py": "from .nets import net\n",
    "pkg/sub.py": "",
    "pkg/nets/net.py": "",
    "pkg/unused/__init__.py": "",  # a package counts as a whole
    "wandb/run-1/code/old.py": "",  # wandb itself is installed
    "models/net.py": "",  # packages without an __init__.py
    "src/nets/deep.py": "from . import flat\nfrom .. import above\nfrom ..far.off import y\n",
    "src/nets/flat.py": "",
    "src/above.py": "",
    "src/far/off.py": "",
    "src/nets/blocks/__init__.py": "",
    "src/nets/blocks/block.py": "",
    "src/wide/__init__.py": "",
}
NOT_IMPORTED = {"stranger.py", "mpiddp.py", "wandb/run-1/code/old.py"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(*where: str | list[str]) -> list[str]:
    return [name for name, _ in files_of(*where)]


def test_the_files_of_a_script_are_those_that_it_imports(folder):
    """A module beside the script counts as the script does; others in its folder do not."""
    found = names("script", "train.py", str(folder))
    assert sorted(found) == sorted(FILES.keys() - NOT_IMPORTED)
    assert found[0] == "train.py"
    before = dict(files_of("script", "train.py", str(folder)))
    (folder / "helper.py").write_text("import deeper  # changed\n")
    after = dict(files_of("script", "train.py", str(folder)))
    assert {name for name in before if before[name] != after[name]} == {"helper.py"}


def test_the_files_of_a_module(folder):
    """python -m PACKAGE.MODULE, with an __init__.py or without one, and what an installed module imports."""
    package = {"pkg/__init__.py", "pkg/sub.py", "pkg/nets/net.py", "pkg/unused/__init__.py"}
    assert {*names("module", "pkg.sub", str(folder))} == package
    src = {"src/above.py", "src/far/off.py", "src/nets/deep.py", "src/nets/flat.py"}
    assert {*names("module", "src.nets.deep", str(folder))} == src
    assert "pkg/sub.py" in names("module", "train", str(folder))
    assert names("module", "json.tool", str(folder)) == []
    assert names("command", "train.py", str(folder)) == []


def test_a_link_leads_to_the_folder_whose_modules_are_imported(folder):
    (folder / "bin").mkdir()
    (folder / "bin/run").symlink_to("../helper.py")
    assert names("script", "bin/run", str(folder))[:2] == ["helper.py", "deeper.py"]


def test_modules_of_other_folders_count_and_installed_ones_do_not(folder, monkeypatch):
    """PYTHONPATH, and what an editable install adds to sys.path. The first folder with a module counts."""
    other, editable = folder / "lib", folder / "project"
    for each in (other, editable):
        each.mkdir()
        (each / "helper.py").touch()
    (other / "mylib.py").touch()
    (editable / "edited.py").touch()
    (folder / "main.py").write_text("import helper, mylib, edited, json, torch, pytest\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path[1:], str(editable)])
    found = names("script", "main.py", str(folder), import_folders())
    assert {*found} == {
        *("main.py", "helper.py", "deeper.py", "train.py", "lib/mylib.py", "project/edited.py"),
        *names("script", "train.py", str(folder)),
    }


def test_a_file_that_cannot_be_read_has_no_digest(tmp_path):
    assert files_of("script", "gone.py", str(tmp_path)) == [("gone.py", "")]


SENT = (
    files,
    pushed,
    interfaces,
    gpus,
    gpu_health,
    program_files,
    facts,
    reachability,
    there,
    processes,
)


def run_bare(program, folder):
    """Run a program without site-packages, user folders and environment, in another folder."""
    return run_command([sys.executable, "-I", "-S", script(folder, program)], folder)


def test_the_program_needs_only_the_standard_library(tmp_path):
    packages = tmp_path / "of PYTHONPATH/mpi4py-4.0.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text("Name: mpi4py\nVersion: 4.0\n")
    needs = {
        "mpirun": "/nowhere/mpirun",
        "daemon": "/bin/sh",
        "program": "",
        "script": "",
        "image": (),
    }
    needs |= {"folder": str(tmp_path), "path": "", "packages": [packages.parent.name]}
    program = program_that_prints(TRAVELLING, f"host_info({needs!a})")
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
