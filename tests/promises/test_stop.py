"""Stops: on request, all ranks save at the same step, and the job prints the command that resumes it."""

import fcntl
import json
import os
import pty
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest
import torch

from tests.support.cluster import Cluster, slurm
from tests.support.cluster.slurm import Slurm
from tests.support.machine import tool
from tests.support.patience import PATIENCE_S, within
from tests.support.place import Here, Job, Place, eventually, every_mpi, program, two_mpis
from tests.support.ranks import CTRL_C_AGAIN_S, LAUNCH, ROOT, mpirun_command
from tests.support.terminal import in_a_terminal

STOPS = program("stops.py")
LONG_GRACE = ("--grace", "600")  # a slow machine may need minutes to reach the agreed step
TRAIN = ("--use-syn", "--backend=gloo", "--arch=resnet20", "--epochs=1", "--log-every=1")


def saved_steps(stdout: str) -> list[str]:
    return re.findall(r"^saved (\d+)$", stdout, re.MULTILINE)


def ready(
    place: Place,
    *job: str,
    options: Sequence[str] = LONG_GRACE,
    ranks: int = 2,
    mpi: str | None = None,
) -> Job:
    """A job whose ranks have all printed "ready", because a request would reach them from now on."""
    job = place.start("launch", *options, *place.where(ranks), *job, mpi=mpi)
    return job.until("ready", times=ranks)


# --- the step, the code, and the command that resumes ---


@every_mpi
def test_the_same_step(here, mpi):
    """On a request to stop, all ranks stop after the same step, under every MPI."""
    job = ready(here, STOPS, ranks=3, mpi=mpi)
    time.sleep(random.random())
    done = job.signal(signal.SIGTERM).wait().assert_code(75)
    saved = saved_steps(done.stdout)
    assert (len(saved), len(set(saved))) == (3, 1), done.stdout


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
)
def test_every_signal(here, number):
    """Ctrl-C, a closed terminal, SIGTERM, SIGUSR1 and SIGUSR2 are requests to stop. If the script heeds
    them, the last line has the command that resumes the job, but for values of `-x`, which are never printed.
    """
    options = (*LONG_GRACE, "--max-restarts", "2", "-x", "SECRET=two words")
    done = ready(here, STOPS, options=options).signal(number).wait().assert_code(75)
    assert len(set(saved_steps(done.stdout))) == 1
    typed = ("mpiddp", "launch", *options[:-1], "SECRET=…", *here.where(2), STOPS)
    missing, resume = done.said[-2:]
    assert resume == f"to resume: {shlex.join(typed)}"
    assert missing == "… replaces values that are never printed. Fill in below: SECRET"


def test_the_loop_of_the_page(here):
    """The loop of docs/stop.md repeats a job that was stopped, and ends with any other code, or at Ctrl-C."""
    page = (ROOT / "docs/stop.md").read_text()
    (loop,) = re.findall(r"```sh\n(.*\nuntil .*\n)```", page)
    tools = here.folder / "tools"
    for code in (0, 1, 2, 130):
        counts = f'echo x >>runs; [ "$(wc -l <runs)" = 3 ] && exit {code}; exit 75'
        path = tool(tools, "mpiddp", counts)
        for shell in ("sh", "bash"):
            done = here.run(shell, "-c", loop, env={"PATH": path})
            assert (done.code, (here.folder / "runs").read_text()) == (code, "x\n" * 3)
            (here.folder / "runs").unlink()
    launch = shlex.join([sys.executable, "-m", "mpiddp", "launch", *here.where(1), STOPS])
    line = loop.replace("mpiddp launch …", f"echo x >>runs; {launch}")
    with in_a_terminal("/bin/sh", "-c", line, cwd=here.folder) as terminal:
        terminal.until("ready").types("\x03")
        assert terminal.wait() == 75
    assert (here.folder / "runs").read_text() == "x\n"


