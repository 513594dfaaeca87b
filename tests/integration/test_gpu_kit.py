"""The stages for a machine with a GPU, rehearsed without one; the pieces that travel; the tables of docs/.

Tests benchmarks/gpu/.
python -m pytest tests/integration/test_gpu_kit.py
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import correct, images, kit, report
from benchmarks.gpu.run import RESULTS, Settings, run_group
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.stages import GROUPS, STAGES
from mpiddp.errors import UserError
from tests.support.data_cache import fetched_cifar10
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

MACHINE = Stage("machine", correct.machine, 600)


def settings(folder: Path) -> Settings:
    return Settings(folder / "out", folder / "state", True, time.monotonic() + 600, 1)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / "out" / RESULTS).read_text())
    return {record["stage"]: record for record in found}


def rehearse(folder: Path, name: str) -> dict[str, Any]:
    """The record of a rehearsed stage. Fails the test with the stage's log if it has not passed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "run", name, "--rehearse"]
    command += [f"--out={folder / 'out'}", f"--state={folder / 'state'}", "--minutes=10"]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, timeout=PATIENCE_S + 60)
    assert done.returncode == 0, (folder / "out" / f"{name}.log").read_text()
    return results(folder)[name]


def test_a_stage_runs_once(tmp_path: Path) -> None:
    notes: list[str] = []
    for _ in range(2):
        assert run_group("some", [MACHINE], settings(tmp_path), notes.append) == 0
    assert notes[-1] == "machine: done before"
    record = results(tmp_path)["machine"]
    assert (record["state"], record["figures"]["gpus"]) == ("passed", [])


def test_a_real_run_does_not_take_over_a_rehearsal(tmp_path: Path) -> None:
    notes: list[str] = []
    assert run_group("some", [MACHINE], settings(tmp_path), notes.append) == 0
    real = replace(settings(tmp_path), rehearses=False, deadline=time.monotonic())
    assert run_group("some", [MACHINE], real, notes.append) == 1
    assert notes[-1] == "machine: no time left in this command"


def test_a_stage_that_lacked_something_runs_again_on_a_gpu(tmp_path: Path) -> None:
    """CIFAR-10, for example, comes with a later piece of the kit."""
    real = replace(settings(tmp_path), rehearses=False, deadline=time.monotonic())
    (tmp_path / "state").mkdir()
    before = {"stage": "machine", "state": "not here", "rehearsal": False}
    (tmp_path / "state" / "machine.json").write_text(json.dumps(before))
    notes: list[str] = []
    assert run_group("some", [MACHINE], real, notes.append) == 1
    assert notes[-1] == "machine: no time left in this command"


def test_a_stage_ends_at_its_limit_and_costs_only_itself(tmp_path: Path) -> None:
    short = replace(MACHINE, limit_s=0.01)
    after = Stage("tf32", correct.tf32, 600)
    assert run_group("some", [short, after], settings(tmp_path), print) == 1
    found = results(tmp_path)
    assert (found["machine"]["state"], found["tf32"]["state"]) == ("stopped", "passed")
    assert "did not end within" in found["machine"]["reason"]


def test_a_stage_is_skipped_without_the_one_it_needs(tmp_path: Path) -> None:
    stage = replace(MACHINE, needs="two-ranks")
    assert run_group("some", [stage], settings(tmp_path), print) == 1
    record = results(tmp_path)["machine"]
    assert record["state"] == "skipped"
    assert record["reason"] == "it needs two-ranks, which has not passed"


def test_every_needed_stage_comes_first_and_names_are_unique() -> None:
    for group in GROUPS.values():
        names = [stage.name for stage in group.stages]
        for index, stage in enumerate(group.stages):
            assert not stage.needs or stage.needs in names[:index]
    assert len(STAGES) == sum(len(group.stages) for group in GROUPS.values())
    assert not STAGES.keys() & GROUPS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["group", "two-ranks", "stop", "profile", "graphs"])
def test_a_stage_of_real_ranks_is_rehearsed(name: str, tmp_path: Path) -> None:
    record = rehearse(tmp_path, name)
    assert (record["state"], record["rehearsal"]) == ("passed", True)
    assert record["figures"]
    assert all(command["code"] in (0, 75) for command in record["commands"])


# The pieces


