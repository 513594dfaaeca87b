"""Failures: one line names the rank that failed first, and no process is left."""

import json
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpiddp.hosts.reachability import MOST_PORTS, PORTS
from tests.support import forked
from tests.support.cluster import faults, lacking
from tests.support.machine import reserved, tool
from tests.support.patience import slowness, within
from tests.support.place import Done, Place, eventually, every_mpi, program
from tests.support.ranks import LAUNCH, mpirun_command

OTHERS = " The other ranks were stopped."
# Under Hydra, and under Open MPI on a loaded machine, mpirun does not say by which signal a rank ended.
KILLED = r"was killed by SIGKILL\.|ended first, without an error: it was killed, .*"
ENDS = {
    "raise": r"failed first: RuntimeError: a bug\.",
    "exit": r"ended first, with exit code 3\.",
    "os._exit": r"ended first, with exit code 3\.",
    "kill": KILLED,
    "crash": KILLED.replace("SIGKILL", "SIGSEGV"),
}
ENDED_S = 20.0  # for a job to end after a failure. Ranks that nothing ends run for hours.


def verdict(done: Done) -> str:
    """The one sentence in which the launcher says how the job ended."""
    # On a slow machine it also finds ranks that are ending, and some ends have a known cause.
    others = ("leftover process", "has a known cause")
    (sentence,) = [line for line in done.said if not any(other in line for other in others)]
    return sentence


def is_named(place: Place, done: Done, how: str) -> bool:
    """Whether rank 1 is named with this end, and nobody else."""
    sentence = rf"rank 1 on {place.hosts_of(2)[1]} ({ENDS[how]}){re.escape(OTHERS)}"
    return bool(re.fullmatch(sentence, verdict(done)))


def failing(place: Place, script: str, how: str, *, mpi: str | None = None) -> Done:
    """A job whose rank 1 ends so. It ends with code 1 in time, and leaves no process."""
    job = place.start("launch", *place.where(2), program(script), how, mpi=mpi)
    job.until(
        "ready", times=2 if script == "one_fails.py" else 1
    )  # the ranks of the other do not wait
    with within(ENDED_S):
        done = job.wait().assert_code(1)
    assert is_named(place, done, how), done.stderr
    eventually(lambda: not place.processes())
    return done


# --- a rank ---


@pytest.mark.parametrize(
    ("how", "script", "mpi"),
    [
        ("raise", "one_fails.py", "openmpi5"),
        ("kill", "one_fails.py", "mpich"),
        *((how, "alone.py", "openmpi5") for how in ("crash", "os._exit")),
    ],
    indirect=["mpi"],
)
def test_who_failed_first(here, how, script, mpi):
    """The rank that failed first is named, with its host and how it ended. The others are not."""
    done = failing(here, script, how, mpi=mpi)
    # The stack of an exception, and that of a crash in native code.
    function = {"raise": "in fail", "crash": "in crash"}.get(how, "")
    assert re.search(rf'alone.py", line \d+,? {function}', done.stderr) or not function
    assert "\nThread 0x" not in done.stderr  # of the threads, only the one that crashed


@every_mpi
def test_every_mpi_ends_the_job(hosts, mpi):
    """Under every MPI, a rank that is killed ends the job on all hosts within 20 s."""
    failing(hosts, "alone.py", "kill", mpi=mpi)


ENDS_LATE = """
import atexit, os, sys, threading, time
how, where = sys.argv[1:]
def act():
    time.sleep(0.5)
    if how == "kill":
        os.kill(os.getpid(), 9)
    os._exit(3)
if os.environ["RANK"] == "1":
    start = {"thread": threading.Thread(target=act).start, "atexit": lambda: atexit.register(act)}
    start[where]()
"""


@pytest.mark.parametrize(
    ("how", "where"), [("kill", "thread"), ("exit", "thread"), ("exit", "atexit")]
)
def test_the_end_after_the_main_part(here, how, where):
    """A job fails if a rank fails after its main part, in a thread or in an atexit handler."""
    job = (here.script(ENDS_LATE), how, where)
    done = here.run("launch", *here.where(2), *job).assert_code(1)
    assert is_named(here, done, how), done.stderr


RECORDED = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(1000)
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise RuntimeError("a bug of rank 1")

try:
    main()
except RuntimeError:
    os._exit(3)
"""


def test_the_error_that_torch_recorded(here):
    """The error line of a rank that exits silently has the error that torch's @record wrote."""
    done = here.run("launch", *here.where(2), here.script(RECORDED)).assert_code(1)
    assert re.match(r"rank 1 on .* RuntimeError: a bug of rank 1", verdict(done)), done.stderr


