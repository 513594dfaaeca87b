"""The rules of a restart: its options, its batch, its folder, and the requests to stop it.

Tests mpiddp/launch/restarts.py.
python -m pytest tests/unit/launch/test_restart_rules.py
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mpiddp
from mpiddp.launch import restarts
from mpiddp.launch.supervise.signals import queued_signals
from mpiddp.runtime.reports import Announced, announced
from mpiddp.train.config import keep_global_batch
from mpiddp.train.options import parse


def test_a_restart_continues_when_the_working_folder_is_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of a file server that is away for two looks."""
    looks = [OSError(errno.ESTALE, "Stale file handle")] * 2

    class Away(type(Path())):  # type: ignore[misc]
        def stat(self, **options: Any) -> Any:
            if looks:
                raise looks.pop()
            return super().stat(**options)

    monkeypatch.setattr(restarts, "Path", Away)
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01)
    with queued_signals() as signals:
        assert not restarts._is_interrupted_without_folder(signals)
    assert looks == []
    assert capfd.readouterr().err.count("the working folder is away (Stale file handle)") == 1


def test_a_request_ends_the_wait_for_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01)
    with queued_signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert restarts._is_interrupted_without_folder(signals)
        monkeypatch.setattr(restarts, "FOLDER_AWAY_S", 0.05)
        assert not restarts._is_interrupted_without_folder(signals)  # it has waited for long


@pytest.mark.parametrize(
    ("options", "ranks_before"),
    [
        (["--batch-size", "4", "--seed", "1"], 3),
        (["--batch_size=4", "--seed", "1"], 3),
        (["--global-batch-size", "12", "--seed", "1"], 3),
        (["--seed", "1", "--grad-accum-steps", "3", "--batch-size", "1"], 4),
        (["--seed", "1", "--grad-accum-steps", "3", "--global-batch-size=12"], 1),
    ],
)
@pytest.mark.parametrize(("ranks", "passes"), [(1, 3), (2, 2), (3, 1), (4, 1)])
def test_a_restart_keeps_the_global_batch(
    options: list[str], ranks_before: int, ranks: int, passes: int
) -> None:
    """A pass has at most 4 images, as before. In the case with 1 image, it gets 2 where possible."""
    written = parse(options)
    before = Announced(global_batch_size=12, world_size=ranks_before)
    kept = keep_global_batch(written, before, ranks)
    if ranks == ranks_before:
        assert kept == written
        return
    if written.batch_size == 1:
        passes = max(1, 6 // ranks)  # two images per pass, which BatchNorm needs
    assert kept == replace(
        written, batch_size=None, global_batch_size=12, uneven=True, grad_accum_steps=passes
    )
    assert kept.seed == 1


def test_no_pass_of_a_restart_has_a_single_image() -> None:
    """BatchNorm needs two, so a pass may have more images than before."""
    for images, before, ranks in ((8, 8, 3), (10, 5, 4)):
        kept = keep_global_batch(parse([]), Announced(images, before), ranks)
        assert kept.grad_accum_steps == 1


def test_the_first_attempt_uses_the_options_unchanged() -> None:
    assert keep_global_batch(parse([]), None, 2) == parse([])


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
