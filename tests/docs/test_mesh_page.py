"""docs/parallelism.md shows what mpiddp mesh prints.

Tests mpiddp/meshes/.
python -m pytest tests/docs/test_mesh_page.py
"""

from __future__ import annotations

import pytest

from mpiddp.meshes import main
from tests.support.ranks import ROOT


def run(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main.main(line.split()) == 0
    return capsys.readouterr().out


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    block = (
        (ROOT / "docs/parallelism.md")
        .read_text()
        .partition("$ mpiddp mesh ")[2]
        .partition("\n```")[0]
    )
    command, _, rest = block.partition("\n    ")
    options, _, output = rest.partition("\n")
    assert run(capsys, command.removesuffix(" \\") + " " + options) == f"{output}\n"
