"""The pictures of terminals.

Tests docs/terminal.py.
python -m pytest tests/docs/test_terminal.py
"""

from __future__ import annotations

from xml.etree import ElementTree

from docs.terminal import drawn
from tests.support.ranks import ROOT

PICTURE = ROOT / "docs/pictures/launch.svg"


def lines_of(picture: str) -> list[str]:
    texts = ElementTree.fromstring(picture).findall("{http://www.w3.org/2000/svg}text")
    return [text.text or "" for text in texts]


def test_a_picture_has_the_lines_as_text() -> None:
    lines = ["$ grep '<a>' b & c", "", "mpiddp: node2: no answer"]
    assert lines_of(drawn(lines)) == lines


def test_the_picture_of_the_readme_is_drawn_from_its_lines() -> None:
    picture = PICTURE.read_text()
    assert drawn(lines_of(picture)) == picture
    assert lines_of(picture)[0].startswith("$ mpiddp launch -H ")
