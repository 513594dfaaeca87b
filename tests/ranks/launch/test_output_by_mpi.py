"""What ranks print under each MPI and srun: lines arrive whole, a killed rank loses nothing, files hold all.

Tests mpiddp/runtime/launcher/output.py, mpiddp/launch/supervise/output.py under real starters.
python -m pytest tests/ranks/launch/test_output_by_mpi.py
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.launch.test_stop import piped
from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.cluster.slurm import Slurm
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, launch, script

MPIS = ("openmpi5", *PACKAGES)
SHOWN = {"MPIDDP_LOG_RANKS": "", "MPIDDP_PREFIX": ""}  # the defaults, which other tests leave
PARTS, LAST_WORDS = 40, 2000

# Each rank writes lines in three parts. The last rank then writes many lines, and is killed.
PRINTS = f"""
import os, signal, sys, time
from pathlib import Path
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
done = Path(sys.argv[1])  # a folder that all ranks share
for number in range({PARTS}):
    for part in (f"<{{rank}} ", f"{{number}} ", f"{{rank}} {{number}}>\\n"):
        os.write(1 + number % 2, part.encode())
        time.sleep(0.002)
(done / str(rank)).touch()
while rank == world_size - 1 and len(list(done.iterdir())) < world_size:
    time.sleep(0.01)
