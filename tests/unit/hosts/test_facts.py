"""What a host says of itself. Its program is sent as source, and needs only Python's standard library there.

Tests mpiddp/hosts/facts.py, and what travels with it.
python -m pytest tests/unit/hosts/test_facts.py
"""

import ast
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from mpiddp.doctor import job
from mpiddp.hosts import facts, files, gpu_health, gpus, interfaces, network, processes
from mpiddp.hosts.facts import host_info, links
from mpiddp.hosts.gpu_health import Health
from mpiddp.hosts.remote import CHECK_PYTHON, program_that_prints
from mpiddp.launch.preflight import TRAVELLING, Needs
from tests.support.machine import TWO_GPUS
from tests.support.patience import PATIENCE_S

SENT = (interfaces, gpus, gpu_health, files, facts, network, job, processes)


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
    needs = Needs(sys.executable, "/nowhere/mpirun", "/bin/sh", str(tmp_path), path="")
    program = program_that_prints(TRAVELLING, f"host_info({asdict(needs)!a})")
    done = run_bare(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    info = json.loads(done.stdout)
    assert {"name": "lo", "address": "127.0.0.1", "network": "127.0.0.0/8"} in info["interfaces"]
    assert (info["has_folder"], info["has_daemon"], info["mpirun"]) == (True, True, None)
    assert (info["torch"], info["mpi4py"]) == (None, None)  # they are in site-packages
    assert "No module named 'mpiddp'" in run_bare("import mpiddp", tmp_path).stderr


def test_a_python_that_is_too_old_says_so(tmp_path):
    program = f"import sys; sys.version_info = (3, 6, 9)\n{CHECK_PYTHON}\nprint('more')"
    done = run_bare(program, tmp_path)
    sentence = "it is Python 3.6, and 3.8 or newer is needed\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)


@pytest.mark.parametrize("module", SENT, ids=lambda module: module.__name__)
def test_what_is_sent_runs_on_python_3_8(module):
    """It imports the standard library and what travels with it, and evaluates no generic of Python 3.9."""
    assert module.__file__ is not None
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


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_what_a_host_has(tmp_path, monkeypatch):
    for name, version in (("torch", "2.99"), ("mpi4py", "4.99")):
        metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tools = tmp_path / "tools"
    program(tools / "nvidia-smi", TWO_GPUS)
    program(tools / "job", "")
    needs = {
        "mpirun": program(tmp_path / "mpi" / "mpirun", "echo mpirun 5.0; echo more"),
        "daemon": program(tmp_path / "mpi" / "prted", ""),
        "folder": str(tmp_path),
        "path": str(tools),
        "program": "job",
        "script": "here.py",
    }
    (tmp_path / "here.py").touch()
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50001 10.0.0.2 22")
    found = host_info(needs)
    assert {name: value for name, value in found.items() if name != "interfaces"} == {
        "machine": facts.machine(),
        "has_folder": True,
        "has_program": True,
        "has_script": True,
        "has_daemon": True,
        "mpirun": "mpirun 5.0",
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "torch": "2.99",
        "mpi4py": "4.99",
        "health": found["health"],
        "address": "10.0.0.2",
    }
    assert len(found["health"].gpus) == 2
    assert Health.of_json(json.loads(json.dumps(found["health"]))) == found["health"]

    program(tools / "nvidia-smi", "exec sleep 0")
    gone = str(tmp_path / "no")
    lacks = {"mpirun": f"{gone}/mpirun", "daemon": f"{gone}/prted", "folder": gone}
    for name, expected in (("tools/job", False), ("gone", False), (None, True)):
        found = host_info({**lacks, "path": str(tools), "program": name})
        assert found["has_program"] is expected, name
    names = ("has_folder", "has_daemon", "mpirun", "health")
    assert [found[name] for name in names] == [False, False, None, Health([])]
    assert host_info({**needs, "program": "tools/job"})["has_program"] is True
    assert host_info({**needs, "script": "gone.py"})["has_script"] is False


def test_why_a_folder_cannot_be_used(tmp_path):
    gone = str(tmp_path / "no" / "run")
    assert facts._folder(gone, "data")["error"] == "No such file or directory"
    found = facts._folder(gone, "run")
    assert (found["path"], found["error"]) == (str(tmp_path), "")
    assert found["free"] > 0


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/bin:/usr/bin", "/bin:/usr/bin:/opt/mpi"), ("/opt/mpi:/bin", "/opt/mpi:/bin"),
     (None, f"{os.defpath}:/opt/mpi")],
)  # fmt: skip
def test_the_folder_of_mpirun_is_on_its_path(path, expected):
    env = {"A": "1"} if path is None else {"A": "1", "PATH": path}
    found = facts.with_own_folder(Path("/opt/mpi/mpirun"), env)
    assert found == {"A": "1", "PATH": expected}


def test_the_links_of_a_host(tmp_path):
    for name, value in (("speed", "25000"), ("mtu", "9000")):
        (tmp_path / "lo").mkdir(exist_ok=True)
        (tmp_path / "lo" / name).write_text(f"{value}\n")
    (found,) = (each for each in links(str(tmp_path)) if each["name"] == "lo")
    assert (found["address"], found["speed"], found["mtu"]) == ("127.0.0.1", "25 Gbit/s", "9000")
    (tmp_path / "lo/speed").write_text("-1\n")
    assert links(str(tmp_path))[0]["speed"] == ""