@pytest.mark.parametrize(
    ("joins", "method", "ranks"),
    [
        ("import torch.distributed as dist; dist.init_process_group('gloo')", "spawn", 2),
        ("import mpiddp; mpiddp.init(backend='gloo')", "forkserver", 1),
        ("", "spawn", 1),
    ],
    ids=["by torch", "by mpiddp", "it does not"],
)
def test_a_missing_main_guard(here, joins, method, ranks):
    """A failure whose cause is known is followed by its cause and its fix.

    For example, a script that its DataLoader's workers run again is told that, and not of a port that is in
    use. The known failure of another program, in the script's own words, is no cause.
    """
    prints = "import sys; print('Host key verification failed.', file=sys.stderr, flush=True)"
    loader = f"DataLoader([1, 2], num_workers=1, multiprocessing_context='{method}')"
    text = f"{prints}\n{joins}\nfrom torch.utils.data import DataLoader\nlist({loader})\n"
    done = here.run("launch", *here.where(ranks), here.script(text)).assert_code(1)
    (cause,) = [line for line in done.said if "has a known cause" in line]
    *_, fix = done.fixes  # mpiddp's own error has one, too
    assert fix.startswith('Put the main part under `if __name__ == "__main__":`')
    assert "port" not in cause.partition("known cause")[2]


STARTS_ITS_RANKS = """
import os, sys, time, torch, torch.distributed as dist
def work(rank):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    print(dist.get_world_size(), flush=True)
    time.sleep(float(sys.argv[2]))  # so long, nobody else can have the port
ranks = int(sys.argv[3])
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=ranks)
"""


def test_a_script_that_starts_its_ranks(here):
    """A script with mp.spawn, which wants to be one rank, is told the command that runs it so."""
    script = here.script(STARTS_ITS_RANKS)
    with reserved("127.0.0.1") as reservation:
        port = str(reservation.getsockname()[1])
        failed = here.run("launch", "-n", "2", script, port, "1000", "1").assert_code(1)
        (fix,) = re.findall("mpiddp launch (-n 1)", "".join(failed.fixes))
        done = here.run("launch", *fix.split(), script, port, "0", "2").assert_ok()
    assert done.lines == ["2", "2"]


CGROUPS = Path("/sys/fs/cgroup")
ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'  # 0 is the process that writes