def piece(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    sums = ""
    for name, content in files.items():
        (folder / name).write_bytes(content)
        sums += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
    (folder / kit.SUMS).write_text(sums)
    return folder


def test_a_damaged_piece_is_refused(tmp_path: Path) -> None:
    pieces = piece(tmp_path / "kit" / "piece-1", labels=b"0123")
    with pytest.raises(UserError, match=r"target has no environment yet\. Unpack piece-1 first\."):
        kit.unpack(tmp_path / "kit", tmp_path / "target", print)
    assert (tmp_path / "target" / "arrived" / "labels").read_bytes() == b"0123"
    (pieces / "labels").write_bytes(b"0124")
    with pytest.raises(
        UserError, match=r"labels differs from its SHA-256\. Carry the piece again\."
    ):
        kit.unpack(tmp_path / "kit", tmp_path / "target", print)
    (pieces / "labels").unlink()
    with pytest.raises(UserError, match="labels is missing"):
        kit.unpack(tmp_path / "kit", tmp_path / "target", print)


def test_a_folder_without_pieces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no pieces"):
        kit.unpack(tmp_path, tmp_path / "target", print)


def test_a_kit_is_not_packed_over_another(tmp_path: Path) -> None:
    (tmp_path / "some").touch()
    with pytest.raises(UserError, match="exists and is not empty"):
        kit.pack(tmp_path, print)


def test_pieces_stay_below_their_limit(tmp_path: Path) -> None:
    for name, size in {"b.webp": 30, "a.whl": 20, "c.webp": 20, "d.webp": 59}.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size << 20)
    pieces = list(kit._pieces(tmp_path))
    assert pieces == [["a.whl", "b.webp"], ["c.webp"], ["d.webp"]]


@pytest.mark.slow
def test_cifar_10_survives_its_compression(tmp_path: Path) -> None:
    mosaics, data = tmp_path / "mosaics", tmp_path / "data"
    mosaics.mkdir()
    images.write_mosaics(fetched_cifar10(), mosaics)
    assert images.are_complete(mosaics)
    # With the wheels, of 8 MB, it fits into two pieces.
    assert sum(path.stat().st_size for path in mosaics.iterdir()) < 2 * kit.PIECE_BYTES - (10 << 20)
    images.write_batches(mosaics, data)  # compares the official SHA-256
    batch = np.fromfile(data / "cifar-10-batches-bin" / "test_batch.bin", np.uint8)
    assert batch[0] == 3  # the first test image is a cat


# The tables


def record(stage: str, state: str, started: str, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "state": state, "started": started, "rehearsal": False, **more}


def written(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / RESULTS).write_text(json.dumps(records))
    return folder


def test_a_behaviour_is_seen_failed_or_mended(tmp_path: Path) -> None:
    bad = record("group", "failed", "1", reason="exit code 1")
    fine = record("group", "passed", "2")
    assert report.state_of([]) == "not run yet"
    assert report.state_of([bad]) == "failed: exit code 1"
    assert report.state_of([bad, fine]) == "mended"
    assert report.state_of([fine]) == "seen"
    written(tmp_path / "first", bad, record("fp16", "passed", "1"))
    written(tmp_path / "second", bad, fine, {**record("tf32", "passed", "1"), "rehearsal": True})
    text = report.behaviours(report.read(tmp_path))
    assert "| NCCL init with device_id | `group` | mended |" in text
    assert "| resume of the fp16 scaler | `fp16` | seen |" in text
    assert "| TF32 | `tf32` | not run yet |" in text  # it was only rehearsed


def test_figures_fill_the_tables_even_of_a_stage_that_was_stopped(tmp_path: Path) -> None:
    epochs = {"test_accuracy": 0.9412, "steps_s": 30.2, "command_s": 48.6}
    written(
        tmp_path / "results",
        record("resnet50", "stopped", "1", figures={"batch 256": [3700.0, 3800.0]}),
        record("cifar10", "passed", "1", figures={"24 epochs": epochs}),
        record(
            "settings", "stopped", "1", figures={"fp32, NCHW": [1000.0], "the defaults": [3000.0]}
        ),
        record("start", "failed", "1", reason="exit code 1", figures={"torchrun": [7.0]}),
        record("compiled", "stopped", "1", figures={"--compile reduce-overhead": [4000.0]}),
        record("compiled", "stopped", "2", figures={"--compile default": [3500.0]}),
    )
    text = report.figures(report.read(tmp_path))
    assert "| ≥ 3,600 images/s | 3,750 images/s (batch 256) |" in text
    assert "94.12% after 24 epochs: 30 s of steps, 49 s from the command to its end" in text
    assert "| the defaults | 3,000 | 3.00 |" in text
    assert "| ≤ 1.0 | failed: exit code 1 |" in text
    assert "| the defaults, --compile default | 3,500 | 3.50 |" in text
    assert "| the defaults, --compile reduce-overhead | 4,000 | 4.00 |" in text


def test_the_tables_of_docs_are_filled_between_their_marks(tmp_path: Path) -> None:
    (tmp_path / "docs/evidence").mkdir(parents=True)
    for name in ("performance.md", "gpu.md"):
        shutil.copy(ROOT / "docs/evidence" / name, tmp_path / "docs/evidence")
    found = written(tmp_path / "results", record("group", "passed", "1"))
    report.fill(found, tmp_path)
    before = (ROOT / "docs/evidence/gpu.md").read_text()
    after = (tmp_path / "docs/evidence/gpu.md").read_text()
    assert after.partition(report.BEGIN)[0] == before.partition(report.BEGIN)[0]
    assert after.partition(report.END)[2] == before.partition(report.END)[2]
    assert "| set_device before init | `group` | seen |" in after
    report.fill(found, tmp_path)
    assert (tmp_path / "docs/evidence/gpu.md").read_text() == after
