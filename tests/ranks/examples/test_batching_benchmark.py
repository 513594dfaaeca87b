"""The script behind the table of uneven texts trains two ranks in each way, and its figures fit together.

Tests benchmarks/batching.py.
python -m pytest tests/ranks/examples/test_batching_benchmark.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.batching import PACKED, PADDED, VARIANTS
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

ROUNDS = 2


def test_a_rehearsal_with_two_ranks(tmp_path: Path) -> None:
    options = [f"--rounds={ROUNDS}", "--documents=24", "--rows=2", "--longest=256"]
    start = [sys.executable, "-m", "benchmarks.batching", "-H", "localhost:2"]
    done = subprocess.run(
        [*start, *options, f"--out={tmp_path}"],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    blocks = json.loads((tmp_path / "batching.json").read_text())["results"]["blocks"]
    assert list(blocks) == list(VARIANTS)
    for name, rounds in blocks.items():
        assert f"| {name} | " in done.stdout
        assert len(rounds) == ROUNDS
        for block in rounds:
            assert block["seconds"] > 0
            assert 0 < block["targets"] <= block["positions"]
            assert block["compute_s"]
            assert all(len(step) == 2 and min(step) > 0 for step in block["compute_s"])
    assert padding(blocks[PACKED]) < padding(blocks[PADDED])


def padding(blocks: list[dict[str, Any]]) -> float:
    """The share of positions that count for no character."""
    targets, positions = (sum(block[name] for block in blocks) for name in ("targets", "positions"))
    return 1 - targets / positions