@contextmanager
def limited(controller: str, v1: Mapping[str, str], v2: Mapping[str, str]) -> Iterator[list[str]]:
    """The words before a command that limit it, and all that it starts, by these files of a control group.

    At the end of the block, no process may be left in the group. Without control groups, the test is skipped.
    """
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    parent = CGROUPS if is_v2 else CGROUPS / controller
    group = parent / f"mpiddp-test-{os.getpid()}"
    try:
        if is_v2:
            (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        group.mkdir()
    except OSError as error:
        lacking(f"needs root, and a control group of {controller} below {parent}: {error}")
    try:
        for name, value in (v2 if is_v2 else v1).items():
            if (group / name).exists():  # not every kernel can swap
                (group / name).write_text(value)
        yield ["sh", "-c", ENTER, str(group)]
    finally:
        group.rmdir()


LACKS_MEMORY = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    bytearray(3 << 30)
dist.barrier()
"""


def test_a_kill_for_lack_of_memory(here):
    """If the kernel kills a rank for lack of memory, the error says so once, with the memory limit."""
    script = here.script(LACKS_MEMORY)
    v1 = {"memory.limit_in_bytes": str(3 << 29), "memory.swappiness": "0"}
    with limited("memory", v1, {"memory.max": str(3 << 29), "memory.swap.max": "0"}) as enter:
        done = here.run(*enter, *LAUNCH, *here.where(2), script).assert_code(1)
        eventually(lambda: not here.processes())
    limit = "its control group's limit of 1.6 GB was reached (oom_kill)"
    assert any(limit in line for line in done.said), done.stderr


def test_the_cores_of_a_control_group(here):
    """Unless you set OMP_NUM_THREADS, a rank has as many threads as its control group has whole cores."""
    shows = (
        "env",
        "-u",
        "OMP_NUM_THREADS",
        *LAUNCH,
        "-H",
        "localhost:1",
        "--",
        "sh",
        "-c",
        "echo $OMP_NUM_THREADS",
    )
    with limited("cpu", {"cpu.cfs_quota_us": "150000"}, {"cpu.max": "150000 100000"}) as enter:
        assert here.run(*enter, *shows).assert_ok().lines == ["1"]
        eventually(lambda: not here.processes())


# --- a rank that leaves with code 0 ---


# The rank of the first argument leaves, as the second one says.
LEAVES = """
import atexit, os, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
who, how = sys.argv[1:]
group = dist.group.WORLD  # as a DDP model keeps it
dist.all_reduce(torch.ones(1))
if dist.get_rank() == int(who):
    if how.startswith("os._exit"):
        os._exit(0)
    if how == "destroy":
        dist.destroy_process_group()
    if how == "SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(2 if how == "code 2" else 0)
if how == "code 2":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this rank has more time for its error
if how.startswith("os._exit"):
    time.sleep(5)  # longer than it takes the launcher to end a failed job
    dist.distributed_c10d._get_default_store().set("key", "value")  # the store outlives rank 0
    print("went on", flush=True)
    if how == "os._exit, then an error":
        raise RuntimeError("the other one is missing")
    os._exit(0)
if how == "code 2":
    atexit.register(time.sleep, 2)  # this rank is ended before it has ended itself
dist.barrier()
"""
CODE_2 = rf"rank 1 on \S+ ended first, with exit code 2\.{re.escape(OTHERS)}"
EARLY = r"rank {} on \S+ ended early, with exit code 0\. Then rank {} on \S+ {} first.*"


@pytest.mark.parametrize(
    ("place", "restarts", "who", "how", "named"),
    [
        ("here", 0, "1", "code 0", EARLY.format(1, 0, "failed")),
        ("here", 1, "1", "code 2", CODE_2),
        ("here", 1, "0", "destroy", EARLY.format(0, 1, "failed")),
        ("here", 0, "0", "SIGTERM", EARLY.format(0, 1, "failed")),
        ("hosts", 0, "0", "code 0", EARLY.format(0, 1, "failed")),
        ("hosts", 0, "0", "command", EARLY.format(0, 1, "ended")),
    ],
    ids=["code 0", "code 2", "destroy", "SIGTERM", "another host", "a command"],
    indirect=["place"],
)
def test_a_rank_that_leaves_the_others(place, restarts, who, how, named):
    """A rank that leaves while others wait for it is named, and the job restarts, after code 2 too.

    So is a rank 0 for which other hosts wait, also if it is a command.
    """
    script = place.script(LEAVES)
    program = ["--", sys.executable, script] if how == "command" else [script]
    options = (*place.where(2), "--max-restarts", str(restarts))
    done = place.run("launch", *options, *program, who, how).assert_code(1)
    assert len([line for line in done.said if re.fullmatch(named, line)]) == 1 + restarts, (
        done.stderr
    )


@pytest.mark.parametrize(("who", "how"), [("0", "os._exit"), ("1", "os._exit, then an error")])
def test_ranks_leave(here, who, how):
    """If ranks end by os._exit(0), the others go on. If those fail then, the rank that left is named."""
    done = here.run("launch", *here.where(2), here.script(LEAVES), who, how)
    assert (done.code, done.stdout) == (how != "os._exit", "went on\n"), done.stderr
    assert "frame #" not in done.stderr
    if done.code == 0:
        assert done.said == []
    else:
        assert re.match(rf"rank 1 on {here.hosts[0]} .*(ended|exited)", verdict(done)), done.stderr
        assert "killed" not in verdict(done)  # its code was 0


FORMS_GROUPS = """
import os, torch, torch.distributed as dist
alone = {"rank": 0, "world_size": 1}
for number in range(8):
    for options in [alone, {}] if os.environ["RANK"] == "0" else [{}]:
        dist.init_process_group("gloo", **options)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
"""


def test_later_groups(here):
    """A script may form its process group again and again. Under torchrun, most runs of this one fail.

    Rank 0 forms more groups than the other one.
    """
    here.run("launch", *here.where(2), here.script(FORMS_GROUPS)).assert_ok()


# --- hosts and programs of the MPI ---


@pytest.mark.parametrize(
    ("mpi", "script"), [("openmpi5", "one_fails.py"), ("mpich", "alone.py")], indirect=["mpi"]
)
def test_a_cut_link(hosts, mpi, script):
    """A host whose network link is cut is named as lost, and the ranks on it end as well."""
    where = ("--lost-after", "10s", *hosts.where(3))
    job = hosts.start("launch", *where, program(script), "never", mpi=mpi)
    job.until("ready", times=3)
    with faults.unreachable(hosts["node1"]):
        with within(30):  # 12 s alone on the machine
            done = job.wait().assert_code(1)
        eventually(lambda: not hosts.processes("python"))
    assert verdict(done) == f"lost node1 (rank 1): the host stopped answering.{OTHERS}"
    assert "-----" not in done.stderr  # mpirun's banner
    eventually(lambda: not hosts.processes())  # sshd and the MPI's daemon, once the link is up


def test_a_rank_that_cannot_start(hosts):
    """A rank that mpirun cannot start is named with its host, and no error code of mpirun's is a signal."""
    folder = Path("/run/of-node0")
    hosts["node0"].run(["mkdir", folder])
    job = ("--no-check", "-H", "node0:1,node1:1", program("alone.py"), "never")
    done = hosts.run("launch", *job, cwd=folder).assert_code(1)
    # mpirun may end the job before rank 0 has reported its start.
    assert re.search(r"rank 1 on node1|before any rank had started\.$", verdict(done))
    assert not re.search(r"signal|killed|failed first", verdict(done))


def test_a_host_that_is_lost_at_the_start(hosts):
    """A host whose link is cut between the preflight and its ranks is named within 40 s."""
    job = hosts.start(
        "launch", "--lost-after", "15s", *hosts.where(3), program("alone.py"), "never"
    )
    eventually(lambda: hosts.processes("--map-by seq"))  # mpirun
    with faults.unreachable(hosts["node1"]), within(40):
        done = job.wait().assert_code(1)
    # Its rank may have started before, on a loaded machine.
    assert re.match(r"lost node1 (before its ranks started: ssh node1: |\(rank 1\))", verdict(done))
    eventually(lambda: not hosts.processes())


@pytest.mark.parametrize("verdict_of_it", ["drop", "reject with tcp reset"])
@pytest.mark.parametrize("host", ["node0", "node1"])
def test_a_firewall(hosts, host, verdict_of_it):
    """A firewall that passes only ssh is named within 20 s, with both hosts and the port. Nothing starts."""
    mark = hosts.folder.name  # in the file with the variables of this job, of all in /tmp
    with faults.firewall(hosts[host], verdict_of_it), within(20):
        done = hosts.run(
            "launch", *hosts.where(3), program("alone.py"), "never", env={"MARK": mark}
        )
    assert (done.code, done.stdout) == (1, "")
    address = re.escape(hosts[host].address)
    why = "no answer in 3 s" if verdict_of_it == "drop" else "Connection refused"
    way = "node1, node2 → node0" if host == "node0" else "no other host reaches node1"
    sentence = rf"(?:mpiddp: )?{way} \({address} tcp/\d+\)( fails)?: {why}\.\s"
    assert re.match(sentence, done.stderr), done.stderr
    find = ("sh", "-c", f"grep -lsF {mark} /tmp/mpiddp-private-*/variables")
    eventually(lambda: hosts.run(*find).lines == [])


@pytest.mark.parametrize("instead", [("--spares", "1"), ("--min-hosts", "2")])
def test_without_a_host_behind_a_firewall(hosts, instead):
    """A spare replaces a host that the others cannot reach, and --min-hosts leaves it out."""
    with faults.firewall(hosts["node1"], "drop"):
        done = hosts.run("launch", *hosts.where(3), *instead, program("identity.py")).assert_ok()
    assert [rank["host"] for rank in done.records] == ["node0", "node2"]
    (sentence,) = done.said if instead[0] == "--min-hosts" else done.said[1:]
    address = re.escape(hosts["node1"].address)
    assert re.match(
        rf"leaving out a host: .*node1 \({address} tcp/\d+\).*: no answer in 3 s", sentence
    )


def test_a_firewall_where_a_port_is_taken(hosts):
    """A host that the others cannot reach is left out, also if the first port for the question is in use there."""
    (hosts.folder / "sitecustomize.py").write_text("import random\nrandom.seed(0)\n")
    first = random.Random(0).sample(PORTS, MOST_PORTS)[0]
    listen = f"import signal, socket; s = socket.create_server(('', {first})); print(flush=True); signal.pause()"
    listener = hosts["node2"].popen([sys.executable, "-c", listen])
    listener.stdout.readline()
    with faults.firewall(hosts["node1"], "drop"):
        env = {"PYTHONPATH": str(hosts.folder)}
        done = hosts.run(
            "launch", *hosts.where(3), "--min-hosts", "2", program("identity.py"), env=env
        )
    listener.end()
    assert [rank["host"] for rank in done.assert_ok().records] == ["node0", "node2"], done.stderr


def test_a_host_that_is_lost_in_the_preflight(hosts):
    """A host whose link is cut while the preflight asks it is named within 30 s, or left out."""
    tool(hosts["node1"].path("/run/tmp/tools"), "nvidia-smi", "exec sleep 1000")
    env = {"PATH": f"/run/tmp/tools:{os.environ['PATH']}"}
    options = (*hosts.where(3), "--min-hosts", "2")
    job = hosts.start("launch", *options, program("identity.py"), env=env)
    eventually(lambda: hosts.processes("sleep 1000"))
    with faults.unreachable(hosts["node1"]):
        with within(30):
            job.until("ssh node1: it does not answer any more (node0 → node1 tcp/22)")
        done = job.wait().assert_ok()
    assert [rank["host"] for rank in done.records] == ["node0", "node2"]


def test_an_outage(hosts):
    """A job continues after a network outage of 16 s, as under torchrun, and no output is lost."""
    job = hosts.start("launch", *hosts.where(2), hosts.script(STEPS), hosts.folder).until("step 9 ")
    with faults.unreachable(hosts["node1"]):
        time.sleep(16)
    check_steps(hosts, job)


@pytest.mark.parametrize("has_steps", [True, False], ids=["steps", "collectives alone"])
def test_an_outage_of_the_job_channel(hosts, has_steps):
    """As long as the steps go on, no host is lost: tensors may have another network than the launcher."""
    options = ("--lost-after", "8s", *hosts.where(2))
    script = hosts.script(STEPS if has_steps else STEPS.replace("mpiddp.should_stop()", "pass"))
    job = hosts.start("launch", *options, script, hosts.folder).until("step 9 ", times=2)
    (port,) = re.search(r"step 9 \S+:(\d+)\n", job.stdout).groups()
    with faults.dropped_port(hosts["node1"], port):
        # An agent whose script makes no steps would end after 16 s.
        until = time.monotonic() + (20 if has_steps else 10)
        while time.monotonic() < until:
            more_steps(job)
        before = job.stderr
    eventually(lambda: job.stderr != before)  # TCP may wait as long as the outage has lasted
    check_steps(hosts, job)


def test_an_outage_of_the_launcher(hosts):
    """If a launcher without ranks hears none of several hosts, its own link is down, and the job goes on."""
    options = ("--lost-after", "5s", "-H", "node1:1,node2:1")
    job = hosts.start("launch", *options, program("alone.py"), "never", hosts.folder).until("step ")
    with faults.unreachable(hosts["node0"]):
        job.until(
            "no host of the job has answered for 5 s, so the network of this one may be down."
        )
        time.sleep(8)
    more_steps(job)
    (hosts.folder / "finish").touch()
    done = job.wait().assert_ok()
    assert len(done.said) == 1
    steps = [int(step) for step in re.findall(r"step (\d+)", done.stdout)]
    assert steps == [50 * number for number in range(1, len(steps) + 1)]


@pytest.mark.parametrize("time_of_silence", ["60h", "never"])
def test_the_longest_silence(hosts, time_of_silence):
    """--lost-after takes any time, although the kernel knows none of more than 25 days, and `never`."""
    options = ("--lost-after", time_of_silence, *hosts.where(2))
    hosts.run("launch", *options, program("identity.py")).assert_ok()


# Rank 0 prints its steps, with the address of the job channel, and rank 1 prints them on stderr.
STEPS = """
import os, sys, time, torch, mpiddp, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
step, is_over = 0, torch.zeros(1)
while not is_over:
    step += 1
    is_over += Path(sys.argv[1], "finish").exists()
    dist.all_reduce(is_over)
    mpiddp.should_stop()
    print("step", step, os.environ["MPIDDP_CHANNEL"], file=sys.stderr if dist.get_rank() else sys.stdout)
    time.sleep(0.1)
dist.destroy_process_group()
"""


def more_steps(job):
    """Wait until rank 0 has made another step."""
    job.until("step ", times=(job.stdout + job.stderr).count("step ") + 1)


def check_steps(hosts, job):
    """The job makes more steps, and ends with code 0 and all of its output."""
    more_steps(job)
    (hosts.folder / "finish").touch()
    done = job.wait().assert_ok()
    assert done.said == []
    steps = re.findall(r"step (\d+) ", done.stdout)
    assert steps == re.findall(r"step (\d+) ", done.stderr) == [*map(str, range(1, len(steps) + 1))]


# The daemon of each MPI on another host, and the program on the first host that has started the daemons.
PROGRAMS = {
    "openmpi5": {"daemon": "prted", "mpirun": "prterun"},
    "mpich": {"daemon": "hydra_pmi_proxy", "mpirun": "mpirun"},
}


@pytest.mark.parametrize("mpi", PROGRAMS)
@pytest.mark.parametrize("part", ["daemon", "mpirun", "launcher"])
def test_a_killed_part_of_the_launcher(hosts, mpi, part):
    """If a daemon of the MPI, mpirun or the launcher is killed, the whole job ends within 20 s."""
    script = program("one_fails.py" if (part, mpi) == ("daemon", "openmpi5") else "alone.py")
    job = hosts.start("launch", *hosts.where(2), script, "never", mpi=mpi)
    job.until("ready", times=2)
    with within(ENDED_S):
        if part == "launcher":
            job.signal(signal.SIGKILL)
        else:
            programs = {Path(row.command.partition(" ")[0]).name: row for row in hosts.processes()}
            hosts.kill(
                programs[PROGRAMS[mpi][part]]
            )  # the last of this name, on node1 if it has one
        done = job.wait().assert_code(-signal.SIGKILL if part == "launcher" else 1)
        eventually(lambda: not hosts.processes())
    # The ranks of a killed daemon end with it, and are named, for none of them said anything.
    causes = {"daemon": "MPI daemon|rank 1 on node1 ", "mpirun": "mpirun was killed by SIGKILL"}
    assert part == "launcher" or re.search(causes[part], verdict(done)), done.stderr


@pytest.mark.parametrize("mpi", ["openmpi4", "openmpi5"], indirect=True)
def test_a_lost_connection_to_a_daemon(hosts, mpi):
    """If mpirun loses its ssh to a host, the host is named, also if the ranks save and stop meanwhile."""
    job = hosts.start("launch", *hosts.where(2), program("stops.py"), mpi=mpi)
    job.until("ready", times=2)
    for process in hosts.processes("sshd: "):
        if process.host == "node1":
            hosts.kill(process)
    done = job.wait().assert_code(1)
    assert verdict(done).endswith("the MPI daemon on node1 was lost."), done.stderr
    eventually(lambda: not hosts.processes())


LEFT_OVER = """
import subprocess, time
for own_session in (False, True):
    process = subprocess.Popen(["sleep", "6000"], env={}, start_new_session=own_session)
    print("started", process.pid, flush=True)
time.sleep(6000)
"""


def test_a_killed_launcher_leaves_nothing(here):
    """What a script has started ends with a killed launcher. The next launch removes its session folder."""
    with tempfile.TemporaryDirectory() as sessions:  # a longer path is no folder for sockets
        launch, env = ("launch", *here.where(1)), {"TMPDIR": sessions}
        job = here.start(*launch, here.script(LEFT_OVER), env=env).until("started", times=2)
        pids = [line.split()[1] for line in job.stdout.splitlines() if line.startswith("started")]
        job.signal(signal.SIGKILL).wait()
        eventually(
            lambda: not any(Path("/proc", pid).exists() for pid in pids) and not here.processes()
        )
        assert [*Path(sessions).iterdir()]
        here.run(*launch, "--", "true", env=env).assert_ok()
        assert not [*Path(sessions).iterdir()]


TWO_ERRORS = """
import atexit, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the second one has more time for its error
rank, how = int(os.environ["RANK"]), sys.argv[1]
if how == "hook":
    sys.excepthook = lambda _, error, __: print(f"RuntimeError: {error}", file=sys.stderr)
if how == "lost":
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    if rank == 1:
        dist.all_reduce(torch.ones(1))  # rank 0 ends meanwhile
elif rank == int(how == "1"):
    atexit.register(lambda: open("has_failed", "w"))
else:
    while not os.path.exists("has_failed"):
        time.sleep(0.01)
raise RuntimeError(["error of rank 0", "cannot restore a socket"][rank if how not in ("same", "hook") else 0])
"""


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("0", "error of rank 0", "cannot restore a socket"),
        ("1", "cannot restore a socket", "error of rank 0"),
        ("lost", "error of rank 0", ""),
        ("same", "error of rank 0", ""),
        ("hook", "error of rank 0", "error of rank 0"),
    ],
)
def test_the_error_of_a_second_rank(here, how, first, second):
    """The rank that failed first is named, whatever its words are. A second rank's own error is shown, too.
    One that follows from the end of the first, or is the same error, is in its file alone, unless the script
    has a hook of its own for it.
    """
    logs = here.folder / "logs"
    script = here.script(TWO_ERRORS)
    done = here.run("launch", *here.where(2), "--log-dir", str(logs), script, how)
    assert f"failed first: RuntimeError: {first}" in verdict(done)
    shown = re.findall(r"^(?:\[rank\d\]: )?RuntimeError: (.*)", done.stderr, re.M)
    assert sorted(shown) == sorted(filter(None, [first, second]))
    last = (logs / "rank_00001.err").read_text().splitlines()[-1]
    assert {"lost": "gloo", "same": first, "hook": first}.get(how, "cannot restore") in last
    assert verdict(done).endswith(" The same error ended all other ranks.") is (how == "same")