def is_pending(pid: int, number: int) -> bool:
    """Whether a process has not taken a signal yet."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (pending,) = re.findall(r"^ShdPnd:\s+(\w+)$", status, re.MULTILINE)
    return bool(int(pending, 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGTERM, signal.SIGTERM],
        [signal.SIGHUP, signal.SIGHUP],
        [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1],
    ],
    ids=["two of SIGTERM", "two of SIGHUP", "three kinds"],
)
def test_one_request_by_several_signals(here, numbers):
    """A request that arrives as two signals, as from timeout(1) or a closed terminal, counts once.

    Signals of other kinds after the first, as from LSF's bkill or at Slurm's limit, kill no save.
    """
    job = ready(here, STOPS, "3")
    since = time.monotonic()
    for number in numbers:
        job.signal(number)
        eventually(
            lambda number=number: not is_pending(job.pid, number), poll_s=0
        )  # or two are one
        if number != numbers[-1]:
            job.until("saving", times=2)
    if numbers[0] == numbers[1] and time.monotonic() - since > 0.9:
        pytest.skip("this machine has sent the signals more than a second apart, as a person does")
    done = job.wait()
    assert (done.code, len(saved_steps(done.stdout))) == (75, 2), done.stderr


DRAWS = """
import os, sys, time, mpiddp
def draw(what):
    print(f"\\r{what} {time.time()}", end="", flush=True, file=sys.stderr)
    time.sleep(0.05)
while not mpiddp.should_stop():
    draw("step " + os.environ["RANK"])
print("saving", flush=True)
while not os.path.exists("closed"):
    draw("saving")
open("saved." + os.environ["RANK"], "w")
sys.exit(75)
"""


def test_a_terminal_that_closes(here):
    """If the terminal closes while ranks draw bars on it, they save, and the report says how it ended."""
    job = ("-n", "2", "--log-ranks", "all", "--report", "report.json", here.script(DRAWS))
    launch = ("-m", "mpiddp", "launch", *job)
    with in_a_terminal(sys.executable, *launch, cwd=here.folder) as terminal:
        terminal.until("step 0").until("step 1")  # both have called should_stop
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, terminal.outer)  # the kernel sends SIGHUP, and every write fails from now on
        os.close(null)
        time.sleep(1)  # many drawings
        (here.folder / "closed").touch()
        assert terminal.wait() == 75
    assert sorted(path.name for path in here.folder.glob("saved.*")) == ["saved.0", "saved.1"]
    report = json.loads((here.folder / "report.json").read_text())
    assert (report["cause"], report["exit_code"]) == ("stopped", 75)


def test_the_printed_command_resumes(here):
    """The command that a stopped training prints continues it at the next step. It names mpiddp by its path
    if that was typed."""
    program = str(Path(sys.executable).with_name("mpiddp"))
    elsewhere = [
        path for path in os.environ["PATH"].split(":") if path != str(Path(program).parent)
    ]
    train = ["train", *TRAIN, "--batch-size=2", "--steps-per-epoch=300", "--resume=auto"]
    launch = (program, "launch", *LONG_GRACE, *here.where(1), "-m", "mpiddp", *train)
    job = here.start(*launch, env={"PATH": ":".join(elsewhere)}).until("step 2/")
    done = job.signal(signal.SIGTERM).wait().assert_code(75)
    (saved,) = here.folder.glob("runs/*/checkpoints/step_*")
    step = int(saved.name.removeprefix("step_"))
    assert f"stopped at step {step}" in done.stdout
    command = shlex.split(done.said[-1].removeprefix("to resume: "))
    assert command[:2] == [program, "launch"]
    again = here.run(*command).assert_ok()
    assert f"step {step}" in again.stdout
    (records,) = here.folder.glob("runs/*/metrics.jsonl")
    written = [json.loads(line) for line in records.read_text().splitlines()]
    assert [record["step"] for record in written if "train_loss" in record] == list(range(1, 301))


@pytest.mark.parametrize("limit", ["of a scheduler", "--stop-after"])
def test_a_time_limit(here, limit):
    """A job saves and ends with 75 before its allocation ends, or after --stop-after."""
    for seconds in (10, 40, 160, 640):  # until the time is enough for the ranks to start
        env, options = (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + seconds)},
            (),
        )
        if limit == "--stop-after":
            env, options = {}, ("--stop-after", str(seconds / 5))
        done = here.run("launch", *options, *here.where(1), STOPS, env=env)
        if done.code != 130:
            break
    assert (done.code, len(saved_steps(done.stdout))) == (75, 1), done.stderr
    assert done.said[0].startswith("the time limit of Slurm is near: ") or options
    assert done.said[-1].startswith("to resume: mpiddp launch ")


# --- to every process ---


# Intel's mpirun is a shell, which dies of the signal.
@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4", "mpich"], indirect=True)
def test_sigterm_to_every_process(hosts, mpi):
    """The ranks save even if every process of a host gets SIGTERM, as batch systems send it."""
    job = ready(hosts, STOPS, mpi=mpi)
    of_node0 = [process for process in hosts.processes() if process.host == "node0"]
    assert len(of_node0) >= 4  # the launcher, mpirun, a rank and its script, at least
    for process in of_node0:
        hosts.kill(process, signal.SIGTERM)
    done = job.wait()
    assert (done.code, done.stdout.count("saved")) == (75, 2), done.stderr


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4"], indirect=True)
def test_a_second_ctrl_c(here, mpi):
    """A second Ctrl-C ends the job within 10 s, even during a save. The exit code is 130."""
    job = ready(here, STOPS, "600", mpi=mpi).signal(signal.SIGINT).until("saving")
    time.sleep(CTRL_C_AGAIN_S)  # sooner, it would count as the same
    with within(10):
        done = job.signal(signal.SIGINT).wait()
    assert (done.code, saved_steps(done.stdout)) == (130, [])
    eventually(lambda: not here.processes())


# --- time limits ---


@pytest.mark.parametrize("forms_a_group", [False, True])
def test_sigusr1_without_should_stop(here, forms_a_group):
    """SIGUSR1 ends a script that handles no signal, before and after its process group has formed."""
    group = "import torch.distributed as dist; dist.init_process_group('gloo')\n"
    text = f"{group * forms_a_group}import time\nprint('ready', flush=True)\ntime.sleep(6000)"
    ready(here, here.script(text)).signal(signal.SIGUSR1).wait().assert_code(130)


NOT_ASKED = "interrupted: the job was stopped. Its script had not called mpiddp.should_stop(), so it was not asked to save."
HANGS = """
import signal, threading
signal.signal(signal.SIGINT, lambda *_: None)
print("ready\\n", end="", flush=True)
threading.Event().wait()
"""


def test_ctrl_c_on_a_script_that_hangs(here):
    """Ctrl-C says at once how long a script that does not react has, and what kills it."""
    job = ready(here, here.script(HANGS), options=("--grace", "600"))
    asked = (
        "SIGINT: the ranks have 600 s to end (--grace); the same signal again kills them at once."
    )
    job.signal(signal.SIGINT).until(f"mpiddp: {asked}\n")
    time.sleep(CTRL_C_AGAIN_S)  # sooner, it would count as the same
    job.signal(signal.SIGINT).wait().assert_code(130)


def test_ctrl_c_while_a_job_starts(here):
    """A job that is stopped before all its ranks have started says so."""
    job = here.start("launch", *here.where(2), STOPS, env={"PYTHONPATH": never_starts(here)})
    done = job.until("waits").signal(signal.SIGINT).wait()
    end = "interrupted: the job was stopped before all its ranks had started."
    assert (done.code, done.said[-1]) == (130, end), done.stderr


def never_starts(here: Here) -> str:
    """A folder for PYTHONPATH, with which an agent of rank 1 waits before it begins."""
    (here.folder / "slow").mkdir()
    text = """
