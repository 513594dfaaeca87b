"""The page about a real training that was killed once: its restart, its saves.

Tests mpiddp/report/ with what `mpiddp train` writes.
python -m pytest tests/ranks/train/test_report.py
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpiddp import cli
from mpiddp.report.read import read_run
from tests.support import chromium
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env

pytest.importorskip("bokeh", reason="mpiddp report needs it: pip install bokeh")

TRAINING = (
    *("-m", "mpiddp", "train", "--backend=gloo", "--use-syn", "--batch-size=4", "--arch=resnet20"),
    *("--epochs=2", "--steps-per-epoch=20", "--num-workers=0"),
    *("--save-every=10", "--keep=9", "--log-every=1"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training whose rank 1 is killed after a save."""
    folder = tmp_path_factory.mktemp("report") / "run"
    command = [*LAUNCH, "-H", "localhost:2", "--max-restarts", "1", *TRAINING, f"--out={folder}"]
    with subprocess.Popen(
        command,
        env=clean_env(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "checkpoints/step_00000010").exists():
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pid = re.search(r"pid (\d+)", (folder / "logs/rank_00001.log").read_text())
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)
        stderr = job.communicate(timeout=PATIENCE_S)[1]
    assert job.returncode == 0, stderr
    return folder


def test_the_folder_tells_of_the_restart(run: Path) -> None:
    found = read_run(run)
    assert (found.state, found.step, found.notes) == ("done", 40, [])
    first, second = found.starts
    assert (first.step, first.outcome, second.outcome) == (0, "failed", "done")
    assert second.step % 10 == 0
    assert second.step > 0
    assert len(second.hosts) == 2
    assert len(found.curves["train_loss"].steps) == 40


def test_chromium_shows_its_page(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert cli.main(["report", str(run), "-o", str(page)]) == 0
    with chromium.up_or_skip() as browser:
        browser.open(page, width=390, dark=True)
        browser.run_until("return Bokeh.documents.every(each => each.is_idle)")
        assert [line for line in browser.console() if not line.startswith("INFO")] == []
        text = browser.run("return document.body.innerText")
    assert "2 on 1 host" in text
    assert "Time lost" in text
