"""Hangs: one line says which rank waits where, and other terminals can watch the job."""

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.support.patience import MOST, slowness, within
from tests.support.place import Place, eventually, program
from tests.support.ranks import ROOT, mpirun_command
from tests.support.terminal import in_a_terminal

LONG_GRACE = ("--grace", "600")


def seconds(idle: int) -> str:
    """A limit in which all ranks import torch, if that takes so long on the idle machine, or less. After a
    minute of a wait, a line says so without it.
    """
    return str(round(idle * min(slowness(), MOST)))


# --- without an option ---


# A training that knows nothing of mpiddp. Rank 1 waits at step 5 for a pipe that nobody writes to.
UNMODIFIED = """
import sys, torch, torch.distributed as dist
from pathlib import Path

def load(path):
    return path.read_text(encoding="utf-8")

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    if step == 5 and dist.get_rank() == 1:
        load(Path(sys.argv[1]))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_hang_of_any_script(here):
    """If any script hangs in gloo, a line says which rank has not entered which collective, and where."""
    pipe = here.folder / "pipe"
    os.mkfifo(pipe)
    job = here.start("launch", *here.where(2), here.script(UNMODIFIED, "unmodified.py"), str(pipe))
    job.until("has not entered")
    pipe.write_text("")  # what rank 1 has waited for
    done = job.wait().assert_ok()
    sentence, *stack = done.said
    call = r"all_reduce no\. \d+ \(float32, 20\), for which rank 0 has waited \d+ s"
    is_in = r'it is in load \(unmodified\.py:\d+\): return path\.read_text\(encoding="utf-8"\)\.'
    named = rf"rank 1 on {here.hosts[0]} has not entered {call}; {is_in}"
    assert re.fullmatch(named, sentence), sentence
    assert [line.split()[-1] for line in stack if "unmodified.py" in line] == ["<module>", "load"]


STRAGGLES = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    time.sleep(0.1 if dist.get_rank() == 1 else 0.01)
    dist.all_reduce(torch.ones(1))
"""


def test_a_straggler(here):
    """A rank for which the others wait is named with its share of the time, also in `mpiddp top`."""
    job = here.start("launch", *here.where(2), here.script(STRAGGLES)).until("is a straggler")
    top = here.run("top", str(job.pid)).stdout
    named = rf"rank 1 on {here.hosts[0]} is a straggler"
    share = r"the others wait for it in \d\d% of the time\.$"
    assert re.search(rf"^mpiddp: {named}: {share}", job.stderr, re.MULTILINE)
    assert re.search(f"^{named}", top, re.MULTILINE), top


PIPELINE = """\
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    for _ in range(2):
        dist.recv(torch.ones(1), 1)
else:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.1)
    dist.send(torch.ones(1), dst=0)
    dist.send(torch.ones(1), 0)
dist.destroy_process_group()
"""


def test_a_rank_that_waits_for_another_one(here):
    """After a minute in torch's `recv` or `send`, a line says which rank waits, where, and for whom. It ends nothing."""
    go_on = here.folder / "go_on"
    job = here.start("launch", *here.where(2), here.script(PIPELINE, "stage.py"), go_on)
    job.until("has waited")
    go_on.touch()
    [sentence] = job.wait().assert_ok().said
    waits = rf"rank 0 on {here.hosts[0]} has waited \d\d s in recv from rank 1: "
    assert re.fullmatch(waits + r"it is in <module> \(stage.py:5\): dist.recv\(.*", sentence)


LATE = """\
import os, sys, time, torch.distributed as dist
def wait(path):
    while not os.path.exists(path):
        time.sleep(0.1)
if os.environ["RANK"] == sys.argv[1]:
    wait("come")
elif sys.argv[1] == "nobody":  # each rank takes the store of another job for its own
    os.environ["MASTER_PORT"] = "1"
dist.init_process_group("gloo")
"""