import os, sys, time
if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    sys.stderr.write("waits\\n")
    time.sleep(6000)
"""
    (here.folder / "slow/sitecustomize.py").write_text(text)
    return f"{here.folder}/slow:{ROOT}"


FINALLY = """
import time
try:
    print("ready\\n", end="", flush=True)
    time.sleep(6000)
finally:
    print("finally\\n", end="", flush=True)
"""


@pytest.mark.parametrize("request_by", ["mpiddp stop", "--stop-after", "in the background"])
def test_other_requests_act_as_ctrl_c(here, request_by):
    """`mpiddp stop` and --stop-after act as Ctrl-C: the `finally` of a script without should_stop() runs.

    In the background of a shell, where a Ctrl-C is ignored, `mpiddp stop` ends the job all the same.
    """
    script = here.script(FINALLY)
    if request_by == "--stop-after":
        for seconds in (4, 8, 16, 32, 64):  # until the time is enough for the ranks to start
            options = ("--stop-after", str(seconds), *here.where(2))
            done = here.run("launch", *options, script)
            if done.lines.count("ready") == 2:
                break
    else:
        ignores = "trap '' INT;" if request_by == "in the background" else ""
        launch = shlex.join([*LAUNCH, *LONG_GRACE, *here.where(2), script])
        job = here.start("sh", "-c", f"{ignores} exec {launch}").until("ready", times=2)
        here.run("stop", str(job.pid)).assert_ok()
        done = job.wait()
    runs_finally = request_by != "in the background"
    assert (done.code, done.lines.count("finally")) == (130, 2 * runs_finally), done.stderr


@pytest.mark.parametrize(("grace", "save_s", "saved"), [("120", "1", 2), ("1", "600", 0)])
def test_a_script_without_should_stop(here, grace, save_s, saved):
    """A script without should_stop() gets the signal, and is killed after --grace seconds. Code: 130."""
    job = ready(here, program("without_should_stop.py"), save_s, options=("--grace", grace))
    with within(20):  # of which each end takes at most 10
        done = job.signal(signal.SIGTERM).wait()
    assert (done.code, done.lines.count("saved")) == (130, saved)
    if saved:
        assert sorted(done.lines) == ["SIGTERM"] * 2 + ["ready"] * 2 + ["saved"] * 2
        asked = "SIGTERM: the ranks have 120 s to end (--grace); the same signal again kills them at once."
        assert done.said == [asked, NOT_ASKED]
    eventually(lambda: not here.processes())


# The first import in a process waits, and the next one finds the real numpy.
SLOW_NUMPY = """
import os, sys, time
if "WAITED" not in os.environ:
    os.environ["WAITED"] = "1"
    print("ready", flush=True)
    time.sleep(6000)
