"""Restarts: a job restarts by itself, on the hosts that work, and can grow."""

import itertools
import json
import operator
import os
import re
import shlex
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import pytest

from mpiddp.protocol.channel import SPARE_NAME
from tests.support.cluster import faults
from tests.support.cluster.program import stat_of
from tests.support.place import (
    Done,
    Here,
    Hosts,
    Process,
    eventually,
    here_and_on_hosts,
    program,
)
from tests.support.ranks import ROOT

STOPPING = ": stopping to restart.\n"


# --- how often, and from what ---


FAILS_UNTIL = """
import os, sys, time
import mpiddp
if mpiddp.announced() is None:
    mpiddp.announce(resume_args=["--resume", "a b"], global_batch_size=12, max_ranks=2)
else:
    mpiddp.announce(resume_args=["--again"], global_batch_size=5)
succeeds = os.environ["TORCHELASTIC_RESTART_COUNT"] == sys.argv[1]
if os.environ["RANK"] == "0":
    print(os.environ["WORLD_SIZE"], sys.argv[2:], mpiddp.announced(), flush=True)
    sys.exit(0 if succeeds else 3)
time.sleep(0 if succeeds else 1000)
"""


@pytest.mark.parametrize(("succeeds_at", "starts", "code"), [(1, 2, 0), (9, 3, 1)])
def test_max_restarts(here, succeeds_at, starts, code):
    """--max-restarts N restarts a failed job, at most N times, with the arguments that resume it."""
    script = here.script(FAILS_UNTIL, "fails_until.py")
    # An announcement in the environment, from the launcher of an outer job, is ignored.
    outer = {"MPIDDP_ANNOUNCED": '{"global_batch_size": 7, "world_size": 7}'}
    options = (*here.where(3), "--max-restarts", "2")
    done = here.run("launch", *options, script, str(succeeds_at), env=outer).assert_code(code)
    announced = "Announced(global_batch_size=12, world_size=3)"
    assert done.lines == ["3 [] None", *[f"2 ['--resume', 'a b'] {announced}"] * (starts - 1)]
    assert f"(restart {starts - 1} of 2)." in done.stderr
    assert "2 ranks instead of 3; the global batch stays at 12." in done.said


SAVES_BY_ITSELF = """
import argparse, os, signal, time
from pathlib import Path
import torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--kill-in", type=int)
parser.add_argument("--wait-for", type=Path)
parser.add_argument("--resume")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
rank, first = dist.get_rank(), 0
if args.resume:
    saved = torch.load(args.resume)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
for epoch in range(first, 4):
    for step in range(30):
        loss = net(torch.full((2, 3), epoch + step / 10 + rank)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch == args.kill_in and rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    if rank == 0:
        print(epoch, loss.item(), flush=True)
        states = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(states, "new.pt")
        os.rename("new.pt", "last.pt")
    dist.barrier()
if args.wait_for:
    print("waiting", flush=True)
while args.wait_for and not args.wait_for.exists():
    optimizer.step()
    time.sleep(0.01)
dist.destroy_process_group()
"""
ANEW = "anew, because nothing told mpiddp how it resumes (unless it finds its checkpoint itself)."


@here_and_on_hosts
def test_restart_args(place):
    """With --restart-args, a script with a --resume of its own restarts where it saved, unchanged."""
    script, resume = place.script(SAVES_BY_ITSELF, "saves.py"), "--resume last.pt"
    job = ("launch", *place.where(2), "--max-restarts", "1", "--restart-args", resume, script)
    undisturbed = place.run(*job).assert_ok()
    (place.folder / "last.pt").unlink()
    done = place.run(*job, "--kill-in", "2").assert_ok()
    assert done.lines == undisturbed.lines
    assert [int(line.split()[-2]) for line in done.lines] == [0, 1, 2, 3]
    assert " anew" not in done.stderr
    # Until it has saved, it begins anew, and no command resumes it.
    (place.folder / "last.pt").unlink()
    done = place.run(*job, "--kill-in", "0").assert_ok()
    assert done.lines == undisturbed.lines
    why = "last.pt of --restart-args is not on"
    assert f"the script begins anew, because {why} {place.hosts[0]}." in done.said


