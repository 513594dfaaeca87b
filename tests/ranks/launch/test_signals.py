"""Signals as habits send them: twice from `timeout`, to every process from systemd, with a reader that dies.

Tests mpiddp/launch/supervise/{signals,mpirun}.py, mpiddp/launch/streams/output.py,
mpiddp/runtime/job/stop.py.
python -m pytest tests/ranks/launch/test_signals.py
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import CTRL_C_AGAIN_S, LAUNCH, ROOT, clean_env, launch, script
from tests.support.running import descendants
from tests.support.signals import SLOW_SAVE
from tests.support.stopping import LONG_GRACE, SCRIPT, piped, start

# --- which signals count ---


# --- timeout(1) ---


def test_timeout_sends_sigterm_twice_and_the_job_saves(tmp_path: Path) -> None:
    """Its child first, then its whole process group: often too far apart for the kernel to merge them."""
    job = script(tmp_path, SCRIPT)
    with start([*LAUNCH, *LONG_GRACE, "-H", "localhost:2", job]) as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)  # what a busy machine puts between the two
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, stderr
    assert len(stdout.split()) == 4, stdout


@pytest.mark.slow
def test_stops_by_timeout_itself_all_save(tmp_path: Path) -> None:
    job = script(tmp_path, SCRIPT)
    for _ in range(5):
        command = ["timeout", "--signal=TERM", "1000", *LAUNCH, *LONG_GRACE, "-H", "localhost:2"]
        with start([*command, job]) as process:
            process.send_signal(signal.SIGTERM)  # timeout(1) then does what it does at its limit
            stdout, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 75, stderr
        assert len(stdout.split()) == 4, stderr
        assert "mpiddp: stopped on request.\n" in stderr


# --- SIGTERM to every process ---


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4", "mpich"])
def test_sigterm_to_every_process_lets_the_ranks_save(tmp_path: Path, mpi: str) -> None:
    """Also their DataLoaders' workers. systemd and batch systems send it so."""
    options = ["--mpirun", mpirun_of(mpi), *LONG_GRACE, "-H", "localhost:2"]
    with start([*LAUNCH, *options, script(tmp_path, SLOW_SAVE)]) as job:
        pids = [job.pid, *descendants(job.pid)]
        assert len(pids) >= 8  # launcher, mpirun, two ranks with two workers each
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, stdout) == (75, "saved\nsaved\n"), stderr


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4"])
def test_a_second_request_still_ends_an_mpirun_that_is_shielded_from_sigterm(
    tmp_path: Path, mpi: str
) -> None:
    options = ["--mpirun", mpirun_of(mpi), *LONG_GRACE, "-H", "localhost:2"]
    with start([*LAUNCH, *options, script(tmp_path, SLOW_SAVE)]) as job:
        job.send_signal(signal.SIGINT)
        time.sleep(CTRL_C_AGAIN_S)
        job.send_signal(signal.SIGINT)
        stdout, _ = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, stdout) == (130, "")


CHILDREN = """
import multiprocessing, os, subprocess, time, mpiddp
fork = multiprocessing.get_context("fork")
def answer(pipe):
    while True:
        pipe.send(pipe.recv())
def start():
    ours, others = fork.Pipe()
    child = fork.Process(target=answer, args=(others,), daemon=True)
    child.start()
    ours.send("")
    ours.recv()
    return child, ours
def sigterm_of_a_stranger(pid):
    subprocess.run(["kill", "-TERM", str(pid)], check=True)
def is_pending(pid):
    lines = open(f"/proc/{pid}/status").read().splitlines()
    return any(line.startswith("ShdPnd") and int(line.split()[1], 16) for line in lines)
child, _ = start()
sigterm_of_a_stranger(child.pid)
child.join()
print("while the rank cannot stop:", child.exitcode)
child, pipe = start()
mpiddp.should_stop()
sigterm_of_a_stranger(child.pid)
while is_pending(child.pid):
    time.sleep(0.01)
for _ in range(100):
    pipe.send("")
    pipe.recv()
child.terminate()
child.join()
print("by the rank:", child.exitcode)
program = subprocess.Popen(["sleep", "1000"], preexec_fn=os.setsid)
program.terminate()
print("a program:", program.wait())
"""


def test_a_child_leaves_sigterm_to_a_rank_that_can_stop(tmp_path: Path) -> None:
    """Also a child from before the rank could; and a program that the rank executes ends as always."""
    done = launch("-H", "localhost:1", script(tmp_path, CHILDREN))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "while the rank cannot stop: -15\nby the rank: -15\na program: -15\n"


FAILS = """
import os, sys, time, mpiddp
mpiddp.should_stop()
print("ready\\n", end="", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    raise RuntimeError("a bug")
time.sleep(1000)
"""