sys.path.remove(os.environ["PYTHONPATH"])
del sys.modules["numpy"]
import numpy
"""


def test_ctrl_c_while_torch_imports_numpy(here):
    """Ctrl-C ends a script during its `import torch`, which goes on if the import of numpy is interrupted."""
    folder = here.folder / "slow"
    (folder / "numpy").mkdir(parents=True)
    (folder / "numpy/__init__.py").write_text(SLOW_NUMPY)
    script = here.script("import time\nimport torch\nprint('imported')\ntime.sleep(6000)")
    job = here.start("launch", *LONG_GRACE, *here.where(2), script, env={"PYTHONPATH": str(folder)})
    job.until("ready", times=2).signal(signal.SIGINT)
    done = job.wait()
    assert (done.code, done.lines) == (130, ["ready", "ready"])
    assert done.stderr.count("\nKeyboardInterrupt") == 1


INTERRUPTED_AT_ITS_END = """
import signal
from mpiddp.runtime.job.leaving import End
End._leave = lambda self, serves: signal.raise_signal(signal.SIGINT)
"""


def test_ctrl_c_after_the_last_line_of_a_script(here):
    """Ctrl-C after the last line of a script, while its rank waits for the others, shows nothing of mpiddp."""
    done = here.run("launch", *here.where(1), here.script(INTERRUPTED_AT_ITS_END))
    assert done.code != 0
    assert "KeyboardInterrupt" in done.stderr
    assert "mpiddp/" not in done.stderr, done.stderr


def test_a_save_outlasts_the_grace_period(here):
    """A rank that is saving has more time than --grace, and a line says that it is still saving."""
    done = ready(here, STOPS, "9", options=("--grace", "5"), ranks=1).signal(signal.SIGTERM).wait()
    assert (done.code, len(saved_steps(done.stdout))) == (75, 1), done.stderr
    assert re.search(r"^mpiddp: .*still saving", done.stderr, re.MULTILINE)


# Rank 0 writes last.pt over an earlier one, by the way that its argument names, until the file "go" is there.
WRITES = """
import os, signal, sys, threading, time
import torch
from pathlib import Path
from torch import save
way, end = sys.argv[1:]

class Slow:
    name = "last.pt"
    def __init__(self):
        self.file = open("last.pt", "wb")
    def write(self, data):
        if self.file.tell() and not os.path.exists("saving"):
            Path("saving").touch()
            print("saving", flush=True)
        while self.file.tell() and not os.path.exists("go"):
            time.sleep(0.01)
        return self.file.write(data)
    def flush(self):
        self.file.flush()

torch.distributed.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
torch.optim.SGD([parameter]).step()
state = {str(i): torch.ones(1000) for i in range(16)}
if os.environ["RANK"] == "0":
    save(state, "last.pt")
    if way == "in a thread":
        thread = threading.Thread(target=save, args=(state, Slow()))
        thread.start()
        thread.join()
    else:
        save(state, Slow(), _use_new_zipfile_serialization=way != "in the old format")
elif end == "fails":
    while not os.path.exists("saving"):
        time.sleep(0.01)
    raise ValueError("bad sample")