@pytest.mark.parametrize("has_saved", [True, False])
def test_the_command_that_resumes(here, has_saved):
    """It has the --restart-args once, and only if the script has saved."""
    script, resume = here.script(SAVES_BY_ITSELF, "saves.py"), ["--resume", "last.pt"]
    wait = ["--wait-for", "end"]
    command = ["launch", *here.where(1), "--restart-args", shlex.join(resume), script, *wait]
    for more in ([], resume) if has_saved else ([],):  # the second has been typed from the first
        job = here.start(*command, *more).until("waiting")
        if not has_saved:
            (here.folder / "last.pt").unlink()
        last = job.signal(signal.SIGINT).wait().assert_code(130).said[-1]
        assert last.startswith("to resume: mpiddp launch ") == has_saved
        assert last.endswith(shlex.join([script, *wait, *resume])) == has_saved


def test_a_restart_that_begins_anew(here):
    """If nothing tells how a script resumes, one line says that a restart begins anew; none with -q."""
    script, wait = here.script(SAVES_BY_ITSELF, "saves.py"), here.folder / "end"
    where = (*here.where(2), "--max-restarts", "1")
    job = here.start("launch", *where, script, "--wait-for", str(wait))
    job.until(f"mpiddp: a restart would begin {ANEW}")
    wait.touch()
    done = job.wait().assert_ok()
    assert done.stderr.count(ANEW) == 1
    assert [fix for fix in done.fixes if "--restart-args" in fix]
    done = here.run("launch", *where, script, "--kill-in", "1").assert_ok()
    _, restarting, anew, *_ = done.said
    assert restarting.startswith("restarting on ")
    assert anew == f"the script begins {ANEW}"
    assert [line.split()[0] for line in done.lines] == ["0", "0", "1", "2", "3"]
    assert ANEW not in here.run("launch", "-q", *where, script, "--kill-in", "1").assert_ok().stderr


ENDS_LATE = """
import os, time
time.sleep(max(0, float(os.environ["SLURM_JOB_END_TIME"]) - time.time()))
raise ValueError("the batch is empty")
"""


def test_no_time_for_a_restart(here):
    """If no time is left before the scheduler's limit, the failure of the job is its end, with code 1."""
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 4)}
    job = (*here.where(1), "--max-restarts", "9", "--report", "r", here.script(ENDS_LATE))
    done = here.run("launch", *job, env=env).assert_code(1)
    why, verdict = done.said
    assert why == "the job is not restarted, because the time limit of Slurm is near."
    assert verdict.startswith(
        f"rank 0 on {here.hosts[0]} failed first: ValueError: the batch is empty"
    )
    assert json.loads((here.folder / "r").read_text())["error"] == verdict


READS = """
import os, sys
print(sys.stdin.readline().strip(), flush=True)
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
"""


@pytest.mark.parametrize("stdin", ["1\n2\n", ""])
def test_stdin_at_a_restart(here, stdin):
    """A restart does not repeat the input that rank 0 has read from a file or a pipe, which a line says."""
    job = (*here.where(1), "--max-restarts", "1", here.script(READS))
    done = here.run("launch", *job, stdin=stdin).assert_ok()
    lost = "rank 0 has read input of stdin, which the restart does not repeat."
    assert done.said.count(lost) == bool(stdin)


SAVES_AND_FAILS = """
import os, mpiddp
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    run = mpiddp.Checkpoints("run", every=1)
    run.save(1, {"a": 1})
    run.close()
1 / 0
"""


def test_a_stop_before_a_restart(here):
    """The pause before a restart doubles. A stop in it, as by a viewer, exits with 130 and what resumes."""
    script = here.script(SAVES_AND_FAILS, "fails.py")
    launch = ("launch", *here.where(1), "--report=r", "--max-restarts", "9")
    job = here.start(*launch, script)
    job.until("failed first: ZeroDivisionError", times=6)  # the pause is 16 s now
    pid = str(job.pid)
    top, stacks = here.start("top", "--once", pid), here.start("stacks", pid)
    assert f"(pid {pid}), restarting, 1 rank" in top.wait().stdout
    assert stacks.wait().lines == ["no rank runs now: the job restarts."]
    here.run("stop", pid).assert_ok()
    done = job.wait()
    assert (done.code, done.said[-2]) == (130, "interrupted before a restart.")
    assert done.said[-1].startswith(f"to resume: mpiddp {' '.join(launch)} ")
    report = json.loads((here.folder / "r").read_text())
    assert report["cause"] == "interrupted"
    times = itertools.pairwise(report["attempts"])
    pauses = [later["began_at"] - before["ended_at"] for before, later in times]
    assert all(map(operator.gt, pauses, (0, 1, 2, 4, 8))), pauses


