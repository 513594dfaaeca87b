"""`mpiddp launch` on this machine, with the real mpirun of every MPI that is installed.

python -m tests.mpis install     # the MPIs beside Open MPI 5

Tests mpiddp/launch/.
python -m pytest tests/test_launch.py
"""

from __future__ import annotations

import json
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
from socket import gethostname

import pytest

from tests.mpis import PACKAGES, mpirun_of
from tests.patience import PATIENCE_S
from tests.ranks import LAUNCH, ROOT, clean_env, launch, own_lines, script

MPIS = (pytest.param("openmpi5", marks=pytest.mark.quick), *PACKAGES)
OTHERS = "The other ranks were stopped."
TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
print(json.dumps([[int(os.environ[name]) for name in names], sys.argv[1:], os.getcwd()]), flush=True)
"""
SLEEP = """
import os, signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"heard\\n"))  # amid a print as well
print("ready", flush=True)
time.sleep(1000)
"""


def running(word: str) -> list[str]:
    """The command lines of this machine's processes that have `word` among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word in arguments:
            found.append(" ".join(arguments))
    return found


def test_a_dry_run_loads_nothing_heavy_and_nothing_of_the_ranks(tmp_path: Path) -> None:
    code = (
        "import sys; from mpiddp.launch.main import main; main(sys.argv[1:]);"
        "heavy = ('torch', 'numpy', 'mpi4py', 'asyncio')\n"
        "ranks = tuple(f'mpiddp.{each}' for each in ('runtime', 'checkpoints', 'train', 'bench'))\n"
        "print([name for name in sys.modules if name in heavy or name.startswith(ranks)])"
    )
    command = [sys.executable, "-c", code, "--dry-run", "-H", "localhost:2", script(tmp_path, "")]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("mpi", MPIS)
def test_a_script_runs_with_its_arguments_on_every_slot(tmp_path: Path, mpi: str) -> None:
    done = launch(
        *("--mpirun", mpirun_of(mpi), "-H", "localhost:2"),
        *(script(tmp_path, TELL), "-n", "5", "--dry-run"),
    )
    assert done.returncode == 0, done.stderr
    facts = sorted(json.loads(line) for line in done.stdout.splitlines())
    arguments = [["-n", "5", "--dry-run"], str(ROOT)]
    assert facts == [[[0, 2, 0, 2, 0], *arguments], [[1, 2, 1, 2, 0], *arguments]]


def test_this_machine_needs_no_hostfile(tmp_path: Path) -> None:
    path = script(tmp_path, TELL)
    some = sorted(os.sched_getaffinity(0))[:2]  # a rank for each of very many would take long
    cores = len(some)

    def launch_on_some(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*LAUNCH, *words, path],
            env=clean_env({"CUDA_VISIBLE_DEVICES": ""}),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            preexec_fn=lambda: os.sched_setaffinity(0, some),
        )

    for words, ranks in (((), 1), (("-n", str(cores)), cores), (("--npernode", str(cores)), cores)):
        done = launch_on_some(*words)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == ranks
        slots = 1 if words == () else cores
        assert own_lines(done.stderr) == [
            f"mpiddp: no hosts given: using this machine, slots={slots}"
        ]
    done = launch_on_some("-n", str(cores + 1))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == (
        f"-n {cores + 1} is more than the {cores} slots of this machine (localhost={cores})."
    )


@pytest.mark.quick
@pytest.mark.parametrize(("code", "expected"), [(3, 1), (2, 2), (75, 75)])
def test_exit_codes(tmp_path: Path, code: int, expected: int) -> None:
    path = script(tmp_path, f"raise SystemExit({code})")
    done = launch("-H", "localhost:2", path)
    assert done.returncode == expected
    said = {
        3: [f"mpiddp: rank N on {gethostname()} ended first, with exit code 3. {OTHERS}"],
        75: [f"mpiddp: to resume: mpiddp launch -H localhost:2 {path}"],
    }
    sentences = [re.sub("rank [01]", "rank N", line) for line in own_lines(done.stderr)]
    assert sentences == said.get(code, [])


