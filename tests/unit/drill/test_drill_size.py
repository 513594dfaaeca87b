"""The options for fewer ranks and fewer hosts.

Tests mpiddp/drill/command.py.
python -m pytest tests/unit/drill/test_drill_size.py
"""

from __future__ import annotations

import pytest

from mpiddp.drill.command import Size


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
