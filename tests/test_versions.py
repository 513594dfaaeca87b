"""The versions that mpiddp claims: docs/dependencies.md has them, and what cannot be installed is a row.

Tests benchmarks/versions, setup.py.
python -m pytest tests/test_versions.py
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from benchmarks.versions import environments, results
from benchmarks.versions.environments import KINDS, Environment, NotBuilt
from benchmarks.versions.results import SHOWN, Result
from benchmarks.versions.smoke import checks_of
from tests.ranks import ROOT
from tests.test_command import running

COLUMNS = ["Python", "versions", *SHOWN, "result"]


def documented() -> list[dict[str, str]]:
    """The rows of the table in docs/dependencies.md."""
    page = (ROOT / "docs/dependencies.md").read_text()
    table = page[page.index(f"| {' | '.join(COLUMNS)} |") :].split("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [dict(zip(COLUMNS, row, strict=True)) for row in cells]


def test_every_python_that_setup_py_claims_has_passed() -> None:
    """With the launcher alone; the oldest and the newest of them with torch, too."""
    found = re.search(r"for minor in \(([\d, ]+)\)", (ROOT / "setup.py").read_text())
    assert found is not None
    claimed = [f"3.{minor}" for minor in found[1].split(", ")]
    passed = [row for row in documented() if row["result"].startswith("passed ")]
    pythons: dict[bool, set[str]] = {True: set(), False: set()}
    for row in passed:
        pythons[row["torch"] != "-"].add(".".join(row["Python"].split(".")[:2]))
    assert pythons[False] >= set(claimed)
    assert pythons[True] >= {claimed[0], claimed[-1]}


def test_the_oldest_versions_that_setup_py_claims_have_passed() -> None:
    text = (ROOT / "setup.py").read_text()
    lowest = re.findall(r'"(\w+)>=([\d.]+)"', text)
    assert {package for package, _ in lowest} >= {"torch", "numpy", "pillow", "cloudpickle"}
    rows = [row for row in documented() if row["versions"] == "oldest"]
    columns = {package: column for column, package in SHOWN.items()}
    for package, version in lowest:
        if column := columns.get(package):
            found = [row for row in rows if f"{row[column]}.".startswith(f"{version}.")]
            assert any(row["result"].startswith("passed ") for row in found), (package, version)


def test_the_table_has_what_failed_and_what_was_not_built(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert results.newest(file) == {}
    planned = Result("3.14", "newest", "not run yet")
    passed = Result("3.13", "oldest", "passed", "", "3.13.1", {"torch": "2.8.0"}, {"launch": 2.0})
    for result in (
        Result("3.13", "oldest", "failed", "launch: a first try"),
        Result("3.14", "oldest", "not built", "torch==2.8.0 | has no wheel"),
        passed,
    ):
        results.append(file, result)
    assert results.table([*results.newest(file).values(), planned]).splitlines() == [
        "| Python | versions | torch | numpy | mpi4py | pillow | cloudpickle | Open MPI | result |",
        "|---|---|---|---|---|---|---|---|---|",
        "| 3.13.1 | oldest | 2.8.0 | - | - | - | - | - | passed 1 check |",
        "| 3.14 | oldest | - | - | - | - | - | - | not built: torch==2.8.0 \\| has no wheel |",
        "| 3.14 | newest | - | - | - | - | - | - | not run yet |",
    ]
    assert json.loads(file.read_text().splitlines()[-1])["checks"] == {"launch": 2.0}


def test_what_cannot_be_installed_has_uvs_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(
        "#!/bin/sh\nprintf '  × No solution found:\\n  ╰─▶ Because torch has no wheel\\n' >&2; exit 1\n"
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    monkeypatch.setattr(environments, "FOLDER", tmp_path / "versions")
    with pytest.raises(NotBuilt, match=r"^No solution found: Because torch has no wheel$"):
        environments.make(Environment("3.13", KINDS[0]), tmp_path / "mpiddp.whl", 600)
    uv.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(NotBuilt, match=r"^uv venv --python did not end within 0 s$"):
        environments.make(Environment("3.13", KINDS[0]), tmp_path / "mpiddp.whl", 0.2)


def test_a_command_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    text = "setsid sleep 1015 & touch ready; exec sleep 1016"
    command = ["sh", "-c", text]
    timeout_s = 0.1
    while not (tmp_path / "ready").exists():
        timeout_s *= 2
        assert environments.run(command, env=os.environ, cwd=tmp_path, timeout_s=timeout_s) is None
        assert running("sleep 1015", "sleep 1016") == []


def test_every_kind_has_checks_for_its_extras() -> None:
    by_kind = {kind.name: checks_of(Environment("3.13", kind)) for kind in KINDS}
    assert set(by_kind["launcher"]) == {"version", "hosts check", "dry run", "verify"}
    assert set(by_kind["oldest"]) - set(by_kind["launcher"]) == {
        *("launch", "command", "raw mpirun", "train", "images", "spawn"),
    }
    assert by_kind["newest"].keys() >= {"bench", "test"}
