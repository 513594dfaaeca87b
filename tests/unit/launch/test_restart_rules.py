"""The rules of a restart: its options, its batch, its folder, and the requests to stop it.

Tests mpiddp/launch/job.py.
python -m pytest tests/unit/launch/test_restart_rules.py
"""

from __future__ import annotations

from typing import Any

import pytest

import mpiddp
from mpiddp.runtime.reports import announced


def test_announcing_without_a_launcher_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDDP_ANNOUNCED", raising=False)
    mpiddp.announce(resume_args=["--resume"], global_batch_size=4, max_ranks=2)
    assert announced() is None


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"resume_args": "--resume"}, TypeError, "resume_args: expected a sequence of strings"),
        ({"resume_args": [1]}, TypeError, "resume_args: expected a sequence of strings"),
        ({"global_batch_size": 2.0}, TypeError, "global_batch_size: expected a whole number"),
        ({"global_batch_size": True}, TypeError, "global_batch_size: expected a whole number"),
        ({"resume_args": ["a\0b"]}, ValueError, "resume_args: not the arguments of a command"),
        ({"resume_args": ["\ud800"]}, ValueError, "resume_args: not the arguments of a command"),
        ({"max_ranks": 0}, ValueError, "max_ranks: expected 1 or more, not 0"),
        ({"max_ranks": 1 << 63}, ValueError, "max_ranks: expected at most 9223372036854775807"),
    ],
)
def test_an_invalid_announcement(
    arguments: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        mpiddp.announce(**arguments)