@pytest.mark.parametrize("late", [1, 0])
def test_a_rank_that_does_not_come_to_the_group(here, late):
    """If ranks wait in init_process_group for a minute, a line says where each is, and who has not come."""
    job = here.start("launch", *here.where(2), here.script(LATE, "late.py"), str(late))
    job.until("has not entered")
    if late:  # a Ctrl-C that ends the hang does not hide it
        *_, end = job.signal(signal.SIGINT).wait().assert_code(130).said
        assert end.startswith("interrupted: the job hung, and was stopped: rank 1 on "), end
    (here.folder / "come").touch()
    sentence = job.wait().assert_code(130 if late else 0).said[0]
    one, other = (f"rank {rank} on {here.hosts[0]}" for rank in (late, 1 - late))
    waited = (
        rf"{one} has not entered init_process_group, for which rank {1 - late} has waited \d+ s"
    )
    places = {
        one: r"is in wait \(late\.py:4\): time\.sleep\(0\.1\)",
        other: r'is in <module> \(late\.py:9\): dist\.init_process_group\("gloo"\)',
    }
    lines = "; ".join(f"{name} {place}" for name, place in places.items())
    assert re.fullmatch(rf"{waited}; {lines}\.", sentence), sentence


COLLECTIVES = """\
from datetime import timedelta
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=int(sys.argv[2])))
numbers = torch.ones(8)
dist.all_reduce(numbers)
if dist.get_rank() == 1:
    if sys.argv[1] == "differs":
        dist.broadcast(numbers, 1)
    else:
        time.sleep(6000)
dist.all_reduce(numbers, dist.ReduceOp.MAX)
"""


def test_a_timeout_of_a_collective(hosts):
    """When torch's own timeout ends a collective, one line says which rank had not come, and its line."""
    script = hosts.script(COLLECTIVES, "waits.py")
    done = hosts.run("launch", *hosts.where(2), script, "sleeps", seconds(8)).assert_code(1)
    is_in = re.escape("it is in <module> (waits.py:10): time.sleep(6000).")
    call = r"all_reduce no\. 2 \(float32, 8\), for which rank 0 has waited \d+ s"
    named = rf"rank 1 on node1 has not entered {call}; {is_in}"
    assert any(re.fullmatch(named, line) for line in done.said), done.stderr


def test_collectives_that_differ(here):
    """If the ranks call different collectives, one line names both calls and both lines of the script."""
    script = here.script(COLLECTIVES, "differs.py")
    options = ("--hang-timeout", seconds(8), *here.where(2))
    done = here.run("launch", *options, script, "differs", "600").assert_code(1)
    one, other = (f"rank {rank} on {host}" for rank, host in enumerate(here.hosts_of(2)))
    calls = f"all_reduce no. 2 (float32, 8) of {one}, broadcast no. 2 (float32, 8) of {other}"
    line, end = (line for line in done.said if "different collectives" in line)
    assert line.startswith(f"the ranks have called different collectives: {calls}; "), line
    assert end == f"the job hung and was stopped: {line}"


# --- --hang-timeout ---


@pytest.mark.parametrize(("how", "function"), [("stop", ""), ("native", "hold_the_interpreter")])
def test_hang_timeout(hosts, how, function):
    """--hang-timeout ends a job that hangs, and shows the Python stack of the rank at fault."""
    options = ("--hang-timeout", seconds(10), *hosts.where(2))
    with within(40):
        done = hosts.run("launch", *options, program("one_fails.py"), how).assert_code(1)
    call = r"all_reduce no\. \d+ \(float32, 1\), for which rank 0 has waited \d+ s"
    where = rf"is in {function} \(alone\.py:\d+\): ctypes\.\S+"
    silent = "does not answer: stopped, or stuck in native code"
    named = rf"rank 1 on node1 has not entered {call}; it {where if function else silent}\."
    assert any(re.fullmatch(named, said) for said in done.said), done.stderr
    assert re.fullmatch(f"the job hung and was stopped: {named}", done.said[-1])  # as in --report
    shown = re.findall(r'alone\.py", line \d+,? in (\w+)', done.stderr)
    assert function in shown if function else not shown, done.stderr
    eventually(lambda: not hosts.processes())