elif end == "is killed":
    while not os.path.exists("saving"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.barrier()
"""
LAST_FILE = "The file written last is last.pt (step 1)."


def writing(place: Place, way: str, end: str, *, again: bool = False) -> Job:
    """A job of two ranks that has to end while rank 0 writes last.pt, once its launcher knows both."""
    script = place.script(WRITES)
    options = ("--grace", "1", "--failed-grace", "1", "--log-dir", "logs")
    job = place.start("launch", *options, *place.where(2), script, way, end).until("saving")
    if number := {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(end):
        job.signal(number)
    (record,) = (place.folder / "logs").glob("*/attempt_1.jsonl")
    ends = '"kind": "stop"' if number else '"kind": "failed"'
    eventually(lambda: ends in record.read_text() and '"path": "last.pt"' in record.read_text())
    return job.until("still saving") if number else job


@pytest.mark.parametrize(
    ("way", "end"),
    [
        ("by its path", "SIGINT"),
        ("in a thread", "SIGTERM"),
        ("in the old format", "fails"),
        ("in a thread", "is killed"),
    ],
)
def test_a_file_that_is_being_written(here, way, end):
    """A stop, or the failure of another rank, tears no file that `torch.save` writes, without a line of mpiddp in the
    script: it waits for the file, up to 10 minutes. The line at the end names the file that was written last."""
    job = writing(here, way, end)
    (here.folder / "go").touch()
    done = job.wait().assert_code(130 if end.startswith("SIG") else 1)
    assert len(torch.load(here.folder / "last.pt")) == 16
    assert LAST_FILE in done.stderr


SAVES_ANYWHERE = """
import io, multiprocessing, os, sys
import torch
def save(name):
    torch.save(torch.ones(3), name)
    return len(torch.load(name))
if __name__ == "__main__":
    pool = multiprocessing.get_context("fork").Pool(1)
    assert pool.map(save, ["of_a_fork"]) == [3]
    pool.terminate()
    pool.join()
    torch.save(1, io.BytesIO())
    print("saved", save("last.pt"))
    os.environ["RANK"] = "none"
    os.closerange(3, 1 << 12)  # the connections to the agent and to the launcher
    torch.save(torch.ones(3), "later.pt")
    sys.exit(3)
"""


def test_files_that_are_written_anywhere(here):
    """A save never fails because of the launcher. One to memory, or in a fork, is not named at the end."""
    done = here.run("launch", *here.where(1), here.script(SAVES_ANYWHERE)).assert_code(1)
    assert (done.lines, "Traceback" in done.stderr) == (["saved 3"], False), done.stderr
    assert "The file written last is later.pt." in done.stderr


def test_a_file_that_a_second_signal_tears(here):
    """A second Ctrl-C kills at once, also while `torch.save` writes a file, and the last line names this file."""
    job = writing(here, "by its path", "SIGINT")
    time.sleep(CTRL_C_AGAIN_S)  # sooner, it would count as the same
    with within(10):
        done = job.signal(signal.SIGINT).wait().assert_code(130)
    torn = f"rank 0 on {here.hosts[0]} was writing last.pt, which is torn."
    assert done.said[-1].endswith(torn), done.stderr


DCP = """
import os, signal, sys, time
import torch
import torch.distributed.checkpoint as dcp
torch.distributed.init_process_group("gloo")
rank, save = int(os.environ["RANK"]), getattr(dcp, sys.argv[1])
class Writer(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)
state = {"model": torch.ones(1000), f"of_{rank}": torch.ones(10)}
print("saves", flush=True)
saved = save(state, storage_writer=Writer("checkpoint"))
if saved is not None:
    getattr(saved, "result", lambda: None)()
time.sleep(600)
"""


@pytest.mark.parametrize("function", ["save", "async_save"])
def test_a_rank_killed_in_dcp(here, function):
    """If a rank is killed during `save` or `async_save` of torch's DCP, the job ends within 20 s: no rank waits for the
    files of the others."""
    job = here.start("launch", *here.where(2), here.script(DCP), function).until("saves")
    with within(20):
        done = job.wait().assert_code(1)
    assert f"rank 1 on {here.hosts[0]} was killed by SIGKILL" in done.stderr


ONE_DIFFERS = """
import os, sys, time, mpiddp
rank, one = int(os.environ["RANK"]), sys.argv[1]
if rank == 1 and one == "has not begun":
    time.sleep(6000)
mpiddp.should_stop()
print("ready", flush=True)
if rank == 0 and one == "has finished":
    sys.exit()
while not mpiddp.should_stop():
    time.sleep(0.01)
if one == "fails to save":
    if rank == 1:
        raise OSError("no space for the save")
    time.sleep(6000)
print("saved", flush=True)
sys.exit(75)
"""


@pytest.mark.parametrize(("one", "ready"), [("has finished", 2), ("has not begun", 1)])
def test_a_rank_that_takes_no_request(here, one, ready):
    """A job stops on request even if one of its ranks has finished, or has not called should_stop() yet."""
    script = here.script(ONE_DIFFERS, "one_differs.py")
    job = here.start("launch", *LONG_GRACE, *here.where(2), script, one).until("ready", times=ready)
    done = job.signal(signal.SIGTERM).wait()
    assert (done.code, done.lines) == (75, [*["ready"] * ready, "saved"]), done.stderr


def test_a_save_that_fails(here):
    """If the save of a stop fails, the job fails with exit code 1 and is not restarted."""
    options = (*LONG_GRACE, "--max-restarts=1")
    job = ready(here, here.script(ONE_DIFFERS), "fails to save", options=options)
    done = job.signal(signal.SIGTERM).wait().assert_code(1)
    assert f"rank 1 on {here.hosts[0]} failed first: OSError: no space for the save" in done.stderr
    assert "restarting" not in done.stderr


FAILS_BEFORE_CTRL_C = """
if [ $RANK = 1 ]; then
    while [ ! -e trapped ]; do sleep 0.02; done
    exit 3
fi
trap 'echo told to end' TERM
touch trapped
while :; do sleep 0.02; done
"""


def test_a_scheduler_that_signals_a_rank_first(here):
    """If SIGTERM of a scheduler kills a rank before it reaches the launcher, the job was interrupted."""
    script = here.script("import time\nprint('ready\\n', end='', flush=True)\ntime.sleep(6000)\n")
    job = ready(here, script, options=("--log-dir", "logs"))
    (mpirun,) = here.processes("prterun ")
    here.kill(mpirun, signal.SIGSTOP)  # so the job does not end before the launcher gets the signal
    ranks = [rank for rank in here.processes(script) if "runtime.script" in rank.command]
    here.kill(ranks[0], signal.SIGTERM)
    (record,) = (here.folder / "logs").glob("*/attempt_1.jsonl")
    eventually(lambda: '"kind": "end"' in record.read_text())
    done = job.signal(signal.SIGTERM).wait()
    assert (done.code, done.said[-1]) == (130, NOT_ASKED)


def test_ctrl_c_after_a_failure(here):
    """A Ctrl-C while a failed job ends changes nothing: the failure is the verdict, with exit code 1."""
    job = here.start("launch", *here.where(2), "--", "sh", "-c", FAILS_BEFORE_CTRL_C)
    job.until("told to end")  # a command has 3 s to end
    done = job.signal(signal.SIGINT).wait().assert_code(1)
    assert f"rank 1 on {here.hosts[0]} ended first, with exit code 3." in done.stderr
    assert "interrupted" not in done.stderr


# --- who reads the output ---


# Each rank prints without end in a thread, and leaves a file when it begins and when it stops.
FLOODS = """
import os, sys, threading, time, mpiddp
from pathlib import Path

def flood():
    while not is_over.is_set():
        print("x" * 200)

is_over, printing = threading.Event(), threading.Thread(target=flood)
mpiddp.should_stop()
Path("ready" + os.environ["RANK"]).touch()
printing.start()
while not mpiddp.should_stop():
    time.sleep(0.05)
Path("saved" + os.environ["RANK"]).touch()
is_over.set()
printing.join()
sys.exit(75)
"""


def flooding(here: Here, out: IO[bytes] | int) -> subprocess.Popen[str]:
    command = [*LAUNCH, *LONG_GRACE, *here.where(2), here.script(FLOODS)]
    return here.popen(command, {}, cwd=here.folder, stdout=out, stderr=subprocess.STDOUT)


def have_left(here: Here, name: str) -> bool:
    return all((here.folder / f"{name}{rank}").exists() for rank in (0, 1))


def test_ctrl_c_ends_the_reader_as_well(here):
    """On Ctrl-C, the ranks of `mpiddp launch … | tee log` save, although tee ends too."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tee:
        job = flooding(here, tee.stdin)
        tee.stdin.close()
        while not have_left(here, "ready"):
            tee.stdout.read(1 << 12)
        tee.send_signal(signal.SIGINT)
        job.send_signal(signal.SIGINT)
        assert job.wait() == 75
    assert have_left(here, "saved")


@pytest.mark.parametrize("reader", ["pipe", "terminal", "ctrl_s"])
def test_a_reader_that_reads_no_more(here, reader):
    """A job stops within 15 s on request even if nobody reads its output: a pager, or Ctrl-S."""
    ours, theirs = os.pipe() if reader == "pipe" else pty.openpty()
    job = flooding(here, theirs)
    eventually(lambda: have_left(here, "ready"))
    if reader == "ctrl_s":
        termios.tcflow(theirs, termios.TCOOFF)
    else:
        full = 16_000 if reader == "pipe" else 2_000
        eventually(lambda: waiting_bytes(ours) > full)  # soon it is full
    job.send_signal(signal.SIGTERM)
    with within(15):
        assert job.wait(PATIENCE_S) == 75  # it would not end
    os.close(ours)
    os.close(theirs)
    assert have_left(here, "saved")
    eventually(lambda: not here.processes())


def waiting_bytes(file: int) -> int:
    """Of at most 65,536 that a pipe holds, or some thousand that a terminal does."""
    return int.from_bytes(fcntl.ioctl(file, termios.FIONREAD, bytes(4)), sys.byteorder)


# --- without the launcher ---


def test_a_training_alone(here):
    """`mpiddp train` without a launcher saves on request, too, and exits with 75."""
    out = here.folder / "out"
    job = here.start("train", *TRAIN, "--batch-size=4", "--out", str(out)).until("step 2/")
    job.signal(signal.SIGINT)
    done = job.wait().assert_code(75)
    (saved,) = (out / "checkpoints").glob("step_*")
    here.run("checkpoints", "verify", str(out)).assert_ok()
    assert f"stopped at step {int(saved.name.removeprefix('step_'))}." in done.stdout


# It needs the workers of its DataLoader to save.
LOADS = """
import sys, time, mpiddp
from torch.utils.data import DataLoader
loader = iter(DataLoader(range(10**9), num_workers=2))  # before the rank says that it can stop
next(loader)
mpiddp.should_stop()
print("ready\\n", end="", flush=True)
while not mpiddp.should_stop():
    next(loader)
time.sleep(2)
for _ in range(50):
    next(loader)  # the workers are still there
print("saved\\n", end="", flush=True)
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_raw_mpirun(here, number):
    """SIGUSR1 or SIGUSR2 to a raw mpirun stops all ranks after the same step. Data loaders keep working."""
    script = here.script(LOADS) if number == signal.SIGUSR1 else STOPS
    job = here.start(*mpirun_command(2, "-m", "mpiddp", "run", script))
    done = job.until("ready", times=2).signal(number).wait()
    saved = re.findall("^saved.*", done.stdout, re.MULTILINE)
    assert (done.code, len(saved), len({*saved})) == (75, 2, 1), done.stderr


# --- any command ---


@two_mpis
def test_a_command(here, mpi):
    """A command gets one SIGTERM and the time to save, even if other ranks have ended."""
    text = (
        'if [ $RANK = 0 ]; then trap "echo TERM; sleep 4; echo saved; exit 75" TERM; fi; '
        "echo ready; while :; do sleep 0.1; done"
    )
    done = ready(here, "--", "bash", "-c", text, mpi=mpi).signal(signal.SIGTERM).wait()
    assert (done.code, done.lines) == (75, ["ready", "ready", "TERM", "saved"]), done.stderr
    assert done.said[-1].startswith("to resume: mpiddp launch ")


def test_scripts_within_a_command(here):
    """Python scripts within a command stop after the same step, and the command itself gets no signal."""
    text = f"{shlex.join([sys.executable, STOPS])}; code=$?; exit $code"
    done = ready(here, "--", "bash", "-c", text).signal(signal.SIGTERM).wait()
    saved = saved_steps(done.stdout)
    assert (done.code, len(saved), len(set(saved))) == (75, 2, 1), done.stderr


# --- Slurm ---


@pytest.fixture(scope="module")
def batch(cluster: Cluster) -> Iterator[Slurm]:
    """Slurm, whose credentials expire soon, because a job that is requeued waits for that."""
    with slurm.up_or_skip(cluster, credentials_s=20) as up:
        yield up


def test_requeue_and_scancel(hosts, batch):
    """examples/slurm/train.sbatch saves before its time limit, is requeued and resumes. scancel saves too."""
    node0, script = hosts["node0"], ROOT / "examples" / "slurm" / "train.sbatch"
    train = [*TRAIN, "--batch-size=4", "--steps-per-epoch=10000"]
    env = {"OMP_NUM_THREADS": "1", "VENV": sys.prefix, "PYTHONPATH": str(ROOT)}
    sbatch = ["sbatch", "-N2", "--parsable", script, *train]
    number = node0.run(sbatch, cwd=hosts.folder, env=env, check=True).stdout.strip()
    run, output = hosts.folder / f"runs/train-{number}", hosts.folder / f"train-{number}.out"
    records = run / "metrics.jsonl"

    def steps() -> list[int]:
        lines = records.read_text().splitlines() if records.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    eventually(steps)
    node0.run(["scancel", "--batch", "--signal=TERM", number], check=True)
    eventually(lambda: "resuming from" in output.read_text())
    assert "mpiddp: stopped on request." in output.read_text()
    before = len(steps())
    eventually(lambda: len(steps()) > before)
    node0.run(["scancel", number], check=True)
    batch.wait(number, output)
    shown = batch.shown(number)
    assert "JobState=CANCELLED" in shown, output.read_text()
    assert "Restarts=1" in shown
    assert steps() == list(range(1, len(steps()) + 1))
    assert (run / f"checkpoints/step_{len(steps()):08d}").exists(), output.read_text()


# A step of the preflight, or the start of the ranks, or the imports of the script, takes long.
SLOW_SRUN = """#!/bin/sh
case "$(cat stage) $*" in
  "preflight "*" sh -c "* | "ranks "*" --quit-on-interrupt "*)
    exec {srun} --overlap --ntasks=1 --mpi=none sh -c 'echo >started; exec sleep 6000' ;;