def test_a_rank_that_takes_sigterm_as_a_request_ends_when_the_job_fails(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with start([*LAUNCH, "-H", "localhost:2", script(tmp_path, FAILS), str(go)]) as job:
        pids = descendants(job.pid)
        go.touch()
        assert job.wait(timeout=PATIENCE_S) == 1
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- the reader of the output goes away ---


def test_ctrl_c_that_ends_a_tee_as_well_lets_the_ranks_save(tmp_path: Path) -> None:
    """`mpiddp launch … 2>&1 | tee log` and Ctrl-C."""
    saved = tmp_path / "saved"
    code = SCRIPT.replace("    if mpiddp", "    print('x' * 5000, flush=True)\n    if mpiddp")
    code = code.replace(
        "sys.exit(75)", f"open({str(saved)!r} + str(rank), 'w').close(); sys.exit(75)"
    )
    command = [*LAUNCH, *LONG_GRACE, "-H", "localhost:2", script(tmp_path, code)]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tee:
        assert tee.stdin is not None
        assert tee.stdout is not None
        with subprocess.Popen(
            command, env=clean_env(), cwd=ROOT, stdout=tee.stdin, stderr=subprocess.STDOUT
        ) as job:
            tee.stdin.close()
            while b"xxxx" not in tee.stdout.readline():
                pass
            tee.send_signal(signal.SIGINT)
            job.send_signal(signal.SIGINT)
            assert job.wait(timeout=PATIENCE_S) == 75
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


PRINTS = """
for line in range(20_000):
    print("line", line, flush=True)
"""


def test_head_ends_neither_the_job_nor_blames_a_rank(tmp_path: Path) -> None:
    """`mpiddp launch … | head -2`"""
    launch = shlex.join([*LAUNCH, "-H", "localhost:1", script(tmp_path, PRINTS)])
    done = subprocess.run(
        ["bash", "-c", f"{launch} | head -2; exit ${{PIPESTATUS[0]}}"],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (0, "line 0\nline 1\n"), done.stderr
    assert done.stderr.endswith(
        "mpiddp: stdout: its reader went away. The job continues, and its output there is lost.\n"
    )


def test_a_stdout_that_is_closed_from_the_beginning_is_no_error(tmp_path: Path) -> None:
    launch = shlex.join([*LAUNCH, "-H", "localhost:1", script(tmp_path, PRINTS)])
    done = subprocess.run(
        ["bash", "-c", f"{launch} >&-"], env=clean_env(), cwd=ROOT, timeout=PATIENCE_S
    )
    assert done.returncode == 0


BYTES = """
import os, sys
data = bytes(range(256)) * 4000
for stream in (1, 2):
    rest = data
    while rest:
        rest = rest[os.write(stream, rest):]
"""


@pytest.mark.parametrize("mpi", ["openmpi5", "mpich"])
def test_every_byte_of_the_output_arrives_unchanged(tmp_path: Path, mpi: str) -> None:
    """stdout of Open MPI's ranks is a terminal, and would turn a newline into two bytes."""
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), "-H", "localhost:1", script(tmp_path, BYTES)]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(bytes(range(256))) == 4000
    assert done.stdout == bytes(range(256)) * 4000


def test_a_slow_reader_slows_the_ranks_and_loses_nothing(tmp_path: Path) -> None:
    text = "for line in range(300_000): print(line)\nopen('done', 'w').close()"
    command = [*LAUNCH, "-H", "localhost:1", script(tmp_path, text)]
    with piped(command, tmp_path) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "0\n"
        time.sleep(1.0)
        assert not (tmp_path / "done").exists()  # pipes hold 64 KiB each, and this is 2 MB
        rest = job.stdout.read().split()
        assert job.wait(timeout=PATIENCE_S) == 0
    assert rest == [str(line) for line in range(1, 300_000)]


# --- Ctrl-Z ---


def test_a_launcher_that_was_stopped_does_not_end_its_ranks(tmp_path: Path) -> None:
    """SIGSTOP for longer than --hang-timeout, as after Ctrl-Z and a while."""
    options = [*LONG_GRACE, "--hang-timeout", "3", "-H", "localhost:2"]
    equally_fast = SCRIPT.replace("0.003 if rank else 0.01", "0.01")
    assert equally_fast != SCRIPT
    with start([*LAUNCH, *options, script(tmp_path, equally_fast)]) as job:
        os.kill(job.pid, signal.SIGSTOP)
        time.sleep(8)
        os.kill(job.pid, signal.SIGCONT)
        time.sleep(2)
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 75, stderr
    assert len(stdout.split()) == 4, stdout


MANY_STEPS = """
import sys, mpiddp
from mpiddp.runtime.job import reports as control_client
control_client.PROGRESS_EVERY_S = 0.0
mpiddp.should_stop()
print("ready\\n", end="", flush=True)
letter = sys.argv[2]
shown = {f"{number:02}{letter * 62}": letter * 64 for number in range(16)} if letter else {}
for step in range(int(sys.argv[1])):
    mpiddp.progress(step, **shown)
open("through", "w").close()
"""


@pytest.mark.parametrize(("steps", "shown"), [("300000", ""), ("3000", "x"), ("3000", "漢")])
def test_ranks_that_report_many_steps_do_not_wait_for_a_stopped_launcher(
    tmp_path: Path, steps: str, shown: str
) -> None:
    """As many messages as a rank sends in days, or the longest ones: they would fill every buffer."""
    job_script = script(tmp_path, MANY_STEPS)
    with start([*LAUNCH, "-H", "localhost:1", job_script, steps, shown], tmp_path, ranks=1) as job:
        os.kill(job.pid, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (tmp_path / "through").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            os.kill(job.pid, signal.SIGCONT)  # else nothing here would end
        assert job.wait(timeout=PATIENCE_S) == 0
