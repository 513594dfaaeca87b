"""--per-rank-log: the lines of the guides' script, from every rank, with a launcher of ours and without.

Tests mpiddp/train/per_rank_log.py.
python -m pytest tests/ranks/train/test_per_rank_log.py
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, mpirun_command

TRAINING = (
    *("-m", "mpiddp", "train", "--backend=gloo", "--use_syn", "--batch_size=4", "--arch=resnet20"),
    *("--epochs=3", "--steps_per_epoch=2", "--per_rank_log", "--num_workers=0"),
)


def train(launcher: str, out: Path, *options: str) -> list[str]:
    """The lines on stdout, as a user gets them."""
    command = {
        "mpirun": mpirun_command(2),
        "mpiddp launch": [*LAUNCH, "-H", "localhost:2"],
    }[launcher]
    done = subprocess.run(
        [*command, *options, *TRAINING, f"--out={out}"],
        env={
            k: v for k, v in clean_env().items() if k not in ("MPIDDP_LOG_RANKS", "MPIDDP_PREFIX")
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("launcher", ["mpirun", "mpiddp launch"])
def test_every_rank_prints_its_epochs_and_its_step_times(tmp_path: Path, launcher: str) -> None:
    lines = train(launcher, tmp_path / "run")
    text = "\n".join(lines)
    for rank in (0, 1):
        for epoch in (0, 1, 2):
            assert text.count(f"Local Rank: {rank}, Epoch: {epoch}, Training ...") == 1
    steps = re.findall(r"num_steps_per_gpu: 2, avg_step_time: (\d+\.\d{4})$", text, re.M)
    averages = [
        float(time) for time in re.findall(r"Average epoch time: (\d+\.\d{4})$", text, re.M)
    ]
    assert (len(steps), len(averages)) == (6, 2)
    if launcher == "mpiddp launch":
        assert "[rank 1 " in text
        of_rank_1 = [line for line in lines if line.startswith("[rank 1 ")]
        assert len(of_rank_1) == 3 * 2 + 1
        # The first epoch does not count: the average is that of the two others.
        times = [float(time) for time in re.findall(r"avg_step_time: (\S+)", "\n".join(of_rank_1))]
        average = float(of_rank_1[-1].partition("time: ")[2])
        assert average == pytest.approx(2 * (times[1] + times[2]) / 2, abs=3e-4)


def test_ranks_that_the_user_names_stay_the_only_ones(tmp_path: Path) -> None:
    text = "\n".join(train("mpiddp launch", tmp_path / "run", "--log-ranks", "0"))
    assert "Local Rank: 0, Epoch: 2, Training ..." in text
    assert "Local Rank: 1" not in text
