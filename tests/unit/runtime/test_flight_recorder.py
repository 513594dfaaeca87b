"""The settings of torch's flight recorder, which dumps the last collectives when one times out.

Tests mpiddp/train/flight_recorder.py.
python -m pytest tests/unit/runtime/test_flight_recorder.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mpiddp.train.flight_recorder import settings


def test_dumps_are_written_into_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings(Path("runs/a/logs"), {}) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/runs/a/logs/nccl_rank_",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_variables_of_the_user_are_not_overwritten(name: str) -> None:
    """The same holds for the older name of a variable."""
    env = {
        name: "elsewhere",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    assert settings(Path("logs"), env) == {}
