"""A failed job restarts from its newest checkpoint, on the hosts that are usable.

Tests mpiddp/launch/restarts.py.
python -m pytest tests/ranks/launch/test_restarts.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, launch, script

FAILS_ONCE = """
import os, pathlib, sys
tries = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    tries.write_text(tries.read_text() + "x")
if len(tries.read_text()) < int(sys.argv[2]):
    sys.exit(3)
"""


@pytest.mark.parametrize(("succeeds_at", "tries", "code"), [(2, 2, 0), (9, 3, 1)])
def test_max_restarts_limits_the_restarts_of_a_failed_job(
    tmp_path: Path, succeeds_at: int, tries: int, code: int
) -> None:
    (tmp_path / "script.py").write_text(FAILS_ONCE)
    (tmp_path / "tries").write_text("")
    command = [*LAUNCH, "-H", "localhost:1", "--max-restarts", "2", f"{tmp_path}/script.py"]
    command += [f"{tmp_path}/tries", str(succeeds_at)]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == code, done.stderr
    assert len((tmp_path / "tries").read_text()) == tries
    assert f"(restart {tries - 1} of 2)." in done.stderr


# `mpiddp launch` that prints each pause instead of waiting.
PRINTS_PAUSES = """
import sys
from mpiddp import cli
from mpiddp.launch import restarts
original = restarts.stop_is_requested
def print_pause(signals, within_s):
    if within_s:
        print("pause", within_s, file=sys.stderr, flush=True)
    return original(signals, within_s=0.0)
restarts.stop_is_requested = print_pause
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("step", "pauses"), [("mpiddp.should_stop()", ["1.0"] * 3), ("pass", ["1.0", "2.0", "4.0"])]
)
def test_the_pause_before_a_restart_grows_only_without_a_step(
    tmp_path: Path, step: str, pauses: list[str]
) -> None:
    job = script(tmp_path, f"import sys, mpiddp; {step}; sys.exit(3)")
    command = [sys.executable, "-c", PRINTS_PAUSES, "launch", "-H", "localhost:1"]
    command += ["--max-restarts", "3", job]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    matches = re.findall(r"^(?:pause (.+)|mpiddp: (restarting) .+)$", done.stderr, re.MULTILINE)
    events = [pause or restarting for pause, restarting in matches]
    assert events == [event for pause in pauses for event in (pause, "restarting")], done.stderr


WAITS_LONG = f"""
import sys
from mpiddp import cli
from mpiddp.launch import restarts
restarts.FIRST_PAUSE_S = restarts.LONGEST_PAUSE_S = {10 * PATIENCE_S}
sys.exit(cli.main())
"""