HALF = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(6000)
import torch.distributed as dist
dist.init_process_group("gloo")
"""


def test_a_hang_before_the_group(here):
    """If one rank never forms the process group, a line says where each is, and its stack is shown."""
    script = here.script(HALF, "half.py")
    done = here.run("launch", "--hang-timeout", seconds(10), *here.where(2), script).assert_code(1)
    one, other = (f"rank {rank} on {host}" for rank, host in enumerate(here.hosts_of(2)))
    sentence, *stacks = done.said
    places = [
        rf"{other} has not entered init_process_group, for which rank 0 has waited \d+ s",
        rf"{other} is in <module> \(half\.py:4\): time\.sleep\(6000\)",
        rf'{one} is in <module> \(half\.py:6\): dist\.init_process_group\("gloo"\)',
    ]
    assert re.fullmatch("; ".join(places) + r"\.", sentence), sentence
    titles = [line.split()[-1] for line in stacks if "Python stack" in line]
    assert (titles, done.said[-1]) == (["1:"], f"the job hung and was stopped: {sentence}")


ALONE = """\
import sys, torch, torch.distributed as dist
import mpiddp
with mpiddp.process_group(backend="gloo") as world:
    checkpoints = mpiddp.Checkpoints("run")
    if sys.argv[1] == "0":
        checkpoints.resume()
    if world.rank == int(sys.argv[1]):
        checkpoints.save(1, {"a": torch.ones(1)})
    if sys.argv[1] == "0":
        dist.barrier()
"""


@pytest.mark.parametrize("rank", ["0", "1"], ids=["the other one waits", "the other one has ended"])
def test_a_save_of_one_rank_alone(here, rank):
    """After `if rank == 0: save()`, the hang's line names the script's own lines, and no file of mpiddp."""
    options = ("--hang-timeout", seconds(10), *here.where(2))
    done = here.run("launch", *options, here.script(ALONE, "one.py"), rank).assert_code(1)
    sentence = next(line for line in done.said if "is in" in line)
    assert re.findall(r"is in <module> \((\w+\.py:\d+)\)", sentence) == ["one.py:8"], sentence


def test_a_hang_that_somebody_looks_at(here):
    """However often a viewer asks for the stacks, --hang-timeout ends the job."""
    job = here.start(
        "launch", "--hang-timeout", seconds(10), *here.where(2), here.script(HALF, "half.py")
    )
    while job.process.poll() is None:
        here.run("stacks", str(job.pid))
    assert job.wait().assert_code(1).said[-1].startswith("the job hung and was stopped: ")


ONE_STAYS = """
import os, time, mpiddp
mpiddp.should_stop()
if os.environ["RANK"] == "0":
    time.sleep(6000)  # here it hangs
