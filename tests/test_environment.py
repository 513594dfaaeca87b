"""Every MPIDDP_* variable is a row of one table, which docs/environment.md contains.

python -m mpiddp.protocol.variables
"""

from __future__ import annotations

import re

from mpiddp.protocol import variables
from mpiddp.protocol.variables import VARIABLES, variables_table
from tests.ranks import ROOT

IN_TABLE = {variable.name for variable in VARIABLES}


def test_every_variable_in_use_is_a_row_and_every_row_is_in_use() -> None:
    constants = {value: name for name, value in vars(variables).items() if isinstance(value, str)}
    files = [ROOT / "run.sh", *sorted((ROOT / "mpiddp").rglob("*.py"))]
    texts = {path: path.read_text() for path in files}
    named = set(re.findall(r"\bMPIDDP_[A-Z_]*[A-Z]", "".join(texts.values())))
    assert named == IN_TABLE
    others = "".join(text for path, text in texts.items() if path.name != "variables.py")
    for name in IN_TABLE:
        assert re.search(rf"\b({name}|{constants.get(name, name)})\b", others), name


def test_the_table_has_no_duplicates() -> None:
    assert len(IN_TABLE) == len(VARIABLES)


def test_docs_environment_md_contains_the_table() -> None:
    page = ROOT / "docs" / "environment.md"
    assert variables_table() in page.read_text(), f"{page}: see python -m mpiddp.protocol.variables"


def test_other_pages_name_only_variables_of_the_table() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        named = set(re.findall(r"\bMPIDDP_(?!TEST_)[A-Z_]*[A-Z]", page.read_text()))
        assert named <= IN_TABLE, page