UPLOADS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
dist.barrier()
dist.destroy_process_group()
if os.environ["RANK"] == "0":
    while os.path.exists(f"/proc/{pids[1]}"):
        time.sleep(0.01)
    raise ConnectionError("Connection to the store was reset by peer")
"""


def test_an_error_after_the_end_of_the_others(here):
    """A rank that has finished is not blamed for the error of another one, whatever words this has."""
    done = here.run("launch", *here.where(2), here.script(UPLOADS)).assert_code(1)
    assert verdict(done).startswith(f"rank 0 on {here.hosts[0]} failed first: ConnectionError: "), (
        done.stderr
    )


SURVIVES = """
import os, sys, time
from multiprocessing.shared_memory import SharedMemory
ready = "ready" + os.environ["TORCHELASTIC_RESTART_COUNT"]
if os.environ["RANK"] == "1":
    while not os.path.exists(ready):
        time.sleep(0.02)
    raise ValueError("rank 1 fails")
memory = SharedMemory(sys.argv[1], create=True, size=1 << 20)
open(ready, "w")
time.sleep(6000)
"""


def test_a_survivor(here):
    """A survivor of a failure gets SIGTERM, as under torchrun. Its shared memory is free in a restart."""
    name = f"test-{here.mark}"
    options = (*here.where(2), "--max-restarts", "1")
    with within(20):  # each survivor gets SIGTERM after one second
        done = here.run("launch", *options, here.script(SURVIVES), name)
    assert (done.code, done.stderr.count("failed first: ValueError: rank 1 fails")) == (1, 2)
    assert not Path("/dev/shm", name).exists()
    assert not here.processes()


# Rank 1 fails as soon as the other one is alive, which notes the times at which it does something.
SAVES_LATE = """
import atexit, os, signal, sys, time, mpiddp

