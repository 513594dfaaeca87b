"""The faults of a drill within a save, made in this process.

Tests mpiddp/drill/observer.py and plan.py. tests/promises/test_doctor.py has whole drills.
python -m pytest tests/integration/test_drilled_saves.py
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from mpiddp.checkpoints.state import packed
from mpiddp.drill.injectors import ACTS
from mpiddp.drill.observer import _Observer, _watch_saves
from mpiddp.drill.plan import Plan


class Killed(Exception):
    pass


def kill() -> None:
    raise Killed


@pytest.fixture(autouse=True)
def drilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch, "save", torch.save)  # the fixture restores it
    monkeypatch.setitem(ACTS, "kill", kill)


def test_a_script_that_saves_files_is_killed_within_one(tmp_path: Path) -> None:
    """`mpiddp.Checkpoints` first saves a rank's own state into memory, where nothing can be torn."""
    _watch_saves(_Observer(tmp_path, 0, Plan("kill in save", in_files=True)))
    own = len(packed({"a": torch.ones(1)}))
    assert own > 0
    with pytest.raises(Killed):
        torch.save({"a": torch.ones(1)}, tmp_path / "model.pt")
    assert 0 < (tmp_path / "model.pt").stat().st_size < own


def test_a_script_that_saves_into_memory_alone_is_killed_there(tmp_path: Path) -> None:
    _watch_saves(_Observer(tmp_path, 0, Plan("kill in save")))
    with pytest.raises(Killed):
        torch.save({"a": torch.ones(1)}, io.BytesIO())
