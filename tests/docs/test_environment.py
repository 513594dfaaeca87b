"""Every MPIDDP_* variable has a row in the table of docs/reference.md.

python -m pytest tests/docs/test_environment.py
"""

from __future__ import annotations

import re

from mpiddp.protocol import variables
from tests.support.ranks import ROOT

PAGE = (ROOT / "docs/reference.md").read_text()
ROWS = re.findall(r"^\| `(MPIDDP_[A-Z_]+)` \|(?: [^|]+ \|){3}$", PAGE, re.MULTILINE)


def test_every_variable_in_use_is_a_row_and_every_row_is_in_use() -> None:
    constants = {value: name for name, value in vars(variables).items() if isinstance(value, str)}
    files = [ROOT / "run.sh", *sorted((ROOT / "mpiddp").rglob("*.py"))]
    texts = {path: path.read_text() for path in files}
    named = set(re.findall(r"\bMPIDDP_[A-Z_]*[A-Z]", "".join(texts.values())))
    assert named == set(ROWS)
    others = "".join(text for path, text in texts.items() if path.name != "variables.py")
    for name in ROWS:
        assert re.search(rf"\b({name}|{constants.get(name, name)})\b", others), name


def test_every_row_is_complete_and_there_are_no_duplicates() -> None:
    assert len(ROWS) == len(set(ROWS)) == len(re.findall("^[|] `MPIDDP_", PAGE, re.MULTILINE))


def test_other_pages_name_only_variables_of_the_table() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        named = set(re.findall(r"\bMPIDDP_(?!TEST_)[A-Z_]*[A-Z]", page.read_text()))
        assert named <= set(ROWS), page