# --- in the same agents ---


KILLED_TWICE = """
import glob, os, signal, sys
import torch.distributed as dist
import mpiddp

mpiddp.announce(resume_args=["--resume"])
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt == 1 and rank == 1:
    sys.exit(7)  # while the others restart
dist.init_process_group("gloo")
print(f"attempt {attempt} of rank {rank} in {os.getppid()} is {os.getpid()}", *sys.argv[1:], flush=True)
if rank == 0:
    for file in glob.glob(f"/proc/{os.getppid()}/task/*/children"):
        pids = [pid for pid in open(file).read().split() if open(f"/proc/{pid}/comm").read() == "mpiddp-store\\n"]
        print(*[f"the store is {pid}\\n" for pid in pids], sep="", end="", flush=True)
if attempt == 0:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def test_a_restart_in_the_same_agents(hosts):
    """A restart on the same hosts keeps mpirun, the ranks' agents, and the process that serves torch's store, also
    after two failures in a row. Each has the arguments that resume the job.
    """
    script = hosts.script(KILLED_TWICE)
    options = ("-H", "node0:2,node1:1", "--max-restarts", "2", "--log-ranks", "all")
    done = hosts.run("launch", *options, script, "an argument").assert_ok()
    lines = re.findall(r"attempt (\d) of rank (\d) in (\d+) is (\d+) (.*)", done.stdout)
    started = {(int(attempt), int(rank)): (agent, pid) for attempt, rank, agent, pid, _ in lines}
    resumed = {args for attempt, *_, args in lines if attempt != "0"}
    assert resumed == {"an argument --resume"}
    assert started.keys() == {(attempt, rank) for attempt in (0, 2) for rank in range(3)}
    for rank in range(3):
        (before, first), (after, last) = started[0, rank], started[2, rank]
        assert before == after
        assert first != last
    (store,) = {*re.findall(r"the store is (\d+)\n", done.stdout)}
    assert done.stdout.count(f"the store is {store}\n") == 2
    assert done.stderr.count("restarting on ") == 2
    eventually(lambda: not hosts.processes())


SPARED = """
import os, signal, sys, tempfile, time
import numpy
before = os.environ.get("TOKENIZERS_PARALLELISM"), len(sys.path), tempfile.tempdir
os.environ.update(TOKENIZERS_PARALLELISM="false", TMPDIR=os.getcwd())
sys.path.append("modules")
import torch
print("is", os.getpid(), numpy.random.rand(), *before, flush=True)
waited_for = "torch._dynamo" in sys.modules
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "3"
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter])
set_by_import = "TORCHINDUCTOR_CACHE_DIR" in os.environ
print("optimizer", waited_for, set_by_import, torch._inductor.config.compile_threads, flush=True)
while os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
    parameter.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.02)
"""
IS = re.compile(r"is (\d+) (\S+) (.*)")


def test_a_hot_spare(here):
    """With --max-restarts, a Python with torch waits for each rank, at most 260 MB, and is the next attempt.

    It has the variables that the script sets before it imports torch, or before its first optimizer imports the
    rest. No attempt repeats the random numbers of another. One that somebody has stopped goes on.
    """
    script = here.script(SPARED)
    job = here.start("launch", *here.where(1), "--max-restarts", "2", script)
    for attempt in range(2):
        job.until("optimizer ", times=attempt + 1)
        first = int(IS.findall(job.stdout)[-1][0])
        (spare,) = eventually(lambda: spares(here, script))
        eventually(lambda spare=spare: waits_with_torch(spare.pid))
        assert cost_of(spare.pid) < 260e6
        if attempt == 1:
            here.kill(spare, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        job.until("optimizer ", times=attempt + 2)
        following = int(IS.findall(job.stdout)[-1][0])
        assert following == spare.pid
    done = job.wait().assert_ok()
    _, numbers, before = zip(*IS.findall(job.stdout), strict=True)
    assert len({*numbers}) == 3
    assert len({*before}) == 1
    assert before[0].startswith("None ")
    assert re.findall("optimizer (.*)", done.stdout) == ["False True 3", *["True True 3"] * 2]
    assert not here.processes()


HAS_NO_ROOM = """
import os, resource
agent = os.getppid()
most = max(map(int, os.listdir(f"/proc/{agent}/fd"))) + 4
resource.prlimit(agent, resource.RLIMIT_NOFILE, (most, most))
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("trained")
"""


def test_a_spare_that_cannot_start(here):
    """Without room for a hot spare, a healthy job goes on, and one line says so."""
    script = here.script(HAS_NO_ROOM)
    done = here.run("launch", *here.where(2), "--max-restarts", "1", script).assert_ok()
    assert done.lines == ["trained"] * 2
    assert sum("no hot spare: OSError" in line for line in done.said) == 2, done.stderr
    assert not any("restart" in line for line in done.said)


def spares(here: Here, script: str) -> list[Process]:
    names = {process: Path(f"/proc/{process.pid}/comm") for process in here.processes(script)}
    return [process for process, name in names.items() if name.read_text() == f"{SPARE_NAME}\n"]


def waits_with_torch(pid: int) -> bool:
    """Whether a Python has imported torch and the first optimizer's modules, and waits."""
    has_torch = "libtorch_python" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return has_torch and stat_of(pid)[0] == "S" and cost_of(pid) > 190e6


