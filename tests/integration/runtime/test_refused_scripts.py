"""Scripts that cannot be run are refused, and a missing module is the script's own error.

Tests mpiddp/runtime/start/run.py.
python -m pytest tests/integration/runtime/test_refused_scripts.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpiddp import errors
from mpiddp.errors import UserError, print_from_one_rank
from mpiddp.runtime.start import run as run_script


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["nosuch.py"], "nosuch.py not found (looked in {cwd})."),
        (["."], ". is a folder, not a script. To run a module: mpiddp run -m MODULE"),
        (
            ["/dev/null"],
            "/dev/null is no regular file, and each rank reads its script from the disk.",
        ),
        (
            ["-m", "no.such"],
            "module no.such not found (looked in {cwd} and in the installed packages).",
        ),
        (
            ["-m", "tests"],
            "module tests not found (looked in {cwd} and in the installed packages).",
        ),
        (["-m", "math"], "module math not found (looked in {cwd} and in the installed packages)."),
    ],
)
def test_a_script_that_cannot_be_run_is_refused(
    args: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    load = run_script._load_module if args[0] == "-m" else run_script._load_file
    with pytest.raises(UserError, match=re.escape(sentence.format(cwd=Path.cwd()))):
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
