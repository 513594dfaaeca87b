"""Scripts that cannot be run are refused, and a missing module is the script's own error.

Tests mpiddp/runtime/start/run.py.
python -m pytest tests/integration/runtime/test_refused_scripts.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpiddp import errors
from mpiddp.errors import UserError, print_from_one_rank
from mpiddp.runtime.start import run as run_script
from tests.support.errors import error


@pytest.mark.parametrize(
    ("args", "id", "values"),
    [
        (["nosuch.py"], "not found", ["nosuch.py ", "{cwd})"]),
        (["."], "folder, not", [". ", "mpiddp run -m MODULE"]),
        (["/dev/null"], "no regular", ["/dev/null "]),
        (["-m", "no.such"], "the installed", ["module no.such ", "{cwd} "]),
        (["-m", "tests"], "the installed", ["module tests ", "{cwd} "]),
        (["-m", "math"], "the installed", ["module math ", "{cwd} "]),
    ],
)
def test_a_script_that_cannot_be_run_is_refused(
    args: list[str], id: str, values: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    load = run_script._load_module if args[0] == "-m" else run_script._load_file
    shown = [value.format(cwd=Path.cwd()) for value in values]
    with pytest.raises(UserError, match=error(id, *shown)):
        load(args[-1])


def test_a_missing_module_that_the_package_imports_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "foo_bar"
    package.mkdir()
    (package / "__init__.py").write_text("import foo\n")
    (package / "main.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ModuleNotFoundError, match="No module named 'foo'"):
        run_script._load_module("foo_bar.main")


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