if rank == world_size - 1:
    for number in range({LAST_WORDS}):
        os.write(1 + number % 2, f"last words {{number}}\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
"""


def check(stdout: str, stderr: str, hosts: list[str]) -> None:
    """Check the output of PRINTS on these hosts, one for each rank."""
    for parity, text in enumerate((stdout, stderr)):
        for rank, host in enumerate(hosts):
            prefix = f"[rank {rank} {host}] "
            lines = [each for each in text.splitlines() if each.startswith(prefix)]
            own = [line.removeprefix(prefix) for line in lines]
            expected = [f"<{rank} {n} {rank} {n}>" for n in range(parity, PARTS, 2)]
            if rank == len(hosts) - 1:
                expected += [f"last words {n}" for n in range(parity, LAST_WORDS, 2)]
            assert own == expected, text
        assert text.count("<") == len(hosts) * PARTS // 2


@pytest.mark.parametrize("mpi", MPIS)
def test_lines_are_whole_and_a_killed_rank_loses_none(mpi: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    options = ["--mpirun", mpirun_of(mpi), "--log-ranks", "all", "--log-dir", str(logs)]
    where = ["-H", "localhost:3", "--prefix", "always"]
    (tmp_path / "done").mkdir()
    done = launch(*options, *where, script(tmp_path, PRINTS), str(tmp_path / "done"))
    assert done.returncode == 1, done.stderr
    check(done.stdout, done.stderr, [os.uname().nodename] * 3)
    assert re.search("^mpiddp: rank 2 on .*", done.stderr, re.MULTILINE)
    for rank in range(3):
        text = (logs / f"rank_{rank:05d}.out").read_text() + (
            logs / f"rank_{rank:05d}.err"
        ).read_text()
        assert text.count(f"<{rank} ") == PARTS
        assert text.count("last words") == (LAST_WORDS if rank == 2 else 0)
    assert output_processes() == []


def output_processes() -> list[str]:
    command = ["pgrep", "-x", "mpiddp-output", "--parent", str(os.getpid())]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


TALKS = """
import os, sys
print("out", os.environ["RANK"], sys.stdout.isatty())
print("err", os.environ["RANK"], file=sys.stderr)
"""


@pytest.mark.quick
def test_by_default_stdout_of_rank_0_and_stderr_of_all_ranks_are_shown(tmp_path: Path) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, TALKS), **SHOWN)
    assert done.returncode == 0, done.stderr
    host = os.uname().nodename
    assert done.stdout == f"[rank 0 {host}] out 0 True\n"  # Open MPI gives ranks a terminal
    shown = sorted(line for line in done.stderr.splitlines() if "err" in line)
    assert shown == [f"[rank 0 {host}] err 0", f"[rank 1 {host}] err 1"]


@pytest.mark.quick
def test_a_training_writes_its_output_into_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = "-m mpiddp train --use-syn --backend gloo --arch resnet20 --batch-size 4 --epochs 1"
    done = launch("-H", "localhost:1", *job.split(), "--steps-per-epoch", "1", "--out", str(run))
    assert done.returncode == 0, done.stderr
    assert (run / "logs" / "rank_00000.out").read_text() == done.stdout
    assert "test accuracy" in done.stdout


# The folder of the first Checkpoints is the run's.
IN_A_RUN = """
import sys, mpiddp
world = mpiddp.init(backend="gloo")
print("early", world.rank, flush=True)
for folder in sys.argv[1:3]:
    mpiddp.Checkpoints(folder).resume()
print("late", world.rank, file=sys.stderr, flush=True)
if world.rank == 1:
    raise RuntimeError("a bug")
"""


@pytest.mark.parametrize("is_named", [False, True])
def test_a_script_writes_its_output_into_its_run(tmp_path: Path, is_named: bool) -> None:
    run, other, named = (tmp_path / name for name in ("run", "other", "named"))
    options = ["--log-dir", str(named)] if is_named else []
    job = [script(tmp_path, IN_A_RUN), str(run), str(other)]
    done = launch("-H", "localhost:2", "--log-ranks", "none", *options, *job)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    logs = named if is_named else run / "logs"
    for rank in range(2):
        assert (logs / f"rank_{rank:05d}.out").read_text() == f"early {rank}\n"
        assert f"late {rank}\n" in (logs / f"rank_{rank:05d}.err").read_text()
    assert "RuntimeError: a bug\n" in (logs / "rank_00001.err").read_text()
    assert f"RuntimeError: a bug (its traceback: {logs}/rank_00001.err)." in done.stderr
    assert (run / "logs").exists() != is_named
    assert not (other / "logs").exists()


@pytest.mark.quick
def test_a_log_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "logs"
    done = launch("-H", "localhost:1", "--log-dir", str(folder), script(tmp_path, TALKS))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"--log-dir {folder}: Not a directory.\n"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--log-ranks", "0,7"], "there is no rank 7; the job has ranks 0 to 1."),
        (["--log-ranks", "x"], "expected all, none, or ranks such as 0,5."),
        (["--prefix", "x"], "expected auto, always or never."),
    ],
)
def test_a_wrong_option_is_one_sentence(tmp_path: Path, options: list[str], sentence: str) -> None:
    done = launch("-H", "localhost:2", *options, script(tmp_path, TALKS))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{' '.join(options)}: {sentence}\n"


MANY = 100_000


@pytest.mark.slow
def test_of_many_lines_none_is_lost(tmp_path: Path) -> None:
    """Of 8 ranks, which wait at their end until the memory of the launcher is read."""
    seen = tmp_path / "seen"
    text = f"seq {MANY}; while [ ! -e {shlex.quote(str(seen))} ]; do sleep 0.1; done"
    options = ["-H", "localhost:8", "--log-ranks", "all", "--prefix", "always"]
    with piped([*LAUNCH, *options, "--", "sh", "-c", text]) as job:
        stop = threading.Timer(PATIENCE_S, job.kill)
        stop.start()
        assert job.stdout is not None
        lines = [0] * 8
        for line in itertools.islice(job.stdout, 8 * MANY):
            prefix, _, number = line.partition("] ")
            rank = int(prefix.split()[1])
            lines[rank] += 1
            assert int(number) == lines[rank], line
        status = Path(f"/proc/{job.pid}/status").read_text()
        seen.touch()
        rest, stderr = job.communicate()
        stop.cancel()
    assert (job.returncode, rest) == (0, ""), stderr
    assert lines == [MANY] * 8
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    assert int(peak[1]) < 100_000


# Stops this rank's own output process, which has the rank's environment.
STOPS_ITS_OUTPUT = """
import os, signal
from pathlib import Path
job = f"MPIDDP_JOB={os.environ['MPIDDP_JOB']}".encode()
for comm in Path("/proc").glob("[0-9]*/comm"):
    try:
        is_own = job in (comm.parent / "environ").read_bytes()
        if is_own and comm.read_text() == "mpiddp-output\\n":
            os.kill(int(comm.parent.name), signal.SIGSTOP)
    except OSError:
        pass
print("never shown")
"""


def test_an_output_process_that_hangs_delays_the_end_for_seconds_only(tmp_path: Path) -> None:
    done = launch("-H", "localhost:1", script(tmp_path, STOPS_ITS_OUTPUT))
    assert done.returncode == 0, done.stderr
    host = os.uname().nodename
    assert done.stderr == (
        f"mpiddp: the last output of rank 0 on {host} has not arrived; it may be missing here.\n"
    )
    assert output_processes() == []


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def new_folder(hosts: Cluster, name: str) -> str:
    folder = hosts.shared / f"done-{name}"
    folder.mkdir()
    return str(folder)


@pytest.mark.parametrize("mpi", MPIS)
def test_over_hosts_each_host_has_the_files_of_its_ranks(hosts: Cluster, mpi: str) -> None:
    path = hosts.shared / "prints.py"
    path.write_text(PRINTS)
    logs = Path("/run/tmp") / f"logs-{mpi}"  # private to each host
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), "-H", "node1:2,node0:1"]
    command += ["--prefix", "auto", "--log-dir", str(logs), str(path), new_folder(hosts, mpi)]
    done = hosts["node0"].run(command, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    check(done.stdout, done.stderr, ["node1", "node1", "node0"])
    names = {
        host.name: sorted(each.name for each in host.path(str(logs)).iterdir())
        for host in hosts.hosts
    }
    # The launcher runs on node0, and keeps there what mpirun itself prints: only Open MPI prints any.
    own = ["mpirun.log"] if mpi.startswith("openmpi") else []
    assert names["node0"] == [*own, "rank_00002.err", "rank_00002.out"]
    assert names["node1"] == [f"rank_0000{rank}.{end}" for rank in (0, 1) for end in ("err", "out")]
    assert [each.command for host in hosts.hosts for each in host.processes()] == []


def test_a_folder_that_one_host_cannot_write_ends_the_job(hosts: Cluster) -> None:
    path = hosts.shared / "talks.py"
    path.write_text(TALKS)
    hosts["node1"].path("/run/tmp/only_a_file").touch()
    command = [*LAUNCH, "-H", "node0:1,node1:1", "--log-dir", "/run/tmp/only_a_file", str(path)]
    done = hosts["node0"].run(command, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    sentences = [line for line in done.stderr.splitlines() if "only_a_file" in line]
    assert sentences == ["--log-dir /run/tmp/only_a_file: File exists."]


def test_lines_are_whole_under_srun(batch: Slurm) -> None:
    path = batch.cluster.shared / "prints.py"
    path.write_text(PRINTS)
    job = [str(path), new_folder(batch.cluster, "srun")]
    command = [sys.executable, "-m", "mpiddp", "launch", "--prefix", "always", *job]
    text = f"#!/bin/sh\n{shlex.join(command)} 2> {batch.cluster.shared}/stderr\n"
    done = batch.sbatch(text, "-N2", "--ntasks-per-node=1", cwd=ROOT)
    check(done.stdout, (batch.cluster.shared / "stderr").read_text(), ["node0", "node1"])
