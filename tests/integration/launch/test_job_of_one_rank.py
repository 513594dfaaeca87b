"""Jobs of one rank, started by a made-up starter, which needs no MPI: from the command line to the exit code.

Tests mpiddp/launch/{main,restarts}.py, supervise/, starters/. A row of the table is all that a starter needs.
python -m pytest tests/integration/launch/test_job_of_one_rank.py
"""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.launch import job as jobs_of
from mpiddp.launch.main import main
from mpiddp.launch.starters import table
from mpiddp.launch.starters.command import Command, RankStarter, Request, StarterKind, flag
from tests.support.errors import error


def compose(starter: RankStarter, request: Request) -> Command:
    flags = (flag("--quiet", why="why"),)
    files = {f"{request.scratch}/hosts": "\n".join(request.names_of_ranks) + "\n"}
    return Command(str(starter.program), flags, request.job, request.settings, files)


MADE_UP = StarterKind(
    "Made Up", re.compile("Made Up ([0-9.]+)"), compose, refuses={"loud": "this test"}
)

STARTER = """\
#!/bin/sh
[ "$1" = --version ] && echo "Made Up 1.5" && exit
echo "the starter's own words" >&2
while [ "${1#--}" != "$1" ]; do shift; done
"$@"
"""


class Jobs:
    """Runs `mpiddp launch` in this process."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._folder, self._capfd = folder, capfd
        self._mpirun = folder / "mpirun"
        self._mpirun.write_text(STARTER)
        self._mpirun.chmod(0o755)

    def options(self, script: str, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
        path = self._folder / "job.py"
        path.write_text(f"import os, sys\n{script}\n")
        job = ["--", sys.executable, str(path), *arguments]  # a command's rank needs no torch
        return ["--mpirun", str(self._mpirun), "-n", "1", *options, *job]

    def run(
        self, script: str, *options: str, arguments: tuple[str, ...] = ()
    ) -> tuple[int, str, str]:
        code = main(self.options(script, *options, arguments=arguments))
        return code, *self._capfd.readouterr()


@pytest.fixture(name="jobs")
def a_starter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Jobs:
    monkeypatch.setattr(table, "STARTERS", (*table.STARTERS, MADE_UP))
    monkeypatch.setattr(jobs_of, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    for name in [name for name in os.environ if name.startswith("MPIDDP_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return Jobs(tmp_path, capfd)


def test_a_job_that_succeeds(jobs: Jobs) -> None:
    code, out, err = jobs.run("print('arguments', *sys.argv[1:])", arguments=("-x", "--dry-run"))
    assert (code, out) == (0, "arguments -x --dry-run\n")
    assert "the starter's own words" in err


def test_a_dry_run_starts_nothing(jobs: Jobs) -> None:
    code, out, _ = jobs.run("raise SystemExit(9)", "--dry-run", "--mpi-args=--fast")
    assert code == 0
    assert "--quiet --fast " in out
    assert "  --quiet\n      why\n" in out
    assert "  --fast\n      --mpi-args, as you wrote them\n" in out


def test_an_argument_that_contradicts_the_starter_is_refused(jobs: Jobs) -> None:
    sentence = error("would contradict", "--mpi-args: --loud ", " this test.")
    with pytest.raises(UserError, match=f"^{sentence}$"):
        jobs.run("", "--mpi-args=--loud")


def test_a_rank_that_fails_is_named(jobs: Jobs) -> None:
    code, _, err = jobs.run("raise ValueError('no such data')")
    assert code == 1
    assert "ValueError: no such data" in err
    assert re.search(r"^mpiddp: rank 0 on .* exit code 1", err, re.MULTILINE), err
    assert "restart" not in err


FAILS_TWICE = """
names = ("MPIDDP_RUN_ID", "MPIDDP_RESTART_COUNT", "MPIDDP_MAX_RESTARTS")
print(*(os.environ[name] for name in names), *sys.argv[1:], flush=True)
import mpiddp
mpiddp.announce(resume_args=["--resume"], max_ranks=1)
if int(os.environ["MPIDDP_RESTART_COUNT"]) < 2:
    sys.exit(5)
