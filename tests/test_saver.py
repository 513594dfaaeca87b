"""A save in a thread: what the disk does to it, all ranks hear; a kill at any instant loses one step.

Tests mpiddp/train/saver.py.
python -m pytest tests/test_saver.py
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mpiddp.checkpoints import directory, save_schedule
from mpiddp.checkpoints.directory import HashedFile
from mpiddp.checkpoints.save_schedule import Interval, SaveSchedule, parse_interval
from mpiddp.checkpoints.snapshot import PinnedStaging
from mpiddp.runtime.coordinator import Coordinator
from mpiddp.world import World
from tests.patience import PATIENCE_S
from tests.ranks import ROOT, clean_env
from tests.training import Command, train


@pytest.mark.slow
def test_a_kill_at_any_instant_leaves_the_newest_or_the_one_before(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.jobs.killed_saves", tmp_path, "40"],
        env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = re.fullmatch(r"40 kills, (\d+) in mid-write, step \d+\n", ran.stdout)
    assert found is not None, ran.stdout
    assert int(found[1]) > 4, "the kills missed the writing"


def test_a_snapshot_stays_while_the_training_goes_on() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight, "b": [weight.T, (3, "word")], "c": {0: torch.tensor(7)}}
    memory = PinnedStaging([weight], torch.device("cpu"))
    first = memory.copy(state)
    expected = weight.clone()
    weight.zero_()
    assert torch.equal(first["a"], expected)
    assert torch.equal(first["b"][0], expected.T)
    assert first["b"][1] == (3, "word")
    assert first["c"][0] == 7
    places = {tensor.data_ptr() for tensor in (first["a"], first["b"][0], first["c"][0])}
    second = memory.copy(state)
    assert torch.equal(second["a"], weight)
    assert {t.data_ptr() for t in (second["a"], second["b"][0], second["c"][0])} == places


def test_a_hashed_file_keeps_the_disks_own_error() -> None:
    """torch.save makes "unexpected pos" of it."""
    file = HashedFile(Path("/dev/full"))
    torch.save({"a": torch.zeros(10_000)}, file)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No space left on device"):
        file.close()


def test_a_wrong_hash_of_what_was_written_would_be_seen(tmp_path: Path) -> None:
    def write_files(folder: Path) -> dict[str, str]:
        file = HashedFile(folder / "model.pt")
        torch.save({"a": torch.ones(5)}, file)  # type: ignore[arg-type]
        return {"model.pt": file.close()}

    directory.verify(directory.write(tmp_path, 1, write_files))
    wrong = directory.write(tmp_path, 2, lambda folder: write_files(folder) and {"model.pt": "0"})
    assert not directory.is_valid(wrong)


def test_only_valid_ones_are_kept_in_the_count(tmp_path: Path) -> None:
    """A run that goes on finds a checkpoint with a flipped bit among its older ones."""
    options: Command = [
        "--use-syn", "--arch=resnet20", "--batch-size=4", "--epochs=1", "--steps-per-epoch=4",
        "--save-every=1", "--keep=2", "--out", tmp_path / "out",
    ]  # fmt: skip
    assert train(1, *options, "--stop-at-step=2").returncode == 75
    root = tmp_path / "out" / "checkpoints"
    # Of the right size: a glance would count it.
    shutil.copytree(root / "step_00000002", root / "step_00000003")
    shutil.rmtree(root / "step_00000002")
    model = root / "step_00000003" / "model.pt"
    model.write_bytes(bytes(model.stat().st_size))
    job = train(1, *options, "--stop-at-step=2")
    assert (
        "step_00000003: model.pt does not match its SHA-256; resuming from step_00000001 (2 steps"
        in (job.stdout)
    )
    assert [directory.step_of(folder) for folder in directory.list_steps(root)] == [
        1,
        2,
        3,
    ]


# When


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("20", Interval(steps=20)),
        ("30s", Interval(seconds=30)),
        ("0.5m", Interval(seconds=30)),
        ("10m", Interval(seconds=600)),
        ("1h", Interval(seconds=3600)),
    ],
)
def test_intervals(text: str, every: Interval) -> None:
    assert parse_interval(text) == every


@pytest.mark.parametrize("text", ["0", "0s", "-1", "m", "1d", "1.5", "10 m", "1e3s", ".s", "²"])
def test_no_intervals(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_interval(text)


def test_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow first steps, then quick ones: the saves are an interval apart."""
    coordinator = Coordinator(World(0, 1, 0, 1), dist.HashStore())
    now = 0.0
    monkeypatch.setattr(save_schedule, "time", SimpleNamespace(monotonic=lambda: now))
    schedule = SaveSchedule(Interval(seconds=0.5), coordinator, 7, timeout_s=PATIENCE_S)
    saves = [now]
    step = 7
    while len(saves) < 4:
        step += 1
        now += 3 / 32 if step < 12 else 1 / 64
        if schedule.is_due(step, ends_epoch=True):
            saves.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(saves)]
    assert gaps == [0.5] * 3


def test_two_ranks_agree_on_the_steps_and_keep_two(tmp_path: Path) -> None:
    job = train(
        2, "--use-syn", "--arch=resnet20", "--batch-size=4", "--epochs=1", "--steps-per-epoch=60",
        "--save-every=0.05s", "--log-every=1000", "--out", tmp_path / "out",
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    folders = directory.list_steps(tmp_path / "out" / "checkpoints")
    assert [directory.step_of(folder) for folder in folders][-1] == 60
    assert len(folders) == 2
    for folder in folders:
        directory.verify(folder)