esac
exec {srun} "$@"
"""
SLOW_SCRIPT = """
import pathlib, runpy, time
if pathlib.Path("stage").read_text() == "imports":
    pathlib.Path("started").touch()
    time.sleep(6000)
runpy.run_module("mpiddp", run_name="__main__")
"""


def test_a_preempted_job_comes_back(hosts, batch):
    """With `--requeue`, a job that Slurm preempts comes back and resumes, also if it was still starting."""
    folder, node0 = hosts.folder, hosts["node0"]
    srun = shutil.which("srun")
    tools = tool(folder / "tools", "srun", SLOW_SRUN.format(srun=srun))
    hosts.script(SLOW_SCRIPT, "slow.py")
    launch = [*LAUNCH, "--requeue", "slow.py", "train", *TRAIN, "--batch-size=4", "--out=run"]
    launch = shlex.join([*launch, "--steps-per-epoch=100000"])
    env = {"OMP_NUM_THREADS": "1", "PATH": tools, "PYTHONPATH": str(ROOT)}
    env["XDG_STATE_HOME"] = str(folder / "state")  # as a home that all nodes share
    output, records = folder / "output", folder / "run" / "metrics.jsonl"
    script, stage, started = f"#!/bin/sh\nexec {launch}\n", folder / "stage", folder / "started"
    job = ["-N2", "--ntasks-per-node=1", "--exclusive", "--partition=back", "--open-mode=append"]

    def steps() -> int:
        return len(records.read_text().splitlines()) if records.exists() else 0

    stage.write_text("imports")
    number = batch.submit(script, output, *job, cwd=folder, env=env)
    for restarts, name in enumerate(("imports", "preflight", "steps", "ranks", "steps"), 1):
        before = steps()
        eventually(
            lambda name=name, before=before: (
                steps() > before + 1 if name == "steps" else started.exists()
            )
        )
        if restarts == 5:
            break
        started.unlink(missing_ok=True)
        stage.write_text(("preflight", "steps", "ranks", "steps")[restarts - 1])
        batch.sbatch("#!/bin/sh\ntrue\n", "-N3", "--partition=high", "--exclusive")
        assert f"Restarts={restarts} " in batch.shown(number), output.read_text()
    node0.run(["scancel", number], check=True)
    batch.wait(number, output)
    text = output.read_text()
    assert "JobState=CANCELLED" in batch.shown(number), text
    assert text.count("mpiddp: the job was preempted before it began.") == 3, text
    assert text.count(" is requeued, ") == 4, text
    assert text.count("resuming from") == 1, text
    assert not re.search("killed by|fix:", text), text


def test_the_batch_script_of_the_page(hosts, batch):
    """The batch script of docs/slurm.md makes your own script save before the job's time limit, and come back."""
    page = (ROOT / "docs" / "slurm.md").read_text()
    text, *_ = re.findall(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)
    shutil.copy(STOPS, hosts.folder / "train.py")
    # The nodes lack GPUs.
    script = hosts.script(text.replace("--gpus-per-node=8", "--output=%j.out"), "job.sbatch")
    env = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    sbatch = hosts["node0"].run(["sbatch", "--parsable", script], cwd=hosts.folder, env=env)
    output = hosts.folder / f"{sbatch.stdout.strip()}.out"
    eventually(lambda: output.exists() and "ready" in output.read_text())
    hosts["node0"].run(["scancel", "--batch", "--signal=TERM", output.stem], check=True)
    eventually(lambda: "Restarts=1 " in batch.shown(output.stem))
    hosts["node0"].run(["scancel", output.stem], check=True)
    assert "mpiddp: stopped on request." in output.read_text()
