"""A hostfile or a run on a disk that fails.

Tests mpiddp/paths.py, mpiddp/checkpoints/resume.py and contents.py. A link to /proc/self/mem is a file that
python -m pytest tests/ranks/checkpoints/test_failing_disk_of_a_job.py
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from mpiddp.checkpoints import directory
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.errors import JobFailed
from mpiddp.hosts.hostfile import read_hostfile
from mpiddp.protocol.variables import RESTART_COUNT
from tests.support.errors import error
from tests.support.ranks import mpiddp

BAD_SECTOR = Path("/proc/self/mem")


EIO = os.strerror(errno.EIO)


TRAIN = ("train", "--use-syn", "--arch=resnet20", "--batch-size=2", "--steps-per-epoch=1")


def test_a_hostfile_on_a_disk_that_fails() -> None:
    sentence = error("cannot be read", f"{BAD_SECTOR} ", EIO)
    with pytest.raises(JobFailed, match=f"^{sentence}$"):
        read_hostfile(BAD_SECTOR)
    ran = mpiddp("launch", "--hostfile", str(BAD_SECTOR), "--dry-run", "-m", "platform")
    assert ran.returncode == 1
    assert re.fullmatch(f"{sentence}\n", ran.stderr), ran.stderr


def _unreadable_checkpoint(out: Path) -> Path:
    folder = directory.write(
        RunDir(out).checkpoints, 7, lambda f: torch.save({}, f / "model.pt") or None
    )
    (folder / "COMPLETE").unlink()
    (folder / "COMPLETE").symlink_to(BAD_SECTOR)
    return folder


@pytest.mark.parametrize(
    ("resume", "id"),
    [
        ("auto", ":"),
        ("{folder}", ":"),
        ("{out}", ":"),
        ("never", ":"),
    ],
)
def test_a_run_whose_checkpoints_cannot_be_read_now_may_be_restarted(
    tmp_path: Path, resume: str, id: str
) -> None:
    """It neither starts anew nor says that there is no checkpoint."""
    out = tmp_path / "out"
    folder = _unreadable_checkpoint(out)
    option = f"--resume={resume.format(folder=folder, out=out)}".split()
    attempt = {RESTART_COUNT: "1"} if resume == "never" else {}
    done = mpiddp(*TRAIN, "--out", str(out), *option, **attempt)
    assert done.returncode == 1, done.stderr
    sentence = error(id, "checkpoint step_00000007: COMPLETE ", EIO)
    assert re.fullmatch(sentence, done.stderr.splitlines()[-1]), done.stderr
