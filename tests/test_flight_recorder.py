"""Where NCCL's last collectives are kept when one of them times out.

Tests mpiddp/train/flight_recorder.py.
python -m pytest tests/test_flight_recorder.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.train.flight_recorder import settings


def test_the_dump_lies_in_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings(Path("runs/a/logs"), {}) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/runs/a/logs/nccl_rank_",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_what_the_user_has_set_stays(name: str) -> None:
    """Under its older name as well."""
    env = {
        name: "elsewhere",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    assert settings(Path("logs"), env) == {}
