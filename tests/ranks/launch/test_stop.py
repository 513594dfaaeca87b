"""A job that is requested to stop saves at the same step on all ranks, and prints how to resume.

Tests mpiddp/launch/supervise/, mpiddp/runtime/job/stop.py.
python -m pytest tests/ranks/launch/test_stop.py
"""

from __future__ import annotations

import fcntl
import json
import random
import re
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from mpiddp.checkpoints import directory
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, clean_env, find_mpirun, script
from tests.support.stopping import LONG_GRACE, SCRIPT, piped, start

# Each rank asks before every step whether the next call returns True.
FORETOLD = SCRIPT.replace(
    "import mpiddp\n", "import mpiddp\nfrom mpiddp.runtime.job.session import current\n"
)
FORETOLD = FORETOLD.replace(
    "    if mpiddp.should_stop():",
    "    foretold = current().stop.stops_next()\n"
    "    time.sleep(0.003)\n"
    "    stops = mpiddp.should_stop()\n"
    "    assert foretold == stops, step\n"
    "    if stops:",
)
WORKERS = """
import torch, mpiddp
from torch.utils.data import DataLoader
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 10**9
    def __getitem__(self, i):
        import time; time.sleep(0.002)
        return i
if __name__ == "__main__":
    context = __import__("sys").argv[1]
    with mpiddp.process_group() as world:
        loader = DataLoader(Numbers(), num_workers=2, multiprocessing_context=context)
        for step, _ in enumerate(loader):
            if step == 5:
                print("ready", flush=True)
            if mpiddp.should_stop():
                print("saved", step, flush=True)
                break
"""
FLOOD = """
import threading, time
from pathlib import Path
import mpiddp
is_over = threading.Event()
def flood():
    while not is_over.is_set():
        print("x" * 200)
with mpiddp.process_group() as world:
    printing = threading.Thread(target=flood)
    printing.start()
    while not mpiddp.should_stop():
        time.sleep(0.05)
    Path(f"saved{world.rank}").touch()
    is_over.set()
    printing.join()
"""
WITHOUT_SUPPORT = """
import os, signal, sys, time
def save(number, frame):  # a print may be under way, and must not be entered again
    os.write(1, f"received {signal.Signals(number).name}\\n".encode())
    time.sleep(float(sys.argv[1]))
    os.write(1, b"wrote\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_stop_is_known_before_the_step_that_it_ends(tmp_path: Path) -> None:
    """So that a script can save before it calls should_stop(). Requests come at any moment."""
    command = [*LAUNCH, *LONG_GRACE, "-H", "localhost:3", script(tmp_path, FORETOLD)]
    with start(command, ranks=3) as job:
        time.sleep(random.random())
        job.send_signal(signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 75, stderr
    assert len(set(stdout.split())) == 2, stdout


@pytest.mark.parametrize(
    ("number", "mpi"),
    [
        (signal.SIGTERM, "openmpi5"),
        (signal.SIGINT, "openmpi5"),
        (signal.SIGUSR1, "openmpi4"),
        (signal.SIGINT, "mpich"),
        (signal.SIGTERM, "intelmpi"),
    ],
)
def test_all_ranks_stop_at_the_same_step(tmp_path: Path, mpi: str, number: int) -> None:
    arguments = ["--mpirun", mpirun_of(mpi), *LONG_GRACE, "-H", "localhost:3"]
    arguments.append(script(tmp_path, SCRIPT))
    with start([*LAUNCH, *arguments], ranks=3) as job:
        time.sleep(random.random())
        job.send_signal(number)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 75, stderr
    saved = stdout.split()
    assert len(saved) == 6, stdout
    assert len(set(saved)) == 2, stdout
    resume_hint = f"mpiddp: to resume: {shlex.join(['mpiddp', 'launch', *arguments])}"
    # mpirun's own last line may lack a newline.
    assert stderr.endswith(f"{resume_hint}\n"), stderr


def test_the_ranks_save_after_the_terminal_is_closed(tmp_path: Path) -> None:
    with start([*LAUNCH, *LONG_GRACE, "-H", "localhost:2", script(tmp_path, SCRIPT)]) as job:
        assert job.stderr is not None
        job.stderr.close()
        job.send_signal(signal.SIGHUP)
        assert job.stdout is not None
        saved = job.stdout.read().split()
        code = job.wait(timeout=PATIENCE_S)
    assert code == 75
    assert len(saved) == 4, saved


def test_two_hang_up_signals_are_one_request(tmp_path: Path) -> None:
    """The shell and the kernel each send one when a terminal closes."""
    with start([*LAUNCH, *LONG_GRACE, "-H", "localhost:2", script(tmp_path, SCRIPT)]) as job:
        job.send_signal(signal.SIGHUP)
        time.sleep(0.005)
        job.send_signal(signal.SIGHUP)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 75, stderr
    assert len(stdout.split()) == 4, stdout


FAILS_TO_SAVE = """
import os, time, mpiddp
mpiddp.should_stop()
print("ready\\n", end="", flush=True)
while not mpiddp.should_stop():
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    raise OSError("no space for the save")
time.sleep(1000)
"""


def test_a_save_that_fails_in_a_stop_is_a_failure(tmp_path: Path) -> None:
    command = [*LAUNCH, *LONG_GRACE, "--max-restarts=1", "-H", "localhost:2"]
    with start([*command, script(tmp_path, FAILS_TO_SAVE)]) as job:
        job.send_signal(signal.SIGTERM)
        stderr = job.communicate(timeout=PATIENCE_S)[1]
    assert job.returncode == 1, stderr
    sentence = f"mpiddp: rank 1 on {gethostname()} failed first: OSError: no space for the save"
    assert f"{sentence}. The other ranks were stopped.\n" in stderr
    assert "restarting" not in stderr


@pytest.mark.parametrize(
    ("number", "has_reader"),
    [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGINT, False)],
)
def test_a_training_without_a_launcher_saves_and_stops(
    tmp_path: Path, number: int, has_reader: bool
) -> None:
    """It saves even if the same Ctrl-C has ended a `| tee log` that read its output."""
    command = [sys.executable, "-m", "mpiddp", "train", "--use-syn", "--arch=resnet20"]
    command += ["--batch-size=4", "--epochs=1", "--log-every=1", "--out", str(tmp_path / "out")]
    with piped(command) as job:
        assert job.stdout is not None
        while not job.stdout.readline().startswith("epoch 1/1  step 2/"):
            assert job.poll() is None
        assert job.stderr is not None
        if not has_reader:
            job.stdout.close()
            job.stderr.close()
        job.send_signal(number)
        job.wait(timeout=PATIENCE_S)
        stdout, stderr = (job.stdout.read(), job.stderr.read()) if has_reader else ("", "")
    assert job.returncode == 75
    (saved,) = directory.list_steps(tmp_path / "out" / "checkpoints")
    directory.verify(saved)
    if has_reader:
        name = signal.Signals(number).name
        assert stderr == (
            f"mpiddp: {name}: saving and stopping; another signal kills the training at once.\n"
        )
        assert f"stopped at step {directory.step_of(saved)}." in stdout


def test_under_nohup_sighup_is_ignored_and_sigterm_stops(tmp_path: Path) -> None:
    command = ["nohup", *LAUNCH, *LONG_GRACE, "-H", "localhost:2", script(tmp_path, SCRIPT)]
    with start(command) as job:
        job.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        stderr = job.communicate(timeout=PATIENCE_S)[1]
    assert job.returncode == 75, stderr
    assert "SIGTERM: the ranks are saving" in stderr
    assert "SIGHUP" not in stderr


def test_sigusr1_through_a_raw_mpirun_stops_the_job(tmp_path: Path) -> None:
    command = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-np", "3"]
    command += [sys.executable, "-m", "mpiddp", "run", script(tmp_path, SCRIPT)]
    with start(command, ranks=3) as job:
        job.send_signal(signal.SIGUSR1)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 75, stderr
    assert (len(stdout.split()), len(set(stdout.split()))) == (6, 2), stdout


@pytest.mark.parametrize("context", ["fork"])
def test_data_loader_workers_survive_sigusr1(tmp_path: Path, context: str) -> None:
    command = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-np", "1"]
    command += [sys.executable, script(tmp_path, WORKERS), context]
    with start(command, ranks=1) as job:
        job.send_signal(signal.SIGUSR1)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert stdout.startswith("saved "), stderr
    assert job.returncode == 0, stderr


def test_a_script_without_should_stop_gets_sigterm_and_the_grace_period(tmp_path: Path) -> None:
    command = [*LAUNCH, "-H", "localhost:2", "--grace", "120", script(tmp_path, WITHOUT_SUPPORT)]
    with start([*command, "1"]) as job:
        job.send_signal(signal.SIGINT)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert sorted(stdout.splitlines()) == ["received SIGTERM"] * 2 + ["wrote"] * 2
    own = re.findall("mpiddp: .*", stderr)
    assert (job.returncode, own) == (130, ["mpiddp: interrupted: the job was stopped."])


def test_ranks_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    command = [
        *LAUNCH,
        "-H",
        "localhost:2",
        "--grace",
        "1",
        script(tmp_path, WITHOUT_SUPPORT),
        "600",
    ]
    with start(command) as job:
        since = time.monotonic()
        job.send_signal(signal.SIGTERM)
        stdout, _ = job.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - since < 120  # its ranks would take 600 s
    assert "wrote" not in stdout
    assert job.returncode == 130


def test_stop_after_stops_a_training_and_the_printed_command_resumes_it(tmp_path: Path) -> None:
    job = [*LONG_GRACE, "-H", "localhost:2", "-m", "mpiddp", "train", "--use-syn"]
    job += ["--arch", "resnet20", "--batch-size", "2", "--epochs", "1"]
    job += ["--steps-per-epoch", "100", "--resume", "never"]
    for seconds in (4, 8, 16, 32, 64):  # until the time is enough for the ranks to start
        folder = tmp_path / str(seconds)
        folder.mkdir()
        done = subprocess.run(
            [*LAUNCH, "--stop-after", str(seconds), *job],
            env=clean_env(),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        if done.returncode != 130:
            break
    assert done.returncode == 75, done.stderr
    stopped = re.search(r"stopped at step (\d+)", done.stdout)
    assert stopped, done.stdout
    saved = next(folder.glob("runs/*/checkpoints/step_*"))
    assert int(saved.name[5:]) == int(stopped[1]) < 100
    printed = done.stderr.splitlines()[-1].partition("to resume: mpiddp ")[2]
    arguments = shlex.split(printed)
    del arguments[arguments.index("--stop-after") : arguments.index("--stop-after") + 2]
    again = subprocess.run(
        [sys.executable, "-m", "mpiddp", *arguments],
        env=clean_env(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert again.returncode == 0, again.stderr
    assert f"step {stopped[1]}" in again.stdout
    summary = json.loads(next(folder.glob("runs/*/summary.json")).read_text())
    assert summary["steps"] == 100


RANK_0_ENDS_EARLY = """
import os, time, mpiddp
mpiddp.should_stop()
for step in range(1_000_000):
    time.sleep(0.01)
    if os.environ["RANK"] == "0" and step == 3:
        break
    if mpiddp.should_stop():
        print("saved", flush=True)
        break