"""


def test_restarts_resume_with_what_the_job_has_announced(jobs: Jobs) -> None:
    code, out, err = jobs.run(FAILS_TWICE, "--max-restarts", "3", arguments=("--lr", "1"))
    assert code == 0, err
    run_id = out.split()[0]
    assert out.splitlines() == [
        f"{run_id} 0 3 --lr 1",
        f"{run_id} 1 3 --lr 1 --resume",
        f"{run_id} 2 3 --lr 1 --resume",
    ]
    assert [int(each) for each in re.findall(r"\(restart (\d) of 3\)", err)] == [1, 2]
    assert len(set(re.findall(r"rank 0 on .* exit code 5", err))) == 1


def test_after_its_restarts_a_job_has_failed(jobs: Jobs) -> None:
    code, out, err = jobs.run("print('started'); sys.exit(5)", "--max-restarts", "1")
    assert (code, out.count("started")) == (1, 2)
    assert err.count("(restart 1 of 1)") == 1


def test_a_job_that_is_interrupted_says_how_to_resume(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    monkeypatch.setenv("MPIDDP_PROGRAM", "/env/bin/mpiddp")  # as run.sh
    script = """
import mpiddp, signal, time
mpiddp.announce(resume_args=["--resume", "a b"])
os.kill(int(sys.argv[1]), signal.SIGTERM)  # the launcher
time.sleep(1000)
"""
    options = ("--grace", "0.1s", "--max-restarts", "2", "-x", "TOKEN=secret")
    code, _, err = jobs.run(script, *options, arguments=(str(os.getpid()),))
    assert code == 130, err
    (line,) = re.findall("^mpiddp: to resume: (.*)$", err, re.MULTILINE)
    assert line.startswith("/env/bin/mpiddp launch --mpirun ")
    assert line.endswith(f"job.py {os.getpid()} --resume 'a b'")
    assert "-n 1 --grace 0.1s" in line
    assert "secret" not in err
    assert "restart" not in err.replace("--max-restarts", "")


def test_a_job_stops_after_its_time(jobs: Jobs) -> None:
    code, _, err = jobs.run("import time; time.sleep(1000)", "--stop-after", "0.1s")
    assert code == 130
    assert err.endswith("mpiddp: interrupted: the job was stopped.\n")


def test_output_goes_to_the_folder_of_logs(jobs: Jobs, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    code, _, err = jobs.run("print('hello'); sys.exit(3)", "--log-dir", str(logs))
    assert code == 1
    written = "".join(path.read_text() for path in logs.rglob("*") if path.is_file())
    assert "hello" in written
    assert "the starter's own words" in written + err


def test_stdin_reaches_rank_0_to_its_end(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    before = os.dup(0)
    os.dup2(read, 0)
    os.close(read)
    writer = threading.Thread(target=lambda: (os.write(write, b"two\nlines"), os.close(write)))
    try:
        writer.start()
        code, out, err = jobs.run("print(len(sys.stdin.read()))")
    finally:
        writer.join()
        os.dup2(before, 0)
        os.close(before)
    assert (code, out) == (0, "9\n"), err


def test_no_process_of_a_job_is_left(jobs: Jobs, tmp_path: Path) -> None:
    script = """
import subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, flush=True)
sys.exit(1)
"""
    code, out, _ = jobs.run(script)
    assert code == 1
    assert not Path("/proc", out.strip()).exists()


def test_a_starter_that_cannot_start_is_a_failure_of_its_own(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text(STARTER.replace('"$@"', "exit 7"))
    code, _, err = jobs.run("")
    assert code == 1
    assert re.search(r"^mpiddp: .*mpirun.* exit code 7", err, re.MULTILINE), err


def test_inside_a_rank_of_another_launcher(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    values = dict(zip(names, ("1", "4", "1"), strict=True))
    values |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    inside = ("OMPI_COMM_WORLD_RANK=1 ", "4 ranks", " mpiddp run ", "-H localhost")
    with pytest.raises(UserError, match=error("launch starts", *inside)):
        main(jobs.options(""))
    assert main([*jobs.options("", "-H", "localhost", "--dry-run")]) == 0
    assert main([*jobs.options("", "-H", "localhost", "--dry-run")]) == 0


def test_this_python_runs_the_rank(jobs: Jobs) -> None:
    assert jobs.run("print(sys.executable)")[1] == f"{sys.executable}\n"