def cost_of(pid: int) -> int:
    """The bytes that the machine would not use without this process: the pages that it does not share."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    return sum(map(int, re.findall(r"^Private_\w+: +(\d+) kB", text, re.M))) * 1024


USES_MPI = """
import os, signal
if os.environ["RANK"] == "1":
    import torch  # so a hot spare begins
from mpi4py import MPI
ranks = MPI.COMM_WORLD
ranks.Barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and ranks.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
print(ranks.allreduce(1), flush=True)
"""


def test_a_restart_with_mpi(here):
    """A script that uses mpi4py is restarted in a new mpirun: MPI takes no second process as one rank."""
    script = here.script(USES_MPI)
    done = here.run("launch", *here.where(2), "--max-restarts", "1", script).assert_ok()
    assert done.stdout.endswith("2\n")


@pytest.mark.parametrize("killed", ["agent", "launcher"])
def test_what_is_killed_between_two_attempts(here, killed):
    """A job restarts without an agent that was killed between two attempts. None outlives its launcher."""
    script = here.script("1 / 0", "fails.py")
    job = here.start("launch", *here.where(2), "--max-restarts", "5", script)
    job.until("failed first: ZeroDivisionError", times=5)  # the pause is 8 s now
    agents = [agent for agent in here.processes(script) if " run " in agent.command]
    if killed == "launcher":
        job.signal(signal.SIGKILL)
    else:
        here.kill(agents[-1])
        done = job.wait().assert_code(1)
        assert done.stderr.count("failed first: ZeroDivisionError") == 6
    eventually(lambda: not here.processes())


# Python runs it at its start. The agent of rank 1 then fails while it meets the others, but only once.
FAILS_ONCE = """
import os
from pathlib import Path
once = Path(__file__).with_name("failed")
if os.environ.get("OMPI_COMM_WORLD_RANK") == "1" and not once.exists():
    once.touch()
    from mpiddp.runtime.rendezvous import meet
    meet.meet = lambda *_, **__: os.listdir(once)
"""


def test_an_agent_that_fails(here):
    """If an agent itself fails before its script begins, the next attempt has new agents."""
    here.script(FAILS_ONCE, "sitecustomize.py")
    script = here.script("import os; print(os.environ['TORCHELASTIC_RESTART_COUNT'])")
    options, env = ("--max-restarts", "1"), {"PYTHONPATH": f"{here.folder}:{ROOT}"}
    done = here.run("launch", *options, *here.where(2), script, env=env).assert_ok()
    assert (done.lines, "failed first: NotADirectoryError: " in done.stderr) == (["1"] * 2, True)


# The launcher fails while it plans the first restart.
FAILS_AT_A_RESTART = """
import os, sys
if "launch" in sys.orig_argv:
    from mpiddp.launch.run import job
    make_plan, works = job.make_plan, iter([True, False, True])
    job.make_plan = lambda *given, **more: make_plan(*given, **more) if next(works) else os.listdir(__file__)