"""


@pytest.mark.parametrize("is_command", [False, True])
def test_the_others_are_done(here, is_command):
    """A rank that hangs after the others have ended is named with its stack, even within a command."""
    script = here.script(ONE_STAYS, "one_stays.py")
    command = ("--", "sh", "-c", f"{sys.executable} {script}; exit $?")
    options = ("--hang-timeout", seconds(10), *here.where(2))
    done = here.run("launch", *options, *(command if is_command else (script,))).assert_code(1)
    assert any(f": rank 0 on {here.hosts[0]} is in " in line for line in done.said), done.stderr
    assert f'File "{script}", line 5, in <module>' in done.stderr
    assert done.said[-1].startswith("the job hung and was stopped: no rank has "), done.said[-1]


def test_ctrl_z(here):
    """The time in which the launcher is suspended, as by Ctrl-Z, does not count as a hang."""
    options = (*LONG_GRACE, "--hang-timeout", seconds(10), *here.where(2))
    job = here.start("launch", *options, program("alone.py"), "never").until("step ")
    job.signal(signal.SIGSTOP)
    time.sleep(12)  # longer than --hang-timeout
    job.signal(signal.SIGCONT)
    job.until("step ", times=job.stdout.count("step ") + 2)
    done = job.signal(signal.SIGTERM).wait().assert_code(75)
    assert "hung" not in done.stderr


# --- a start that hangs ---


# Python runs it at its start, which does not end on rank 1.
SITECUSTOMIZE = """
import os, time
if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    time.sleep(6000)
"""


def troubled(place: Place) -> dict[str, str]:
    """The variables under which the Python of rank 1 does not start."""
    place.script(SITECUSTOMIZE, "sitecustomize.py")
    return {"PYTHONPATH": f"{place.folder}:{ROOT}"}


@pytest.mark.parametrize(
    ("place", "mpi"),
    [("here", "openmpi5"), ("hosts", "openmpi5"), ("hosts", "intelmpi")],
    indirect=True,
)
def test_a_rank_that_does_not_join(place, mpi):
    """A rank whose Python does not start within --timeout is named. What a script imports comes later."""
    env = troubled(place)
    script = place.script("import torch\nprint('ran', flush=True)")
    with within(30):
        done = place.run("launch", *place.where(2), "--timeout", "10", script, env=env, mpi=mpi)
    assert (done.code, done.stdout) == (1, "")
    where = place.hosts_of(2)[1]
    missing = f"only 1 of 2 ranks joined in 10 s. Missing: rank 1 on {where}. "
    assert f"{missing}Its last words: none; its Python has not started." in done.said
    eventually(lambda: not place.processes("python"))


def test_a_missing_rank_of_a_raw_mpirun(here):
    """Under a raw mpirun, ranks that wait for a missing rank end after MPIDDP_TIMEOUT, with their stack."""
    env = troubled(here) | {"MPIDDP_TIMEOUT": "4"}
    script = here.script("print('ran', flush=True)")
    done = here.run(*mpirun_command(2, "-m", "mpiddp", "run", script), env=env)
    assert (done.code != 0, done.stdout) == (True, "")
    assert re.search(r"Timeout .*\n(.*\n)*?.* in _load_mpi", done.stderr), done.stderr
    eventually(lambda: not here.processes())


# --- watched from another terminal ---


TOP = (sys.executable, "-m", "mpiddp", "top")
# Jobs of other tests run at the same time, so the only one is named to it.
STOPS_THE_ONLY_JOB = """
import sys
from mpiddp import cli
from mpiddp.watch import one_job
from mpiddp.watch.running_jobs import find_job
one_job.find_job = lambda name: find_job(sys.argv[1])
sys.exit(cli.main(["stop"]))
"""


def test_a_job_is_watched_and_stopped(here):
    """From another terminal, `mpiddp ps`, `top`, `stacks` and `stop` list, watch, inspect and stop a job."""
    os.mkfifo(here.folder / "pipe")
    env = {"XDG_STATE_HOME": str(here.folder)}  # the viewers' sockets are in it
    script = [program("alone.py"), "load", str(here.folder)]
    job = here.start("launch", *LONG_GRACE, *here.where(2), *script, env=env)
    pid = str(job.until("ready", times=2).pid)

    def view(*arguments: str) -> list[str]:
        done = here.run(*arguments, env=env).assert_ok()
        assert done.stderr == ""
        return done.lines

    # Rank 1 waits in load() for the pipe.
    is_in_load = rf"rank 1 on {here.hosts[0]} is in load \(alone\.py:\d+\): "
    eventually(lambda: re.search(is_in_load, view("stacks", pid)[0]), poll_s=0.3)
    text = "\n".join(view("stacks", pid, "--rank", "1"))
    assert re.search(r'alone\.py", line \d+, in load', text)
    # Without the frames of Python's and mpiddp's own that start it.
    assert re.search(r'thread MainThread:\n  File ".*/alone\.py"', text), text

    (line,) = [line.split() for line in view("ps") if pid in line.split()]
    assert (line[1], line[3]) == ("alone.py", "2")

    viewers = []  # that connect and never read
    for path in [*here.folder.glob("mpiddp/*/job-*/job")] * 20:
        viewers.append(socket.socket(socket.AF_UNIX))
        viewers[-1].connect(str(path))
    (here.folder / "pipe").write_text("")

    def steps() -> list[str]:
        table = [line.split() for line in view("top", pid, "--once")[-2:]]
        assert [row[0] for row in table] == ["0", "1"]
        assert all((Path("/proc") / row[2]).exists() for row in table)  # the scripts of the ranks
        assert {row[3] for row in table} <= {"running", "quiet"}
        return [row[4] for row in table]

    eventually(lambda: all(step.isdigit() and int(step) > 100 for step in steps()), poll_s=0.3)
    for viewer in viewers:
        viewer.close()
    # A rank's last line.
    assert any(re.search(r"step \d*[05]0$", line) for line in view("top", pid))

    # Without a name, it stops nothing.
    stop = (sys.executable, here.script(STOPS_THE_ONLY_JOB, "stops_the_only_job.py"), pid)
    refused = here.run(*stop, env=env).assert_code(2)
    assert refused.said[0] == f"stop: job {pid} (alone.py) runs."
    assert refused.stderr.endswith(f"  fix: mpiddp stop {pid}\n")

    with in_a_terminal(*TOP, pid, cwd=here.folder, **env) as shown:
        shown.until("running")
        job.signal(signal.SIGSTOP)  # as Ctrl-Z
        (line,) = [line.split() for line in view("ps") if pid in line.split()]
        assert line[-2:] == ["suspended", "-"]
        assert view("stop", pid) == [f"job {pid} (alone.py) is requested to stop."]
        job.wait().assert_code(75)
        shown.until(rf"job {pid} \(alone\.py\) has ended\.")
        assert shown.wait() == 0
    assert not [*here.folder.glob("mpiddp/*/*")]


LOGS_ITS_LOSS = """
import os, time, torch, mpiddp
class OfAnotherRank(torch.Tensor):
    def item(self):
        raise AssertionError("a rank that uses no value waits for its GPU")
