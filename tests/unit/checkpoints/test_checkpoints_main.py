"""`mpiddp checkpoints list|verify|prune` on the folder of a run.

Tests mpiddp/checkpoints/main.py.
python -m pytest tests/unit/checkpoints/test_checkpoints_main.py
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from mpiddp.cli import main
from tests.support import checkpoint_folders
from tests.support.patience import PATIENCE_S


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


def names(run: Path) -> list[str]:
    return [folder.name for folder in directory.list_steps(run / "checkpoints")]


def test_list_prints_size_and_state(run: Path, capsys: Captured) -> None:
    damage(run, 200, truncated=True)
    for folder in (run, run / "checkpoints"):
        code, out, err = call(capsys, "list", str(folder))
        assert (code, err) == (0, [])
        rows = [re.split(r"  +", line) for line in out]
        assert [(row[0], row[1], row[3]) for row in rows] == [
            ("step_00000100", "1.5 MB", "intact"),
            ("step_00000200", "0.0 MB", "broken"),
            ("step_00000300", "1.5 MB", "intact"),
        ]
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", row[2]) for row in rows)


def test_verify_names_the_broken_checkpoint(run: Path, capsys: Captured) -> None:
    valid = [f"checkpoint step_00000{step}: verified" for step in (100, 200, 300)]
    assert call(capsys, "verify", str(run)) == (0, valid, [])
    damage(run, 200)
    assert call(capsys, "verify", str(run / "checkpoints")) == (
        1,
        [valid[0], valid[2]],
        ["checkpoint step_00000200: model.pt does not match its SHA-256."],
    )


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


def test_prune_keeps_the_newest(run: Path, capsys: Captured) -> None:
    assert call(capsys, "prune", str(run), "--keep", "3") == (0, [], [])
    assert call(capsys, "prune", str(run)) == (0, ["checkpoint step_00000100: removed"], [])
    assert names(run) == ["step_00000200", "step_00000300"]
    assert call(capsys, "prune", str(run / "checkpoints"), "--keep=1")[0] == 0
    assert names(run) == ["step_00000300"]


def test_prune_counts_only_valid_checkpoints(run: Path, capsys: Captured) -> None:
    damage(run, 300)  # its size is unchanged
    assert call(capsys, "prune", str(run)) == (0, [], [])
    assert call(capsys, "prune", str(run), "--keep=1")[1] == ["checkpoint step_00000100: removed"]
    assert names(run) == ["step_00000200", "step_00000300"]


def test_the_command_imports_neither_torch_nor_mpi(run: Path) -> None:
    program = (
        "import sys; from mpiddp.cli import main\n"
        f"code = main(['checkpoints', 'verify', {str(run)!r}])\n"
        "assert not {'torch', 'mpi4py', 'numpy'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, timeout=PATIENCE_S
    )