"""


def test_a_launcher_that_fails_at_a_restart(here):
    """If the launcher itself fails at a restart, it shows its traceback, and the job has its next restart."""
    here.script(FAILS_AT_A_RESTART, "sitecustomize.py")
    is_first = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    ends_its_agent = "os.kill(os.getppid(), 9) or time.sleep(6000)"
    script = here.script(f"import os, time; {is_first} and ({ends_its_agent}); print('again')")
    options, env = ("--max-restarts", "2"), {"PYTHONPATH": f"{here.folder}:{ROOT}"}
    done = here.run("launch", *options, *here.where(2), script, env=env).assert_ok()
    assert done.lines == ["again"] * 2
    assert "Traceback (most recent call last)" in done.stderr
    assert "mpiddp: the launcher itself has failed: NotADirectoryError: " in done.stderr


# --- hosts left out, spares ---


def test_a_host_that_fails_the_first_check(hosts):
    """A host that fails the first check is replaced by a spare, or left out under --min-hosts."""
    show = ("--", "sh", "-c", "echo $RANK $(hostname)")
    named = "node0:1,nowhere:1,node1:1,node2:1"
    done = hosts.run("launch", "-H", named, "--spares", "2", *show).assert_ok()
    assert done.said[0].startswith("leaving out a host: nowhere: ")
    assert "kept in reserve: node2" in done.said
    assert sorted(done.lines) == ["0 node0", "1 node1"]
    done = hosts.run("launch", "-H", named, "--min-hosts", "3", *show).assert_ok()
    assert sorted(done.lines) == ["0 node0", "1 node1", "2 node2"]
    for options in ((), ("--min-hosts", "4")):
        done = hosts.run("launch", "-H", named, *options, *show)
        assert (done.code, done.stdout) == (2, "")
        assert "nowhere" in done.stderr


def test_a_host_that_ends_two_attempts(hosts):
    """A host that ended two attempts in a row is left out. The last rank keeps its rank in front of its lines."""
    options = ("-H", "node1:1,node0:1", "--max-restarts", "2", "--min-hosts", "1")
    text = (
        "[ $(hostname) != node1 ] || kill -9 $$; [ $WORLD_SIZE = 1 ] || exec sleep 6000; echo alone"
    )
    done = hosts.run(
        "launch", *options, "--", "sh", "-c", text, env={"MPIDDP_PREFIX": ""}
    ).assert_ok()
    assert done.stdout == "[rank 0 node0] alone\n"
    for sentence in (
        "restarting on node1 and node0 (restart 1 of 2).",
        "leaving out a host: node1 has ended two attempts in a row.",
        "restarting on node0 (restart 2 of 2).",
    ):
        assert sentence in done.said, done.stderr


# --- hosts that come back, or are added ---


class Step(NamedTuple):
    """A step as rank 0 has seen it."""

    restarts: int
    ranks: int
    number: int
    samples: int  # over all ranks


class Elastic:
    """A job of elastic.py, or of COUNTS, on the hosts of its own hostfile, whose ranks make steps."""

    def __init__(
        self, hosts: Hosts, names: list[str], ranks: int, *options: str, script: str = ""
    ) -> None:
        self.folder = hosts.folder
        self.list(*names)
        where = ("--hostfile", str(self.folder / "hosts.txt"), "--lost-after", "10s", *options)
        arguments = (script or program("elastic.py"), str(self.folder))
        self.job = hosts.start("launch", *where, *arguments)
        self.wait_for_ranks(ranks, restarts=0)

    @property
    def steps(self) -> list[Step]:
        """The steps so far, in the order in which they were made."""
        file = self.folder / "steps"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [Step(*json.loads(line)) for line in lines if line.endswith("\n")]

    def list(self, *hosts: str) -> None:
        """Replace the hostfile as most editors do. A host is a name, or "NAME slots=2"."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host if ' ' in host else f'{host} slots=1'}\n" for host in hosts))
        new.rename(self.folder / "hosts.txt")

    def wait_for_ranks(self, ranks: int, restarts: int) -> None:
        """Wait until the attempt after so many restarts has made five steps, with so many ranks."""

        def ranks_of_steps() -> list[int]:
            assert self.job.process.poll() is None, self.job.stderr
            return [step.ranks for step in self.steps if step.restarts == restarts]

        eventually(lambda: len(ranks_of_steps()) >= 5)
        assert set(ranks_of_steps()) == {ranks}, self.job.stderr

    def finish(self, *, grown: Collection[int] | None = None) -> Done:
        """End the job, which must succeed.

        `grown`: the restarts without a failure. Each step has the global batch, and these lose none.
        """
        (self.folder / "finish").touch()
        done = self.job.wait().assert_ok()
        for before, after in itertools.pairwise(self.steps if grown is not None else []):
            loses_steps = after.restarts != before.restarts and after.restarts not in grown
            assert before.samples == after.samples == 12
            assert after.number <= before.number + 1, (before, after)
            assert loses_steps or after.number == before.number + 1, (before, after)
        return done