def note(name):
    with open(name, "a") as file:
        print(time.time(), file=file)

def save(*_):
    note("told")
    time.sleep(4)
    note("saved")
    sys.exit(143)

if os.environ["RANK"] == "1":
    while not os.path.exists("alive"):
        time.sleep(0.02)
    note("failed")
    raise ValueError("rank 1 fails")
atexit.register(note, "ended")
if sys.argv[1] == "saving":
    with mpiddp.saving():
        note("alive")
        save()
signal.signal(signal.SIGTERM, save if sys.argv[1] == "SIGTERM" else lambda *_: note("told"))
while True:
    note("alive")
    time.sleep(0.05)
"""


@pytest.mark.parametrize("command", [(), ("--", sys.executable)], ids=["script", "command"])
def test_the_time_of_a_survivor(here, command):
    """One second after a failure, the others get SIGTERM, and 3 s later SIGKILL: scripts and commands."""
    here.run("launch", *here.where(2), *command, here.script(SAVES_LATE), "stays")
    times = [(here.folder / name).read_text().split() for name in ("failed", "told", "alive")]
    failed, told, killed = float(times[0][0]), float(times[1][0]), float(times[2][-1])
    assert 0.9 < told - failed < 2 * slowness() + 3
    assert 1.5 < killed - told < 4 * slowness() + 3


@pytest.mark.parametrize(
    ("how", "grace", "seen"),
    [
        ("saving", "1", ["told", "saved"]),
        ("SIGTERM", "1", ["told"]),
        ("SIGTERM", "30", ["told", "saved", "ended"]),
    ],
)
def test_the_save_of_a_survivor(here, how, grace, seen):
    """A survivor's save in flight is awaited; its handler of SIGTERM has --failed-grace seconds."""
    script = here.script(SAVES_LATE)
    done = here.run("launch", *here.where(2), "--failed-grace", grace, script, how).assert_code(1)
    assert "rank 1 fails. The other ranks were stopped." in done.stderr
    # Without a handler, SIGTERM follows a save at once, and may come before the calls of atexit.
    notes = [name for name in ("told", "saved", "ended") if (here.folder / name).exists()]
    assert notes == seen or (how, notes) == ("saving", [*seen, "ended"])
    assert not here.processes()


