"""The options for fewer ranks and fewer hosts, and the files that options name.

Tests mpiddp/drill/command.py.
python -m pytest tests/unit/drill/test_drill_size.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.drill.command import Size, with_absolute_files


@pytest.mark.parametrize(
    ("size", "fewer", "ranks", "options"),
    [
        (Size(4, "b", 2, counted=False, excluded=""), (0, 0), 4, ""),
        (Size(4, "b", 2, counted=False, excluded=""), (1, 0), 3, "-n 3"),
        (Size(4, "b", 2, counted=False, excluded=""), (0, 1), 2, "--exclude b"),
        (Size(4, "b", 1, counted=True, excluded="c"), (0, 1), 3, "--exclude c,b -n 3"),
    ],
)
def test_fewer(size: Size, fewer: tuple[int, int], ranks: int, options: str) -> None:
    assert size.fewer(*fewer) == (ranks, options.split())


def test_files_of_options_are_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").touch()
    own = [
        *("-n", "2", "--hostfile", "hosts", "--env-file=./.env"),
        *("--mpirun", "mpirun", "--mpirun=~/bin/mpirun", "-x", "hosts"),
    ]
    assert with_absolute_files(own) == [
        *("-n", "2", "--hostfile", f"{tmp_path}/hosts", f"--env-file={tmp_path}/.env"),
        *("--mpirun", "mpirun", "--mpirun=~/bin/mpirun", "-x", "hosts"),
    ]