with mpiddp.process_group():
    step, loss = 0, torch.tensor(0.25)
    loss = loss if os.environ["RANK"] == "0" else loss.as_subclass(OfAnotherRank)
    while not mpiddp.should_stop():
        step += 1
        mpiddp.log_metrics(step, loss=loss)
        time.sleep(0.02)
"""


def test_top_shows_the_loss(here):
    """`mpiddp top` shows the loss that a script logs, also if it is a tensor."""
    job = here.start("launch", *here.where(2), here.script(LOGS_ITS_LOSS))

    def head() -> str:
        assert job.process.poll() is None, job.stderr
        return here.run("top", str(job.pid), "--once").stdout

    eventually(lambda: ", loss 0.25, " in head(), poll_s=0.5)
    job.signal(signal.SIGTERM).wait().assert_code(75)


def test_top_goes_on_across_a_restart(here):
    """`mpiddp top` at a terminal shows the next attempt of a job that restarts, until the job ends."""
    script = program("alone.py")
    job = here.start("launch", "--max-restarts", "1", *here.where(2), script, "never")
    with in_a_terminal(*TOP, str(job.until("ready", times=2).pid), cwd=here.folder) as shown:
        shown.until(r"running, 2 ranks on 1 host, step \d+, \S+, attempt 1, ")
        ranks = [
            process for process in here.processes(script) if "runtime.script" in process.command
        ]
        here.kill(ranks[0])
        shown.until(r"running, 2 ranks on 1 host, step \d+, \S+, attempt 2, ")
        job.signal(signal.SIGTERM).wait().assert_code(75)
        shown.until(r"job \d+ \(alone\.py\) has ended\.")
        assert shown.wait() == 0