def test_orphans(hosts):
    """Every process that a rank has started ends with the job. Processes of other jobs are not touched."""
    bystander = hosts["node1"].popen(["sleep", "6001"])
    done = hosts.run("launch", *hosts.where(2), program("alone.py"), "leave a process")
    # The rank's own agent may have ended it before the launcher has looked.
    killed = r"killed leftover processes of the job on node1: [1-9]\d*\."
    assert all(re.fullmatch(killed, line) for line in done.said if "leftover" in line), done.stderr
    eventually(lambda: [process.command for process in hosts.processes()] == ["sleep 6001"])
    bystander.end()


HIDES = """
import subprocess, sys, time
HELPER = \'\'\'
import ctypes, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
first, last = map(int, pathlib.Path("/proc/self/stat").read_text().split()[49:51])
ctypes.memset(first, 0, last - first)  # its variables, as setproctitle does
print("hidden", flush=True)
time.sleep(6000)
\'\'\'
subprocess.Popen([sys.executable, "-c", HELPER], start_new_session=True)
time.sleep(6000)
"""


def test_an_orphan_without_its_variables(hosts):
    """A process that has overwritten its variables, as setproctitle does, ends with a killed agent's job."""
    launch = ("launch", "--log-ranks", "all", *hosts.where(2))
    job = hosts.start(*launch, hosts.script(HIDES)).until("hidden", times=2)
    hidden = "as setproctitle"
    assert "node1" in {process.host for process in hosts.processes(hidden)}
    (agent,) = (agent for agent in hosts.processes("mpiddp run") if agent.host == "node1")
    hosts.kill(agent)
    job.wait().assert_code(1)
    eventually(lambda: not hosts.processes(hidden))