@pytest.mark.quick
def test_a_killed_rank_is_named_by_its_signal(tmp_path: Path) -> None:
    text = "import os; os.kill(os.getpid(), 9)"
    done = launch("-H", "localhost:1", script(tmp_path, text))
    assert done.returncode == 1
    assert own_lines(done.stderr) == [f"mpiddp: rank 0 on {gethostname()} was killed by SIGKILL."]


@pytest.mark.parametrize("mpi", ["openmpi5", "intelmpi"])  # the latter needs a file as well
def test_the_command_of_a_dry_run_runs_when_it_is_pasted(tmp_path: Path, mpi: str) -> None:
    told = launch(
        *("--mpirun", mpirun_of(mpi), "-H", "localhost:2", "-x", "GREETING=a b", "--dry-run"),
        # A line and its end in one piece: Intel's mpirun would mix the pieces of two ranks.
        script(tmp_path, "import os; os.write(1, os.environb[b'GREETING'] + b'\\n')"),
    )
    pasted = told.stdout.partition("\n\n")[0]
    # By hand, Intel's mpirun needs its folder on PATH.
    path = f"{os.environ['PATH']}:{Path(mpirun_of(mpi)).parent}"
    done = subprocess.run(
        ["bash", "-c", f"cd {tmp_path}\n{pasted}"],
        env=clean_env({"PATH": path}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.splitlines() == ["a b", "a b"], done.stderr


def test_a_bad_script_ends_the_launch_before_anything_starts() -> None:
    done = launch("-H", "localhost:2", "nowhere.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"nowhere.py not found (looked in {ROOT}).\n"


@pytest.mark.parametrize(  # every MPI is interrupted in test_launch_hosts.py
    ("mpi", "how"),
    [
        pytest.param("openmpi5", "interrupted", marks=pytest.mark.quick),
        ("openmpi5", "deaf"),
        ("mpich", "deaf"),
    ],
)
def test_ctrl_c_once_stops_the_job_and_twice_at_once(tmp_path: Path, mpi: str, how: str) -> None:
    path = script(tmp_path, SLEEP)
    options = ["--mpirun", mpirun_of(mpi), "--grace", "300", "-H", "localhost:2"]
    with started([*options, path, how]) as launcher:
        launcher.send_signal(signal.SIGINT)
        if how == "deaf":  # two that come at once would be one
            assert launcher.stdout is not None
            assert [launcher.stdout.readline() for _ in range(2)] == ["heard\n"] * 2
            launcher.send_signal(signal.SIGINT)
        start = time.monotonic()
        stderr = launcher.communicate(timeout=PATIENCE_S)[1]
    assert time.monotonic() - start < 100  # of the 300 s of grace
    assert launcher.returncode == 130
    # mpirun's own last words may end without a newline.
    assert stderr.endswith("mpiddp: interrupted: the job was stopped.\n"), stderr
    assert running(path) == []


def test_a_rank_that_hangs_is_ended_after_one_ctrl_c(tmp_path: Path) -> None:
    path = script(tmp_path, SLEEP)
    with started(["--grace", "1", "-H", "localhost:2", path, "deaf"]) as launcher:
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 130
    assert running(path) == []


def test_the_job_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    path = script(tmp_path, SLEEP)
    with started(["-H", "localhost:2", path]) as launcher:
        launcher.kill()
        launcher.communicate(timeout=PATIENCE_S)
    deadline = time.monotonic() + 60
    while running(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running(path) == []


def started(arguments: list[str]) -> subprocess.Popen[str]:
    """A launcher whose two ranks have said that they are ready."""
    launcher = subprocess.Popen(
        [*LAUNCH, *arguments],
        env=clean_env(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    return launcher


def in_bash(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_what_the_shell_had_started_before_is_left_alone(tmp_path: Path) -> None:
    """As where the launcher takes the place of a container's first shell."""
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


def test_orphans_that_have_ended_are_collected(tmp_path: Path) -> None:
    """As of a script that sends each checkpoint away in the background."""
    path = script(
        tmp_path,
        "import subprocess, time\n"
        "for _ in range(20): subprocess.run(['sh', '-c', 'true &'])\n"
        "time.sleep(0.5); print('ready', flush=True); time.sleep(1000)\n",
    )
    with started(["-H", "localhost:2", path]) as launcher:
        deadline = time.monotonic() + 60
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


def test_a_process_may_have_any_name(tmp_path: Path) -> None:
    """The kernel cuts names at 15 bytes, be it in the middle of a character."""
    stranger = tmp_path / "aaaaaaaaaaaaaaé"
    shutil.copy("/bin/sleep", stranger)
    with subprocess.Popen([stranger, "60"]) as running_stranger:
        done = launch("-H", "localhost:1", script(tmp_path, "print('ran', flush=True)"))
        running_stranger.kill()
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


FORKS = """
import os, sys
child = os.fork()
if child == 0:
    sys.exit(0)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_child_that_a_rank_forks_may_exit(tmp_path: Path) -> None:
    """It is no rank: it neither reports its end nor leaves the others' store."""
    done = launch("-H", "localhost:2", script(tmp_path, FORKS))
    assert (done.returncode, done.stdout) == (0, "child 0\n" * 2), done.stderr


def test_help_and_bad_options_of_the_training_need_no_job() -> None:
    done = launch("-H", "nowhere.invalid:2", "-m", "mpiddp", "train", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: mpiddp train")
    done = launch("-H", "nowhere.invalid:2", "-m", "mpiddp", "train", "--epochs=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "mpiddp train: argument --epochs: expected a whole number, 1 or more, not '0'. "
        "See: mpiddp train --help\n"
    )


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


@pytest.mark.parametrize("words", [["--help"], ["--dry-run", "-H", "localhost:2", "-m", "a"]])
def test_a_reader_that_goes_away_gets_no_traceback(words: list[str]) -> None:
    line = shlex.join([*LAUNCH, *words])
    done = in_bash(f"{{ sleep 0.2; {line}; }} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode in (0, 1)  # argparse takes no notice
    assert "Broken pipe" not in done.stderr, done.stderr


def test_hosts_without_slots_may_be_broken(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("nowhere.invalid slots=0\nlocalhost slots=1\n")
    done = launch("--hostfile", str(hostfile), script(tmp_path, "print('ran', flush=True)"))
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 1), ("sys.exit(2)", 2)])
def test_ranks_that_cannot_reach_the_launcher_count_by_mpiruns_word(
    tmp_path: Path, end: str, code: int
) -> None:
    """As where the hosts' names are known to ssh alone."""
    text = (
        "import os, sys, time; from dataclasses import replace\n"
        "from mpiddp.launch import plan, restarts\n"
        "from mpiddp.launch.options import parse_options\n"
        "options = parse_options(sys.argv[1:])\n"
        "planned = plan.make_plan(options, time.time(), os.environ)\n"
        "request = replace(planned.request, control_address=None)\n"
        "outcome = restarts.run(options, replace(planned, request=request), time.time())\n"
        "sys.exit(outcome.code)\n"
    )
    command = [sys.executable, "-c", text, "-H", "localhost:2"]
    done = subprocess.run(
        [*command, script(tmp_path, f"import sys\n{end}")],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == code, done.stderr


def test_processes_that_mpirun_leaves_behind_are_killed(tmp_path: Path) -> None:
    """Even a daemon in a session of its own, that does not listen to SIGTERM."""
    daemon = tmp_path / "daemon"
    daemon.write_text("#!/bin/sh\ntrap '' TERM\nwhile true; do sleep 0.1; done\n")
    daemon.chmod(0o755)
    code = (
        "import os, sys; from selectors import DefaultSelector\n"
        "from mpiddp.launch.supervise import supervisor; supervisor.ORPHANS_S = 0.3\n"
        "from mpiddp.launch.supervise.job_state import JobState\n"
        "from mpiddp.launch.supervise.signals import signals_on_socket\n"
        "job = supervisor.Supervisor(DefaultSelector(), None, JobState([]), supervisor.Limits())\n"
        "with signals_on_socket() as signals:\n"
        "    print(job.run(['sh', '-c', sys.argv[1]], os.environ, signals))"
    )
    command = [sys.executable, "-c", code, f"setsid {daemon} & sleep 0.3; exit 7"]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    assert (
        done.stdout
        == "MpirunEnd(code=7, interrupted=False, was_killed=False, failed_stopping=False)\n"
    )
    assert running(str(daemon)) == []
