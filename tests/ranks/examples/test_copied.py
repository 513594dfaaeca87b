"""A file of the trainer, copied into a project of its own, works there.

Tests examples/copied, and that mpiddp/train/order.py has not moved on without it.
python -m pytest tests/ranks/examples/test_copied.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tests.support.ranks import ROOT, mpirun


def test_a_copied_file_works_in_an_empty_folder(tmp_path: Path) -> None:
    source = ROOT / "examples/copied"
    assert (source / "order.py").read_bytes() == (ROOT / "mpiddp/train/order.py").read_bytes()
    for name in ("order.py", "train.py"):
        shutil.copy(source / name, tmp_path)
    trained = []
    for ranks in (2, 1):  # the same images at each step, whatever the number of ranks
        done = mpirun(ranks, str(tmp_path / "train.py"), f"runs/{ranks}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "epoch 2: step 30, loss " in done.stdout
        trained.append(torch.load(tmp_path / f"runs/{ranks}/checkpoints/step_00000030/model.pt"))
    for name, weight in trained[0].items():
        torch.testing.assert_close(weight, trained[1][name])
