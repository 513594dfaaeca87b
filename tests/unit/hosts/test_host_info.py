"""What a host reports of itself to the launcher's preflight.

Tests mpiddp/hosts/{probe,versions}.py.
python -m pytest tests/unit/hosts/test_host_info.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpiddp.hosts.interfaces import interfaces
from mpiddp.hosts.probe import host_info


def program(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_what_a_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("torch", "2.99"), ("mpi4py", "4.99")):
        metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tools = tmp_path / "tools"
    program(tools / "nvidia-smi", "echo 'GPU 0: X (UUID: GPU-1)'; echo 'GPU 1: X (UUID: GPU-2)'")
    program(tools / "job", "")
    needs = {
        "mpirun": program(tmp_path / "mpi" / "mpirun", "echo mpirun 5.0; echo more"),
        "daemon": program(tmp_path / "mpi" / "prted", ""),
        "folder": str(tmp_path),
        "path": str(tools),
        "program": "job",
    }
    found = host_info(needs)
    assert {name: value for name, value in found.items() if name != "interfaces"} == {
        "has_folder": True,
        "has_program": True,
        "has_daemon": True,
        "mpirun": "mpirun 5.0",
        "torch": "2.99",
        "mpi4py": "4.99",
        "gpus": 2,
    }
    assert len(found["interfaces"]) == len(interfaces())
    assert json.loads(json.dumps(found)) == found

    program(tools / "nvidia-smi", "exec sleep 0")
    lacks = {
        "mpirun": str(tmp_path / "no" / "mpirun"),
        "daemon": str(tmp_path / "no" / "prted"),
        "folder": str(tmp_path / "no"),
        "path": str(tools),
    }
    for name, expected in (("tools/job", False), ("gone", False), (None, True)):
        found = host_info({**lacks, "program": name})
        assert found["has_program"] is expected, name
    names = ("has_folder", "has_daemon", "mpirun", "gpus")
    assert [found[name] for name in names] == [False, False, None, 0]
    assert host_info({**needs, "program": "tools/job"})["has_program"] is True
