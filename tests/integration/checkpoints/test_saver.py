"""Saves in a thread: a kill at any moment loses at most one step, and damaged saves are detected.

Tests mpiddp/checkpoints/save.py, save_shards.py.
python -m pytest tests/integration/checkpoints/test_saver.py
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpiddp.checkpoints import directory, save
from mpiddp.checkpoints.ranks import FileSystems, Ranks, empty_chunk
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.run_dir import RunDir, save_json
from mpiddp.checkpoints.save import HostMemory, SaveSchedule, _layout, _save_error
from mpiddp.checkpoints.save_shards import Exchange, NotSaved, ShardedSaver
from mpiddp.checkpoints.state import HashedFile, packed
from mpiddp.runtime.job.connect import Server
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.text import Interval, parse_interval
from mpiddp.world import World
from tests.support.channels import member, serving
from tests.support.errors import error
from tests.support.patience import PATIENCE_S


def test_a_snapshot_does_not_change_during_training() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight, "b": [weight.T, (3, "text")], "c": {0: torch.tensor(7)}}
    staging = HostMemory()
    first = staging.copy(state)[0]
    expected = weight.clone()
    weight.zero_()
    assert torch.equal(first["a"], expected)
    assert torch.equal(first["b"][0], expected.T)
    assert first["b"][1] == (3, "text")
    assert first["c"][0] == 7
    addresses = {tensor.data_ptr() for tensor in (first["a"], first["b"][0], first["c"][0])}
    second = staging.copy(state)[0]
    assert torch.equal(second["a"], weight)
    assert {t.data_ptr() for t in (second["a"], second["b"][0], second["c"][0])} == addresses


def test_a_tensor_of_the_cpu_and_one_of_any_device_share_no_memory() -> None:
    """Only the copy of the second is pinned. "meta" is a device that every machine has."""
    tensor = torch.zeros(2)
    assert _layout(tensor) == _layout(torch.ones(2))
    assert _layout(tensor) != _layout(tensor.to("meta"))


def test_memory_for_files_is_the_cpu_s_under_any_default_device() -> None:
    with torch.device("meta"):
        assert (
            empty_chunk(4).device.type
            == packed({"a": torch.ones(1, device="cpu")}).device.type
            == "cpu"
        )


def test_a_hashed_file_keeps_the_disks_own_error() -> None:
    """torch.save itself would report "unexpected pos"."""
    file = HashedFile(Path("/dev/full"))
    torch.save({"a": torch.zeros(10_000)}, file)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No space left on device"):
        file.close()


def test_a_wrong_hash_from_the_writer_is_detected(tmp_path: Path) -> None:
    def write_files(folder: Path) -> dict[str, str]:
        file = HashedFile(folder / "model.pt")
        torch.save({"a": torch.ones(5)}, file)  # type: ignore[arg-type]
        return {"model.pt": file.close()}

    directory.verify(directory.write(tmp_path, 1, write_files))
    wrong = directory.write(tmp_path, 2, lambda folder: write_files(folder) and {"model.pt": "0"})
    assert not directory.is_verified(wrong)


def test_a_full_quota_is_not_the_free_space_of_the_file_system(tmp_path: Path) -> None:
    used_up = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    sentence = error(": step", f"{tmp_path}: step 3 ", "5.0 MB", "disk quota", "no older ")
    assert re.fullmatch(sentence, _save_error(used_up, tmp_path, 3, 5_000_000))


def test_a_summary_of_a_training_that_diverged_is_json(tmp_path: Path) -> None:
    save_json(tmp_path / "summary.json", {"train_loss": float("nan"), "steps": 3})
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"train_loss": None, "steps": 3}


# Ranks that save shards together


def coordinators(server: Server) -> list[Coordinator]:
    """Of two ranks that have entered the job."""
    both = [Coordinator(World(rank, 2, rank, 2), member(server, rank, 2)) for rank in (0, 1)]
    for each in both:
        each.begin_stay()
    return both


def test_a_save_is_given_up_when_another_rank_fails() -> None:
    with serving(2) as server:
        first, second = coordinators(server)
        exchange = Exchange(first, PATIENCE_S)
        exchange.begin(7)
        assert second.claim_first_failure()
        with pytest.raises(NotSaved, match=error("was not saved", "step 7 ", "another rank ")):
            exchange.get("written", 1)


def test_a_save_is_given_up_when_the_job_ends() -> None:
    with serving(2) as server:
        first, _ = coordinators(server)
        exchange = Exchange(first, PATIENCE_S)
        exchange.begin(7)
    with pytest.raises(NotSaved, match=error("was not saved", "step 7 ", "the job has ended")):
        exchange.get("written", 1)


def test_a_shard_that_a_file_server_does_not_show_whole_yet(tmp_path: Path) -> None:
    """Here each rank has a folder of its own; the first one's has nothing yet of what the second writes."""
    roots = [tmp_path / f"seen_by_rank_{rank}" for rank in (0, 1)]
    with serving(2) as server, ThreadPoolExecutor(1) as thread:
        first, second = (
            ShardedSaver(
                Run(RunDir(root), Ranks(coordinator, None, PATIENCE_S), FileSystems((0, 0)), None),
                root,
            )
            for root, coordinator in zip(roots, coordinators(server), strict=True)
        )

        def write_files(folder: Path) -> None:
            (folder / "shard_00001.pt").touch()
            (roots[1] / folder.name).mkdir(parents=True)
            thread.submit(second.write, 7, {}, write_files)

        values = (f"{roots[0]}: ", "shard_00001.pt ", "step 7 ")
        with pytest.raises(NotSaved, match=error("is incomplete", *values)):
            first.write(7, {}, write_files)
    assert list(roots[0].iterdir()) == []
    (written,) = roots[1].rglob("shard_00001.pt")
    assert written.stat().st_size > 0


# The save schedule


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("20", Interval(steps=20)),
        ("30s", Interval(seconds=30)),
        ("0.5m", Interval(seconds=30)),
        ("10m", Interval(seconds=600)),
        ("1h", Interval(seconds=3600)),
    ],
)
def test_parse_interval(text: str, interval: Interval) -> None:
    assert parse_interval(text) == interval


@pytest.mark.parametrize(
    "text", ["0", "0s", "-1", "m", "1d", "1.5", "10 m", "1e3s", ".s", "²", "1" * 40]
)
def test_parse_interval_rejects(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_interval(text)


def test_timed_saves_are_an_interval_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps are slow, the later ones fast."""
    coordinator = Coordinator(World(0, 1, 0, 1), None)
    now = 0.0
    monkeypatch.setattr(save, "time", SimpleNamespace(monotonic=lambda: now))
    schedule = SaveSchedule(Interval(seconds=0.5), coordinator, 7, timeout_s=PATIENCE_S)
    saves = [now]
    step = 7
    while len(saves) < 4:
        step += 1
        now += 3 / 32 if step < 12 else 1 / 64
        if schedule.is_due(step):
            saves.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(saves)]
    assert gaps == [0.5] * 3