# --- a fault of the launcher itself ---


# A real launch, in which a part of the launcher raises an error from the first step on.
LAUNCH_THAT_FAILS = """
import sys
from mpiddp.launch.main import main
from mpiddp.launch.run import {module} as module
part = module.{part}
before = getattr(part, {method!r})
def fails(self, *args):
    if self.record.paces:
        raise LookupError("no such rank")
    return before(self, *args)
setattr(part, {method!r}, fails)
sys.exit(main(sys.argv[1:]))
"""
THIRTY_STEPS = """
import sys, time, mpiddp
for step in range(30):
    mpiddp.progress(step)
    print(f"step {step}", flush=True)
    time.sleep(0.1)
"""


def failing_launch(place, module, part, method, *options):
    code = LAUNCH_THAT_FAILS.format(module=module, part=part, method=method)
    driver = place.script(code, "driver.py")
    job = (*place.where(2), *options, place.script(THIRTY_STEPS))
    return place.run(sys.executable, driver, *job)


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("Stragglers", "look"),
        ("Hangs", "on_event"),
        ("GraceTime", "look"),
        ("RecordFile", "on_event"),
    ],
)
def test_a_watcher_that_fails(here, part, method):
    """What only looks on cannot end a job: it is dropped, which one line says, and the job goes on."""
    done = failing_launch(here, "watchers", part, method).assert_ok()
    failed = f"the launcher's {part} has failed (LookupError: no such rank (driver.py:9))."
    assert done.said == [f"{failed} The job goes on without it."]
    assert done.lines[-1] == "step 29"


def test_a_launcher_that_fails(hosts):
    """Whatever ends the launcher, the report says so, --on-end runs, and no process of the job is left."""
    on_end = hosts.script("open('ended', 'a').write('x')", "on_end.py")
    end = ("--report", "report.json", "--on-end", shlex.join([sys.executable, on_end]))
    done = failing_launch(hosts, "attempt", "Attempt", "look", *end).assert_code(1)
    sentence = "the launcher itself has failed: LookupError: no such rank (driver.py:9)."
    assert sentence in done.said
    assert "Traceback" in done.stderr
    report = json.loads((hosts.folder / "report.json").read_text())
    assert (report["cause"], report["error"]) == ("failed", sentence)
    assert (hosts.folder / "ended").read_text() == "x"
    eventually(lambda: not hosts.processes())