def test_a_stop_request_before_a_restart_ends_the_launch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITS_LONG, "launch", "-H", "localhost:1"]
    command += ["--max-restarts", "9", script(tmp_path, "1 / 0")]
    with subprocess.Popen(command, env=clean_env(), stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        next(line for line in job.stderr if "failed first: ZeroDivisionError" in line)
        job.terminate()
        last = job.stderr.read().splitlines()[-1]
    assert (last, job.returncode) == ("mpiddp: interrupted before a restart.", 130)


# `mpiddp launch` whose second attempt finds no memory for a folder in /tmp, or for mpirun. Each attempt makes
# two folders: for its control socket, and for mpirun's session.
SECOND_START_FAILS = """
import errno, os, subprocess, sys
from mpiddp import cli
what, number = sys.argv.pop(1), int(sys.argv.pop(1))
starts = []
def once_of(call, is_start):
    def fail_once(*args, **options):
        if is_start(args[0]):
            starts.append(args[0])
            if len(starts) == number:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return call(*args, **options)
    return fail_once
if what == "mkdir":
    viewers = f"/tmp/mpiddp-{os.getuid()}"  # one folder for all attempts, which no job needs
    of_attempt = lambda path: str(path).startswith("/tmp/mpiddp-") and str(path) != viewers
    os.mkdir = once_of(os.mkdir, of_attempt)
else:
    is_mpirun = lambda argv: str(argv[0]).endswith("mpirun") and "--version" not in argv
    subprocess._fork_exec = once_of(subprocess._fork_exec, is_mpirun)
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("failing", "sentence"),
    [
        (("mkdir", "3"), error("cannot create", "mpiddp: ", "/tmp (Cannot allocate memory)")),
        (("mkdir", "4"), error("for mpirun", "mpiddp: ", "Cannot allocate memory")),
        (("mpirun", "2"), error("cannot start", "mpiddp: ", "Cannot allocate memory")),
    ],
)
def test_a_later_start_that_fails_is_a_failed_attempt(
    tmp_path: Path, failing: tuple[str, str], sentence: str
) -> None:
    (tmp_path / "tries").write_text("")
    command = [sys.executable, "-c", SECOND_START_FAILS, *failing, "launch", "-H", "localhost:1"]
    command += ["--max-restarts", "2", script(tmp_path, FAILS_ONCE), f"{tmp_path}/tries", "2"]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tries").read_text() == "xx"
    failed, last = done.stderr.splitlines()[-2:]
    assert re.match(sentence, failed), failed
    assert last.endswith("(restart 2 of 2).")


# `mpiddp launch` that prints which of its folders in /tmp are left.
PRINTS_FOLDERS = """
import os, sys
from mpiddp import cli
made, mkdir = [], os.mkdir
def record(path, *args):
    made.append(path)
    mkdir(path, *args)
os.mkdir = record
code = cli.main()
print(len(made), [path for path in made if os.path.exists(path)])
sys.exit(code)
"""


def test_a_first_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "large.env").write_text(f"LARGE={'x' * (1 << 17)}\n")  # larger than exec allows
    command = [sys.executable, "-c", PRINTS_FOLDERS, "launch", "-H", "localhost:1"]
    command += ["--max-restarts", "2", "--env-file", f"{tmp_path}/large.env", "-m", "platform"]
    env = clean_env({"XDG_RUNTIME_DIR": str(tmp_path)})  # no other launcher's folder for viewers
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (2, "3 []\n"), done.stderr
    sentence = error("cannot start", "mpirun: Argument list too long")
    assert re.search(rf"{sentence}\n\Z", done.stderr), done.stderr


# `mpiddp launch` for which the file server of its command is away while the file DIR/away exists.
PROGRAM_AWAY = """
import errno, os, sys
from mpiddp import cli
folder, stat = sys.argv.pop(1), os.stat
def away(path, *args, **options):
    if path == f"{folder}/job" or str(path) == f"{folder}/job":
        if os.access(f"{folder}/away", os.F_OK):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
    return stat(path, *args, **options)
os.stat = away
sys.exit(cli.main())
"""


def test_a_restart_survives_a_command_whose_file_server_is_away(tmp_path: Path) -> None:
    job, away = tmp_path / "job", tmp_path / "away"
    text = f"[ -e {tmp_path}/tried ] && exit 0\ntouch {tmp_path}/tried {away}\nexit 3\n"
    job.write_text(f"#!/bin/sh\n{text}")
    job.chmod(0o755)
    command = [sys.executable, "-c", PROGRAM_AWAY, str(tmp_path), "launch", "-H", "localhost:1"]
    command += ["--max-restarts", "9", "--", str(job)]
    with subprocess.Popen(
        command, env=clean_env(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stderr is not None
        stale = error(":", f"mpiddp: {job}: Stale file handle")
        assert any(re.fullmatch(f"{stale}\n", line) for line in iter(launcher.stderr.readline, ""))
        away.unlink()
        rest = launcher.stderr.read()
    assert launcher.returncode == 0, rest


REMOVES_ITS_FOLDER = """
import os, sys
os.rmdir(os.getcwd())
sys.exit(3)
"""


def test_a_restart_waits_for_the_working_folder_until_a_stop_request(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [*LAUNCH, "-H", "localhost:1", "--max-restarts", "9"]
    command.append(script(tmp_path, REMOVES_ITS_FOLDER))
    with subprocess.Popen(
        command, env=clean_env(), cwd=folder, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stderr is not None
        sentence = (
            "mpiddp: the working folder is away (No such file or directory); waiting for it …\n"
        )
        assert sentence in iter(job.stderr.readline, "")
        job.terminate()
        rest = job.stderr.read()
    assert (rest, job.returncode) == ("mpiddp: interrupted before a restart.\n", 130)


def test_a_dry_run_leaves_out_the_spares() -> None:
    done = launch("--dry-run", "--spares", "1", "-H", "localhost:1,far.invalid:1", "-m", "platform")
    assert done.returncode == 0, done.stderr
    assert "mpiddp: kept in reserve: far.invalid\n" in done.stderr
    assert "far.invalid" not in done.stdout


ANNOUNCES = """
import os, sys, mpiddp
if mpiddp.announced() is None:
    mpiddp.announce(resume_args=["--resume", "a b"], global_batch_size=12, max_ranks=2)
    sys.exit(3)
mpiddp.announce(resume_args=["--again"], global_batch_size=5)
if os.environ["RANK"] == "0":
    print(os.environ["WORLD_SIZE"], sys.argv[1:], mpiddp.announced(), flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("end", "attempts"), [(0, 1), (3, 2)])
def test_restarts_use_the_first_announcement_of_a_script(
    tmp_path: Path, end: int, attempts: int
) -> None:
    # An announcement in the environment, from the launcher of an outer job, is ignored.
    outer = {"MPIDDP_ANNOUNCED": '{"global_batch_size": 7, "world_size": 7}'}
    job = (script(tmp_path, ANNOUNCES), str(end))
    done = launch("-H", "localhost:3", "--max-restarts", "2", *job, **outer)
    assert done.returncode == (1 if end else 0), done.stderr
    stdout = f"2 ['{end}', '--resume', 'a b'] Announced(global_batch_size=12, world_size=3)\n"
    assert done.stdout == stdout * attempts
    sentence = "mpiddp: 2 ranks instead of 3; the global batch stays at 12.\n"
    assert done.stderr.count(sentence) == attempts