def test_a_lost_host(hosts):
    """With `--min-hosts`, a restart leaves out a lost host. The next has it back. The global batch stays."""
    options = ("--max-restarts", "3", "--min-hosts", "2", "--wait-for-hosts", "10m")
    run = Elastic(hosts, hosts.hosts, 3, *options)
    with faults.unreachable(hosts["node1"]):
        run.wait_for_ranks(2, restarts=1)
    hosts.kill(next(rank for rank in hosts.processes("elastic.py") if rank.host == "node2"))
    run.wait_for_ranks(3, restarts=2)
    done = run.finish(grown=())
    for sentence in (
        "lost node1 (rank 1): the host stopped answering. The other ranks were stopped.",
        "restarting on node0 and node2 (restart 1 of 3).",
        "2 ranks instead of 3; the global batch stays at 12.",
        "restarting on node0, node1 and node2 (restart 2 of 3).",
    ):
        assert sentence in done.said, done.stderr


def test_a_host_is_lost_back_and_another_added(hosts):
    """With --grow, a host that is added to the hostfile or comes back joins the job. No step is lost."""
    options = ("--grow", "1", "--min-hosts", "1", "--max-restarts", "3")
    run = Elastic(hosts, ["node0", "node1"], 2, *options)
    with faults.unreachable(hosts["node1"]):
        run.wait_for_ranks(1, restarts=1)
    run.wait_for_ranks(2, restarts=2)
    run.list("node0", "node1", "node2")
    run.wait_for_ranks(3, restarts=3)
    done = run.finish(grown=(2, 3))
    for sentence in (
        "restarting on node0 (restart 1 of 3).",
        "node1 can join: stopping to restart.",
        "restarting on node0 and node1.",
        "node2 can join: stopping to restart.",
        "restarting on node0, node1 and node2.",
        "3 ranks instead of 2; the global batch stays at 12.",
    ):
        assert done.said.count(sentence) == 1, done.stderr


# It makes steps and trouble as elastic.py does, and saves only its step, because more would import torch.
COUNTS = """
import os, sys, time
from pathlib import Path
import mpiddp
folder, is_first = Path(sys.argv[1]), os.environ["RANK"] == "0"
restarts, ranks = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["WORLD_SIZE"]
mpiddp.announce(resume_args=[], global_batch_size=12)
while restarts != "0" and (folder / "slow_start").exists():
    time.sleep(0.05)
while (folder / "broken").exists():  # until the job has returned to the hosts of rank 0
    if not is_first:
        sys.exit(3)
    time.sleep(0.05)
saved = folder / "step"
for step in range(int(saved.read_text()) + 1 if saved.exists() else 1, 1_000_000):
    if is_first and (folder / "fail").exists():
        (folder / "fail").unlink()
        sys.exit(3)
    if is_first:
        with (folder / "steps").open("a") as file:
            file.write(f"[{restarts}, {ranks}, {step}, 12]\\n")
    if (folder / "finish").exists():
        break
    if mpiddp.should_stop():
        while is_first and (folder / "slow_save").exists():
            time.sleep(0.05)
        saved.write_text(str(step))
        sys.exit(75)
    time.sleep(0.05)
"""


def test_a_host_that_reboots(hosts):
    """With --wait-for-hosts, a restart waits for a lost host that the job needs."""
    options = ("--max-restarts", "1", "--wait-for-hosts", "10m")
    run = Elastic(hosts, hosts.hosts, 3, *options, script=hosts.script(COUNTS))
    with faults.unreachable(hosts["node1"]):
        run.job.until("waiting for node1 ")
    run.wait_for_ranks(3, restarts=1)
    run.finish()