print("finished", flush=True)
"""


def test_the_other_ranks_stop_after_one_rank_has_finished(tmp_path: Path) -> None:
    command = [*LAUNCH, *LONG_GRACE, "-H", "localhost:2", script(tmp_path, RANK_0_ENDS_EARLY)]
    with piped(command) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "finished\n"
        job.send_signal(signal.SIGUSR1)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, stdout) == (75, "saved\nfinished\n")
    assert "mpiddp: to resume: " in stderr


def test_stop_after_does_not_repeat_a_stop_in_progress(tmp_path: Path) -> None:
    for stop_after_s in (
        10,
        40,
        160,
    ):  # counted from the launch, and a slow machine needs seconds for it
        at = time.monotonic() + stop_after_s
        options = [*LONG_GRACE, "--stop-after", str(stop_after_s), "-H", "localhost:1"]
        wait = str(stop_after_s + 2)
        with piped([*LAUNCH, *options, script(tmp_path, WITHOUT_SUPPORT), wait]) as job:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
            if is_in_time := time.monotonic() < at - 5:
                job.send_signal(signal.SIGTERM)
            stdout, stderr = job.communicate(timeout=PATIENCE_S)
        if is_in_time:
            break
    assert stdout == "received SIGTERM\nwrote\n", stderr


def test_a_reader_that_reads_no_more_does_not_delay_a_stop(tmp_path: Path) -> None:
    """As a pager does, until the walltime is over."""
    command = [*LAUNCH, "-H", "localhost:2", *LONG_GRACE, script(tmp_path, FLOOD)]
    with subprocess.Popen(
        command,
        env=clean_env(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as job:
        wait_until(lambda: waiting_bytes(job.stdout) > 16_000)  # soon it is full
        job.send_signal(signal.SIGTERM)
        wait_until(lambda: all((tmp_path / f"saved{rank}").exists() for rank in (0, 1)))
        job.communicate(timeout=PATIENCE_S)


def waiting_bytes(pipe: Any) -> int:
    """Of at most 65,536 that a pipe holds."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