# A real launch with two more watchers: what the first notes follows what it has seen, also for the last.
ORDER = """
import sys
from mpiddp.launch.main import main
from mpiddp.launch.run import job
from mpiddp.launch.run.attempt import Watcher
class Notes(Watcher):
    def on_event(self, event):
        if event.kind == "joining":
            self.notice(rank=event.rank)
class Prints(Watcher):
    def on_event(self, event):
        if event.kind == "joining" or event.facts.get("by") == "Notes":
            print(event.kind, event.facts.get("rank", event.rank), flush=True)
job.WATCHERS = (Notes, *job.WATCHERS, Prints)
sys.exit(main(sys.argv[1:]))
"""


def test_a_watcher_that_causes_an_event(here):
    """All watchers see what one of them causes after the event that it has seen, also the last of them."""
    driver, script = here.script(ORDER, "driver.py"), here.script("")
    job = (sys.executable, driver, *here.where(2), "--log-dir", "logs", script)
    lines = here.run(*job).assert_ok().lines
    first, second = (line.partition(" ")[2] for line in lines[::2])
    assert lines == [f"{kind} {n}" for n in (first, second) for kind in ("joining", "noticed")]
    (record,) = here.folder.glob("logs/*/attempt_1.jsonl")
    kinds = [json.loads(line)["kind"] for line in record.read_text().splitlines()]
    assert [kind for kind in kinds if kind in ("joining", "noticed")] == ["joining", "noticed"] * 2


# --- any command, and no launcher ---


@pytest.mark.parametrize(
    ("mpi", "end", "reason"),
    [
        *((mpi, "exit 3", "ended first, with exit code 3") for mpi in ("openmpi5", "mpich")),
        ("openmpi5", "kill -SEGV $$", "was killed by SIGSEGV"),
    ],
    indirect=["mpi"],
)
def test_a_command(here, mpi, end, reason):
    """A command that fails ends the job, and every process that the commands started."""
    stays = "setsid sleep 6000 & trap '' TERM; sleep 6001"
    command = ("--", "bash", "-c", f"if [ $RANK = 0 ]; then {stays}; fi; sleep 1; {end}")
    with within(20):  # rank 0 ignores SIGTERM, and gets SIGKILL after 3 s
        done = here.run("launch", *here.where(2), *command, mpi=mpi).assert_code(1)
    assert verdict(done) == f"rank 1 on {here.hosts[0]} {reason}.{OTHERS}"
    eventually(lambda: not here.processes())


def test_a_script_within_a_command(here):
    """If a Python script within a command fails, its error is named, and not only the command's exit code."""
    line = shlex.join([sys.executable, program("alone.py"), "raise"])
    command = ("--", "bash", "-c", f"{line}; exit $?")
    done = here.run("launch", *here.where(2), *command).assert_code(1)
    assert is_named(here, done, "raise"), done.stderr


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 3), ("command", 3)])
def test_a_raw_mpirun(here, how, code):
    """Under a raw mpirun, too, the rank that failed first is named, and the job ends with its exit code."""
    job = [program("one_fails.py" if how == "raise" else "alone.py"), how]
    if how == "command":
        job = ["--", "sh", "-c", "[ $RANK = 1 ] && exit 3; sleep 6000"]
    done = here.run(*mpirun_command(2, "-m", "mpiddp", "run", *job)).assert_code(code)
    named = re.findall(r"^mpiddp: rank \d on .*", done.stderr, re.MULTILINE)
    assert len(named) == (how != "raise"), done.stderr  # Python's traceback says it
    assert all(line.startswith("mpiddp: rank 1 on ") for line in named)
    assert ("RuntimeError: a bug" in done.stderr) == (how == "raise")
    eventually(lambda: not here.processes())


CATCHES_ITS_ERROR = """
import sys, time, torch, torch.distributed as dist, mpiddp
try:
    with mpiddp.process_group(backend="gloo") as world:
        dist.barrier()
        raise ValueError("for a second try")
except ValueError:
    time.sleep(2)  # an error that ended the script would have done so by now
with mpiddp.process_group(backend="gloo"):
    total = torch.ones(1)
    dist.all_reduce(total)
    print(int(total), flush=True)
    if world.rank == 1:
        sys.exit(3)
    time.sleep(6000)
"""


def test_ranks_without_any_launcher(here):
    """Without any launcher, a rank that fails ends the others. An error that the script catches does not."""
    script = here.script(CATCHES_ITS_ERROR)
    with reserved("127.0.0.1") as reservation:
        ranks = forked.variables(["localhost"] * 2, *reservation.getsockname())
        jobs = [here.start("python", script, env=env) for env in ranks]
        first, second = (job.wait() for job in jobs)
    assert (first.code, second.code) == (1, 3), (first, second)
    assert (first.stdout, second.stdout) == ("2\n", "2\n")
    lost = "mpiddp: rank 0 on {0}: lost the connection to rank 1 on {0}; exiting.\n"
    assert first.stderr == lost.format(*here.hosts)
    assert second.stderr == ""  # its parent sees the code