def test_a_spare(hosts):
    """With --spares, a spare host takes the place of a lost one, and the number of ranks stays the same."""
    options = ("--max-restarts", "3", "--spares", "1")
    run = Elastic(hosts, hosts.hosts, 2, *options, script=hosts.script(COUNTS))
    assert "node2" not in {process.host for process in hosts.processes()}
    with faults.unreachable(hosts["node1"]):
        run.wait_for_ranks(2, restarts=1)
    done = run.finish()
    assert "kept in reserve: node2" in done.said
    assert "restarting on node0 and node2 (restart 1 of 3)." in done.said
    assert re.search("leaving out a host: ssh node1: ", done.stderr)
    assert "instead of" not in done.stderr


def test_the_hostfile_counts_at_a_restart(hosts):
    """A restart reads the hostfile again. A hostfile with an error changes nothing."""
    run = Elastic(hosts, ["node0", "node1"], 2, "--max-restarts", "3", script=hosts.script(COUNTS))
    changes = [
        (["node0", "node1 slots="], 2),
        (["node0", "nowhere", "node1", "node2"], 3),  # as many hosts as before remain
        (["node0", "node2"], 2),
    ]
    for restarts, (names, ranks) in enumerate(changes, start=1):
        run.list(*names)
        (run.folder / "fail").touch()
        run.wait_for_ranks(ranks, restarts)
    done = run.finish()
    assert f"{run.folder}/hosts.txt:2: " in next(line for line in done.said if '"slots="' in line)
    assert any(line.startswith("leaving out a host: nowhere: ") for line in done.said)
    restarting = [line for line in done.said if line.startswith("restarting on")]
    assert restarting == [
        "restarting on node0 and node1 (restart 1 of 3).",
        "restarting on node0, node1 and node2 (restart 2 of 3).",
        "restarting on node0 and node2 (restart 3 of 3).",
    ]


@pytest.mark.parametrize("moment", ["slow_save", "slow_start"])
def test_a_stop_while_growing(hosts, moment):
    """A job that is about to grow still stops on request, with exit code 75."""
    run = Elastic(hosts, ["node0"], 1, "--grow", "1", script=hosts.script(COUNTS))
    (run.folder / moment).touch()
    run.list("node0", "node1")
    run.job.until(STOPPING if moment == "slow_save" else "restarting on node0 and node1.")
    run.job.signal(signal.SIGTERM)
    if moment == "slow_save":
        run.job.until("SIGTERM: the ranks are saving and stopping")
        (run.folder / moment).unlink()
    done = run.job.wait().assert_code(75)
    assert ("restarting" in done.stderr) == (moment == "slow_start")
    assert done.said[-2] == "stopped on request."
    assert done.said[-1].startswith("to resume: mpiddp launch")


def test_a_job_that_cannot_resume(hosts):
    """A job that cannot resume does not grow, and a line says so."""
    script = hosts.script(COUNTS.replace("mpiddp.announce", "dict"))
    run = Elastic(hosts, ["node0"], 1, "--grow", "1", script=script)
    run.list("node0", "node1")
    run.job.until("so the job continues without a restart.")
    (sentence,) = run.finish().said
    assert sentence.startswith("node1 can join, but the script has announced nothing")


def test_a_growth_that_fails(hosts):
    """A job that cannot start with a new host returns to its earlier hosts, and grows no more."""
    run = Elastic(hosts, ["node0"], 1, "--grow", "1", script=hosts.script(COUNTS))
    (run.folder / "broken").touch()
    run.list("node0", "node1")
    run.job.until("rank 1 on node1 ended first, with exit code 3.")
    (run.folder / "broken").unlink()
    run.wait_for_ranks(1, restarts=2)
    run.list("node0", "node1 slots=1 max_slots=1")
    last = run.steps[-1].number
    eventually(lambda: run.steps[-1].number > last + 20)
    done = run.finish(grown=(1, 2))
    assert done.stderr.count(STOPPING) == 1


def test_growth_up_to_max_ranks(hosts):
    """A job grows to the `max_ranks` that its script has announced, and no further."""
    script = hosts.script(COUNTS.replace("global_batch_size=12", "max_ranks=2"))
    run = Elastic(hosts, ["node0"], 1, "--grow", "1", script=script)
    run.list("node0", "node1 slots=2")
    run.wait_for_ranks(2, restarts=1)
    run.list("node0", "node1 slots=2", "node2")
    last = run.steps[-1].number
    eventually(lambda: run.steps[-1].restarts > 1 or run.steps[-1].number > last + 100)
    done = run.finish()
    assert run.steps[-1].ranks == 2, done.stderr
    assert done.stderr.count(STOPPING) == 1
