"""What `mpiddp report` shows of where runs ran, and what differs between them.

Tests mpiddp/report/environment.py.
python -m pytest tests/unit/report/test_environment_of_runs.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mpiddp.report.environment import environment
from mpiddp.report.read import read_run
from tests.support.run_folders import write_run


def run_with(folder: Path, number: int = 1, **facts: Any) -> Path:
    """A run with the record of a start, as mpiddp/train/run_record.py writes it."""
    if not folder.exists():
        write_run(folder, steps=10)
    record = {
        "command": "python -m mpiddp train",
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "numpy": "2.0"},
        "environment": {"OMP_NUM_THREADS": "1", "MPIDDP_RUN_ID": folder.name},
        "git": {"commit": "1f3a", "diff": "", "diff_is_cut": False},
    }
    (folder / "starts").mkdir(exist_ok=True)
    file = folder / "starts" / f"start_{number:04}.json"
    file.write_text(json.dumps({**record, **facts}))
    return folder


def shown(*folders: Path) -> list[str]:
    """The texts of the page's part, without markup."""
    part = environment([read_run(folder) for folder in folders])
    return [each for each in re.split(r"<[^>]*>", part) if each]


def test_the_environment_of_the_newest_start_is_shown(tmp_path: Path) -> None:
    run_with(tmp_path / "a", python="3.10.0")
    diff = "-lr = <1>\n+lr = 2"
    texts = shown(run_with(tmp_path / "a", number=2, git={"commit": "9c2e", "diff": diff}))
    assert texts[:8] == [
        *("command", "python -m mpiddp train", "Python", "3.11.7"),
        *("git commit", "9c2e", "changed since", "yes"),
    ]
    assert "-lr = &lt;1&gt;\n+lr = 2" in texts
    assert {"2 packages", "package torch", "2 variables", "variable OMP_NUM_THREADS"} <= {*texts}


def test_of_several_runs_what_differs_is_shown(tmp_path: Path) -> None:
    a = run_with(tmp_path / "a")
    b = run_with(tmp_path / "b", packages={"torch": "2.12.1", "numpy": "2.0"}, git=None)
    assert shown(a, b) == [
        *("A", "B"),
        *("git commit", "1f3a", "-", "changed since", "no", "-"),
        *("package torch", "2.13.0", "2.12.1"),
    ]
    assert shown(a, run_with(tmp_path / "c")) == ["Nothing differs."]


def test_a_record_of_another_program_or_a_torn_one_is_shown_as_far_as_it_goes(
    tmp_path: Path,
) -> None:
    strange = run_with(tmp_path / "a", packages=["torch"], environment=3, git="main", python=[3])
    assert shown(strange) == ["command", "python -m mpiddp train", "Python", "[3]"]
    torn = run_with(tmp_path / "b")
    (torn / "starts" / "start_0001.json").write_text('{"command": "py')
    assert shown(torn) == []
    assert any("start_0001.json is not JSON" in note for note in read_run(torn).notes)
    assert shown(write_run(tmp_path / "c", steps=10)) == []
