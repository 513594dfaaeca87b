"""The versions that mpiddp claims: docs/evidence/dependencies.md has them, and the checks that ran with each.

Tests benchmarks/smoke.py, setup.py.
python -m pytest tests/docs/test_versions.py
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.smoke import SHOWN, checks_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

COLUMNS = ["Python", "versions", *SHOWN, "result"]


def documented() -> list[dict[str, str]]:
    """The rows of the table in docs/evidence/dependencies.md."""
    page = (ROOT / "docs/evidence/dependencies.md").read_text()
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


def test_the_checks_pass_with_the_versions_that_are_installed_here() -> None:
    command = [sys.executable, "benchmarks/smoke.py", "pinned", "openmpi"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout
    (row,) = done.stdout.splitlines()
    cells = dict(zip(COLUMNS, row.strip("| ").split(" | "), strict=True))
    assert (cells["Python"], cells["versions"]) == (platform.python_version(), "pinned")
    assert cells["torch"].startswith("2.")
    assert cells["result"] == "passed 4 checks"


def test_a_check_that_fails_is_named_in_the_row(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(
        sys.executable
    )  # an environment without the package's programs
    command = [str(tmp_path / "python"), "benchmarks/smoke.py", "newest", "train"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert done.stdout.endswith(
        "| failed: version: mpiddp --version: No such file or directory |\n"
    )


def test_every_kind_has_checks_for_its_extras() -> None:
    launcher = {"version", "hosts check", "dry run", "verify"}
    assert set(checks_of(["openmpi"])) == launcher
    assert set(checks_of(["train", "openmpi", "spawn"])) - launcher == {
        *("launch", "command", "raw mpirun", "train", "images", "spawn"),
    }
    assert checks_of(["train", "bench", "test"]).keys() >= {"bench", "test"}
