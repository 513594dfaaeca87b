"""`mpiddp checkpoints list|verify|prune` on the folder of a run.

Tests mpiddp/checkpoints/main.py.
python -m pytest tests/unit/checkpoints/test_checkpoints_main.py
"""

from pathlib import Path

import pytest

from mpiddp.cli import main
from tests.support import checkpoint_folders


def write_files(folder: Path) -> None:
    (folder / "model.pt").write_bytes(bytes(1_500_000))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of the steps 100, 200 and 300."""
    for step in (100, 200, 300):
        checkpoint_folders.write(tmp_path / "checkpoints", step, write_files)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def damage(run: Path, step: int, *, truncated: bool = False) -> None:
    file = run / "checkpoints" / f"step_{step:08d}" / "model.pt"
    file.write_bytes(b"cut" if truncated else bytes(1_499_999) + b"\1")


Captured = pytest.CaptureFixture[str]


def call(capsys: Captured, *arguments: str) -> tuple[int, list[str], list[str]]:
    """Exit code, and the lines on stdout and stderr."""
    code = main(["checkpoints", *arguments])
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err.splitlines()


def test_dir_may_be_one_checkpoint(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(run, 200)
    one, two = (run / "checkpoints" / f"step_00000{step}" for step in (100, 200))
    assert call(capsys, "verify", str(one))[0] == 0
    assert call(capsys, "verify", str(two))[0] == 1
    assert [line.split()[0] for line in call(capsys, "list", str(one))[1]] == [one.name]
    monkeypatch.chdir(one)
    assert call(capsys, "verify", ".") == (0, ["checkpoint step_00000100: verified"], [])
    (two / "COMPLETE").unlink()
    (two / "manifest.json").unlink()
    assert call(capsys, "verify", str(two))[2] == [
        "checkpoint step_00000200: the save was never completed."
    ]
    copied = one.rename(run / "backup")  # under another name
    assert call(capsys, "verify", str(copied)) == (0, ["checkpoint backup: verified"], [])
