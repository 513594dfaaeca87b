"""What --grow refuses, and a stop after a growth that did not save.

Tests mpiddp/launch/grow.py, job.py, supervise/mpirun.py.
python -m pytest tests/ranks/launch/test_growth_refused.py
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.jobs import elastic
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, launch


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--local",), error("with --local", "--grow ", "--local")),
        (
            ("-H", "localhost:1,far.invalid:1"),
            error("-H: every", "--grow with -H: ", "--hostfile", "--min-hosts H"),
        ),
        (
            ("-H", "localhost:1", "--min-hosts", "1", "--no-check"),
            error("--grow needs", "--grow ", "--no-check"),
        ),
        ((), error("--grow: no", "--grow: ", "--hostfile FILE")),
    ],
)
def test_a_job_that_can_never_grow(options: tuple[str, ...], sentence: str) -> None:
    done = launch("--grow", "10m", *options, "-m", "platform")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


def test_a_stop_request_after_a_growth_that_did_not_save(tmp_path: Path) -> None:
    """The ranks exceed --grace, and the next attempt has made no step: the job is interrupted."""
    folder = tmp_path / "job"
    folder.mkdir()
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("localhost slots=1\n")
    options = ("--grow", "1", "--grace", "1s", "--hostfile", str(hostfile))
    command = [*LAUNCH, *options, str(ROOT / "tests" / "jobs" / "elastic.py"), str(folder)]
    with subprocess.Popen(
        command, env=clean_env(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stderr is not None
        deadline = time.monotonic() + PATIENCE_S
        while not elastic.read_steps(folder):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (folder / "slow_save").touch()
        (folder / "slow_start").touch()
        hostfile.write_text("localhost slots=2\n")
        lines = iter(launcher.stderr.readline, "")
        found = ("(--grace). From now on, hosts join only at a restart.", "restarting on")
        seen = "".join(next(line for line in lines if each in line) for each in found)
        launcher.send_signal(signal.SIGTERM)
        rest = launcher.stderr.read()
    assert launcher.returncode == 130, seen + rest
    assert "mpiddp: interrupted" in rest
