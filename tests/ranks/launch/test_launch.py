"""`mpiddp launch` on this machine, with the real mpirun of every MPI that is installed.

python -m tests.support.mpis install     # the MPIs beside Open MPI 5

Tests mpiddp/launch/, and the job of mpiddp/doctor/main.py.
python -m pytest tests/ranks/launch/test_launch.py
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mpiddp.doctor import main
from mpiddp.doctor.report import FAIL
from tests.support.errors import error
from tests.support.first_jobs import PRINT_IDENTITY, SLEEP, started
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, launch, own_lines, script
from tests.support.running import running


def test_a_dry_run_imports_no_heavy_modules(tmp_path: Path) -> None:
    code = (
        "import sys; from mpiddp.launch.main import main; main(sys.argv[1:]);"
        "heavy = ('torch', 'numpy', 'mpi4py', 'asyncio')\n"
        "ranks = tuple(f'mpiddp.{each}' for each in ('runtime', 'checkpoints', 'train', 'bench'))\n"
        "print([name for name in sys.modules if name in heavy or name.startswith(ranks)])"
    )
    command = [sys.executable, "-c", code, "--dry-run", "-H", "localhost:2", script(tmp_path, "")]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_this_machine_needs_no_hostfile(tmp_path: Path) -> None:
    """Nor a HOME, which a service may lack, and without which Open MPI's mpirun does not start."""
    path = script(tmp_path, PRINT_IDENTITY)
    some = sorted(os.sched_getaffinity(0))[:2]  # one rank per core of a large machine would be slow
    cores = len(some)
    env = clean_env({"CUDA_VISIBLE_DEVICES": ""})
    env.pop("HOME", None)

    def launch_on_some(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*LAUNCH, *options, path],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            preexec_fn=lambda: os.sched_setaffinity(0, some),
        )

    for options, ranks in (
        ((), 1),
        (("-n", str(cores)), cores),
        (("--npernode", str(cores)), cores),
    ):
        done = launch_on_some(*options)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == ranks
        slots = 1 if options == () else cores
        assert own_lines(done.stderr) == [
            f"mpiddp: no hosts given: using this machine, slots={slots}"
        ]
    done = launch_on_some("-n", str(cores + 1))
    assert (done.returncode, done.stdout) == (2, "")
    values = (f"-n {cores + 1} ", f" {cores} slots", f"this machine (localhost={cores})")
    assert re.fullmatch(error("slots of", *values), done.stderr.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("mpi", ["openmpi5", "intelmpi"])  # the latter also needs a file
def test_the_command_printed_by_a_dry_run_can_be_pasted(tmp_path: Path, mpi: str) -> None:
    greeting = {"GREETING": "a b"}
    dry = launch(
        *("--mpirun", mpirun_of(mpi), "-H", "localhost:2", "-x", "GREETING", "--dry-run"),
        # Print a line and its newline in one piece: Intel's mpirun would mix the pieces of two ranks.
        script(tmp_path, "import os; os.write(1, os.environb[b'GREETING'] + b'\\n')"),
        **greeting,
    )
    pasted = dry.stdout.partition("\n\n")[0]
    # By hand, Intel's mpirun needs its folder on PATH.
    path = f"{os.environ['PATH']}:{Path(mpirun_of(mpi)).parent}"
    done = subprocess.run(
        ["bash", "-c", f"cd {tmp_path}\n{pasted}"],
        env=clean_env({"PATH": path, **greeting}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.splitlines() == ["a b", "a b"], done.stderr


def test_each_mpirun_has_a_session_folder_of_its_own(tmp_path: Path) -> None:
    """Those that share one disturb each other, see `openmpi.needs_own_session`."""
    path = script(tmp_path, "import os; print(os.environ['OMPI_FILE_LOCATION'])")
    done = launch("-H", "localhost:1", path, TMPDIR=str(tmp_path))
    session = Path(done.stdout).relative_to(tmp_path)
    assert session.parts[0].startswith("mpiddp-")
    assert not (tmp_path / session.parts[0]).exists()
    done = launch("-H", "localhost:1", path, PRTE_MCA_prte_local_tmpdir_base=str(tmp_path))
    assert Path(done.stdout).parts[:-3] == tmp_path.parts  # the user's own choice


def test_a_missing_script_is_reported_before_anything_starts() -> None:
    done = launch("-H", "localhost:2", "nowhere.py")
    assert (done.returncode, done.stdout) == (2, "")
    sentence = error("not found", "nowhere.py ", f" {ROOT})")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    path = script(tmp_path, SLEEP)
    with started(["--grace", "1", "-H", "localhost:2", path, "ignores_sigterm"]) as launcher:
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 130
    assert running(path) == []


def test_the_job_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    path = script(tmp_path, SLEEP)
    with started(["-H", "localhost:2", path]) as launcher:
        launcher.kill()
        launcher.communicate(timeout=PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while running(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running(path) == []


def in_bash(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_earlier_children_of_the_launchers_process_are_not_killed(tmp_path: Path) -> None:
    """For example if a container's first shell replaces itself by the launcher."""
    stranger = tmp_path / "stranger"
    stranger.write_text('#!/bin/sh\nwhile [ -e "$0" ]; do sleep 1; done\n')
    stranger.chmod(0o755)
    line = shlex.join([*LAUNCH, "-H", "localhost:1", script(tmp_path, "")])
    try:
        done = in_bash(f"{stranger} >/dev/null 2>&1 & exec {line}")
        assert done.returncode == 0, done.stderr
        assert len(running(str(stranger))) == 1
    finally:
        stranger.unlink()  # which ends it


def test_the_launcher_reaps_orphans_that_have_ended(tmp_path: Path) -> None:
    """For example of a script that uploads each checkpoint in the background."""
    path = script(
        tmp_path,
        "import subprocess, time\n"
        "for _ in range(20): subprocess.run(['sh', '-c', 'true &'])\n"
        "time.sleep(0.5); print('ready', flush=True); time.sleep(1000)\n",
    )
    with started(["-H", "localhost:2", path]) as launcher:
        deadline = time.monotonic() + PATIENCE_S
        while (left := zombies_of(launcher.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        launcher.terminate()
        launcher.communicate(timeout=PATIENCE_S)
    assert left == 0


def zombies_of(parent: int) -> int:
    found = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found += entry.read_bytes().rpartition(b") ")[2].startswith(b"Z %d " % parent)
    return found


def test_a_process_name_may_be_invalid_utf_8(tmp_path: Path) -> None:
    """The kernel truncates names to 15 bytes, even in the middle of a character."""
    stranger = tmp_path / "aaaaaaaaaaaaaaé"
    shutil.copy("/bin/sleep", stranger)
    with subprocess.Popen([stranger, "60"]) as running_stranger:
        done = launch("-H", "localhost:1", script(tmp_path, "print('ran', flush=True)"))
        running_stranger.kill()
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


FORKS = """
import os, sys
if os.fork() == 0:
    sys.exit(0)
if os.fork() == 0:
    raise ValueError("of a child")
print(*sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)), flush=True)
"""


def test_a_child_that_a_rank_forks_may_end_as_it_likes(tmp_path: Path) -> None:
    """It is not a rank: it does not report its end, and does not leave the store of the ranks."""
    done = launch("-H", "localhost:2", script(tmp_path, FORKS))
    assert (done.returncode, done.stdout) == (0, "0 1\n" * 2), done.stderr
    assert done.stderr.count("ValueError: of a child\n") == 2
    assert "mpiddp: " not in done.stderr


def test_help_and_bad_options_of_train_start_no_job() -> None:
    done = launch("-H", "nowhere.invalid:2", "-m", "mpiddp", "train", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: mpiddp train")
    done = launch("-H", "nowhere.invalid:2", "-m", "mpiddp", "train", "--epochs=0")
    assert (done.returncode, done.stdout) == (2, "")
    sentence = error("--help", "mpiddp train: ", "--epochs: ", "'0'", "mpiddp train --help")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


def test_a_hostfile_from_a_pipe_serves_a_restart(tmp_path: Path) -> None:
    fails_once = (
        "import os, pathlib, sys\n"
        "mark = pathlib.Path(sys.argv[1])\n"
        "if mark.exists(): print('again', flush=True)\n"
        "else: mark.touch(); sys.exit(3)\n"
    )
    line = shlex.join([*LAUNCH, "--max-restarts=1", "--hostfile", "HOSTS"])
    line = line.replace("HOSTS", "<(echo localhost slots=1)")
    done = in_bash(f"{line} {script(tmp_path, fails_once)} {tmp_path / 'mark'}")
    assert (done.returncode, done.stdout) == (0, "again\n"), done.stderr


@pytest.mark.parametrize("options", [["--help"], ["--dry-run", "-H", "localhost:2", "-m", "a"]])
def test_a_closed_stdout_gets_no_traceback(options: list[str]) -> None:
    line = shlex.join([*LAUNCH, *options])
    done = in_bash(f"{{ sleep 0.2; {line}; }} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode in (0, 1)  # argparse ignores the broken pipe
    assert "Broken pipe" not in done.stderr, done.stderr


def test_the_job_of_the_doctor_may_print_any_bytes() -> None:
    line, _ = main._run_job([], ["-n", "1", "--", "sh", "-c", r"printf '\377' >&2; exit 3"])
    assert (line.status, line.fact.partition(":")[0]) == (FAIL, "exit code 1")


def test_hosts_without_slots_may_be_unreachable(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("nowhere.invalid slots=0\nlocalhost slots=1\n")
    done = launch("--hostfile", str(hostfile), script(tmp_path, "print('ran', flush=True)"))
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
