"""The page of examples/pitfalls names each script.

python -m pytest tests/docs/test_pitfalls_page.py
"""

from __future__ import annotations

import pytest

from tests.support.ranks import ROOT

PITFALLS = ROOT / "examples/pitfalls"


@pytest.mark.parametrize("name", sorted(path.name for path in PITFALLS.glob("*.py")))
def test_the_page_names_each_script(name: str) -> None:
    assert f"]({name})" in (PITFALLS / "README.md").read_text()
