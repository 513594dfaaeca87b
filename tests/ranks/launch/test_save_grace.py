"""A stop waits for a save that is under way, and whoever ends a rank names the time limit.

Tests mpiddp/launch/supervise/attempt.py, mpiddp/runtime/job/session.py.
python -m pytest tests/ranks/launch/test_save_grace.py
"""

from __future__ import annotations

import signal
from pathlib import Path
from socket import gethostname

from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, script
from tests.support.stopping import start

# Rank 0 saves for argv[2] seconds: "stopping" after should_stop(), "periodic" in a save that began before.
SAVES = """
import os, sys, time, mpiddp
how, seconds = sys.argv[1], float(sys.argv[2])
mpiddp.should_stop()
saves = os.environ["RANK"] == "0"
if how == "periodic" and saves:
    with mpiddp.saving():
        print("ready\\n", end="", flush=True)
        time.sleep(seconds)
        print("saved\\n", end="", flush=True)
else:
    print("ready\\n", end="", flush=True)
while not mpiddp.should_stop():
    time.sleep(0.01)
if how == "stopping" and saves:
    time.sleep(seconds)
    print("saved\\n", end="", flush=True)
sys.exit(75)
"""


def stop(tmp_path: Path, how: str, save_s: float, *options: str) -> tuple[int, str, str]:
    """The exit code and the output of a job with --grace 1 that is requested to stop."""
    job = script(tmp_path, SAVES)
    command = [*LAUNCH, "-H", "localhost:2", "--grace", "1", *options, job, how, str(save_s)]
    with start(command) as process:
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return process.returncode, stdout, stderr


def test_a_save_after_should_stop_outlasts_the_grace_period(tmp_path: Path) -> None:
    code, stdout, stderr = stop(tmp_path, "stopping", 4)
    assert (code, stdout) == (75, "saved\n"), stderr
    saving = f"mpiddp: rank 0 on {gethostname()} is still saving; waiting for at most 600 s"
    assert f"{saving} (--save-grace).\n" in stderr


def test_a_save_that_began_before_the_stop_outlasts_the_grace_period(tmp_path: Path) -> None:
    code, stdout, stderr = stop(tmp_path, "periodic", 4)
    assert (code, stdout) == (75, "saved\n"), stderr


def test_the_sentence_names_save_grace(tmp_path: Path) -> None:
    code, stdout, stderr = stop(tmp_path, "stopping", 600, "--save-grace", "3")
    assert (code, stdout) == (130, ""), stderr
    late = f"rank 0 on {gethostname()} was still saving 3 s after the request (--save-grace)"
    assert stderr.endswith(f"mpiddp: interrupted: {late}; the job was killed.\n")


def test_the_sentence_names_grace(tmp_path: Path) -> None:
    text = "import time, mpiddp; mpiddp.should_stop(); print('ready', flush=True); time.sleep(600)"
    command = [*LAUNCH, "-H", "localhost:1", "--grace", "1", script(tmp_path, text)]
    with start(command, ranks=1) as process:
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    late = f"rank 0 on {gethostname()} had not stopped 1 s after the request (--grace)"
    assert process.returncode == 130
    assert stderr.endswith(f"mpiddp: interrupted: {late}; the job was killed.\n")


def test_another_signal_ends_a_save_at_once(tmp_path: Path) -> None:
    job = script(tmp_path, SAVES)
    command = [*LAUNCH, "-H", "localhost:2", "--grace", "1", job, "stopping", "600"]
    with start(command) as process:
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        while "is still saving" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
