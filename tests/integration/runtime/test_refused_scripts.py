"""The files of a script that all hosts need alike, and who prints a refusal first.

Tests mpiddp/runtime/child.py.
python -m pytest tests/integration/runtime/test_refused_scripts.py
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mpiddp import errors
from mpiddp.errors import print_from_one_rank
from mpiddp.runtime.child import Program


def test_the_files_of_a_script_are_those_that_it_imports(tmp_path: Path) -> None:
    """A module beside the script counts as the script does; others in its folder do not."""
    (tmp_path / "train.py").write_text("import os, helper\nif True:\n    from pkg.sub import x\n")
    (tmp_path / "helper.py").write_text("import deeper\n")
    (tmp_path / "deeper.py").write_text("import train\n")
    (tmp_path / "stranger.py").touch()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "sub.py").touch()
    found = dict(Program("script", str(tmp_path / "train.py")).files)
    assert sorted(found) == ["deeper.py", "helper.py", "pkg/__init__.py", "pkg/sub.py", "train.py"]
    before = found["helper.py"]
    (tmp_path / "helper.py").write_text("import deeper  # changed\n")
    assert dict(Program("script", str(tmp_path / "train.py")).files)["helper.py"] != before


def test_rank_0_prints_before_the_other_ranks_exit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rank that exits makes mpirun kill the others, so a silent rank must not be the first."""
    waits: list[float] = []
    monkeypatch.setattr(errors, "time", SimpleNamespace(sleep=waits.append))
    print_from_one_rank("one sentence", 0, 0)
    assert waits == []
    print_from_one_rank("the same from its neighbour", 1, 1)
    assert waits == [2.0]
    assert capsys.readouterr().err == "one sentence\n"
