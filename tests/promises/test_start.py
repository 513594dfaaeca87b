"""Start: one command starts every rank, whichever MPI, network or launcher there is."""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from mpiddp.text import FIX
from tests.support import cluster as test_cluster
from tests.support import containers, installs
from tests.support.cluster import USER, Cluster, Layout, faults, lacking
from tests.support.doctor_faults import shell, shelled
from tests.support.errors import error
from tests.support.installs import library_of, mpirun_of
from tests.support.machine import executable
from tests.support.patience import eventually, slowness
from tests.support.place import Done, Hosts, every_mpi, every_mpi_on_hosts, program
from tests.support.ranks import ROOT, mpirun_command, own_lines
from tests.support.training import contents, unequal

RUN = ("-m", "mpiddp", "run")
TORCHRUN = ("python", "-m", "torch.distributed.run")
PORT = 2222


@every_mpi_on_hosts
def test_each_slot_gets_a_rank(place, mpi):
    """One command starts a rank on every slot, with the script's arguments and the launcher's folder."""
    done = place.run("launch", *place.where(3), program("identity.py"), "--", "-n", "5", mpi=mpi)
    ranks = done.assert_ok().records
    assert [rank["RANK"] for rank in ranks] == [0, 1, 2]
    assert [rank["host"] for rank in ranks] == place.hosts_of(3)
    assert all(rank["argv"] == ["--", "-n", "5"] for rank in ranks)
    assert all(rank["cwd"] == str(place.folder) for rank in ranks)


@every_mpi
def test_bind(here, mpi):
    """--bind core binds each rank to a core of its own."""
    if len(os.sched_getaffinity(0)) < 2:
        lacking("two ranks need two cores")
    script = here.script("import os\nprint(sorted(os.sched_getaffinity(0)))")
    options = ("--bind", "core", "--log-ranks", "all", *here.where(2))
    cores = here.run("launch", *options, script, mpi=mpi).assert_ok().lines
    assert len({line.rpartition("[")[2] for line in cores}) == len(cores) == 2, cores
    assert not any("," in line for line in cores), cores


@pytest.mark.parametrize(
    "how", ["hostfile", "-H", "-H and -n", "without slots", "without a host", "one a host", "sets"]
)
def test_unequal_slots(hosts, how):
    """Ranks are numbered in the order of the hostfile, even if slots differ and another host comes first.

    -H, a hostfile and --exclude take sets of names, as node[0-2].
    """
    file = hosts.folder / "hosts.txt"
    file.write_text("node[1-1] slots=2\nnode0  # one slot\nnode2 slots=0\n")
    one_each = ["--machinefile", str(file), "--npernode", "1", "--quiet"]
    options, expected = {
        "hostfile": (["--hostfile", str(file)], [("node1", 0), ("node1", 1), ("node0", 0)]),
        "-H": (["-H", "node2:1,node0:2"], [("node2", 0), ("node0", 0), ("node0", 1)]),
        "-H and -n": (["-H", "node2:2,node0:2", "-n", "3"], [("node2", 0), ("node2", 1), ("node0", 0)]),
        "without slots": (["--host", "node1,node2"], [("node1", 0), ("node2", 0)]),
        "without a host": (["-H", "node1:1,node0:9", "--exclude", "node0"], [("node1", 0)]),
        "one a host": (one_each, [("node1", 0), ("node0", 0)]),
        "sets": (["-H", "node[0-2]:2", "--exclude", "node[1,2-2]"], [("node0", 0), ("node0", 1)]),
    }[how]  # fmt: skip
    ranks = hosts.run("launch", *options, program("identity.py")).assert_ok().records
    assert [(rank["host"], rank["LOCAL_RANK"]) for rank in ranks] == expected
    order = list(dict.fromkeys(host for host, _ in expected))
    assert [order[rank["GROUP_RANK"]] for rank in ranks] == [rank["host"] for rank in ranks]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {len(expected)}


@pytest.mark.parametrize(
    ("code", "expected", "cause"),
    [(0, 0, "done"), (3, 1, "failed"), (2, 2, "bad_input"), (75, 75, "stopped")],
)
def test_exit_codes(here, code, expected, cause):
    """`mpiddp launch` exits with 0 if every rank succeeded, 2 for bad input, 75 to be resumed, or else 1.
    Bad input is not restarted. The report of the job has the cause.
    """
    options = ("--report", "report.json", *(("--max-restarts", "2") if code == 2 else ()))
    script = here.script(f"raise SystemExit({code})")
    done = here.run("launch", *here.where(2), *options, script)
    assert done.code == expected, done.stderr
    assert json.loads((here.folder / "report.json").read_text())["cause"] == cause
    assert "restart" not in done.stderr
    assert ("exit code 3" in done.stderr) == (code == 3)
    assert ("to resume: mpiddp launch -H localhost:2" in done.stderr) == (code == 75)


def test_a_rank_that_ends_alone(here):
    """A rank that ends the job by exit code 75 or 2, or by a text, is named in one line."""
    ends = "import os, sys, time\nos.environ['RANK'] == '1' and exit(eval(sys.argv[1]))\ntime.sleep(6000)"
    script = here.script(ends, "ends.py")
    for given, code, why in (("75", 75, ""), ("2", 2, ""), ("'no data\\nin x'", 1, ": no data")):
        done = here.run("launch", *here.where(2), script, given)
        named = f"rank 1 on {here.hosts[0]} ended first, with exit code {code}{why}."
        assert (done.code, f"{named} The other ranks were stopped." in done.said) == (code, True), (
            done.stderr
        )


def test_what_python_runs(here):
    """A folder with a `__main__.py` and a zip application run as under python."""
    (here.folder / "app").mkdir()
    main = "import os, sys\nprint(os.environ['RANK'], *sys.argv[:1], sys.argv[1:])"
    (here.folder / "app/__main__.py").write_text(main)
    here.run("python", "-m", "zipapp", "app", "-o", "app.pyz").assert_ok()
    for app in ("app", "app.pyz"):
        done = here.run("launch", *here.where(2), "--log-ranks=all", app, "a").assert_ok()
        assert sorted(done.lines) == [f"0 {app} ['a']", f"1 {app} ['a']"]


@pytest.mark.slow
def test_many_ranks(here):
    """A job of 64 ranks starts, shows a line of each, and ends as a whole when one of them fails."""
    fails = "until [ $(ls s* | wc -l) = 64 ]; do sleep 1; done; exit 3"
    text = f"echo $RANK; touch s$RANK; [ $RANK = 37 ] || exec sleep 6000; {fails}"
    done = here.run(
        "launch", *here.where(64), "--log-ranks", "all", "--", "sh", "-c", text
    ).assert_code(1)
    assert sorted(map(int, done.lines)) == [*range(64)]
    assert done.said[-1].startswith(f"rank 37 on {here.hosts[0]} ended first, with exit code 3.")
    eventually(lambda: not here.processes())


def test_without_a_hostfile_this_machine_is_used(here):
    """Without hosts, this machine runs one rank for each GPU, or one rank, or --nproc-per-node as under torchrun."""
    launch = ("env", "-u", "HOME", sys.executable, "-m", "mpiddp", "launch")
    done = here.run(*launch, program("identity.py"), env={"CUDA_VISIBLE_DEVICES": ""})
    assert len(done.assert_ok().records) == 1
    assert done.said == ["no hosts given: using this machine, slots=1"]
    more = len(os.sched_getaffinity(0)) + 1
    done = here.run(
        "launch",
        "--nproc-per-node",
        str(more),
        program("identity.py"),
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert len(done.assert_ok().records) == more


@every_mpi
def test_users_and_ports(hosts, mpi):
    """The preflight and every MPI use the ssh user and port that the hostfile gives for a host."""
    node1, file = hosts["node1"], hosts.folder / "hosts.txt"
    with faults.another_port(hosts.cluster, node1, PORT), faults.another_user(node1):
        file.write_text(f"node1 slots=2 user={USER} port={PORT}\nnode0 slots=1\n")
        done = hosts.run("launch", "--hostfile", file, program("identity.py"), mpi=mpi)
        ranks = done.assert_ok().records
        placed = [(rank["host"], rank["user"]) for rank in ranks]
        assert placed == [*[("node1", USER)] * 2, ("node0", "root")]
        if mpi != "openmpi5":
            return
        for line, fault, code in ((f"user={USER}", "refused", 1), (f"port={PORT}", "publickey", 2)):
            file.write_text(f"node1 {line} slots=1\nnode0 slots=1\n")
            done = hosts.run("launch", "--hostfile", file, program("identity.py"))
            (sentence,) = done.said
            assert done.code == code, sentence
            assert sentence.startswith("ssh node1: "), sentence
            assert fault in sentence  # so the job above shows that both reach ssh


# --- the network ---


@pytest.fixture(scope="module")
def odd() -> Iterator[Cluster]:
    odd = {"own_name_is_loopback": True, "decoys": ("docker0", "virbr0"), "dead_network": True}
    layout = Layout(interfaces=("eth0", "ens5", "enp3s0"), **odd)
    with test_cluster.up_or_skip(3, layout=layout) as up:
        yield up


@pytest.fixture
def odd_hosts(odd: Cluster, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Hosts with 127.0.1.1, bridges, a dead network and different names of interfaces."""
    with Hosts.on(odd, request.node.name) as place:
        yield place


@every_mpi
def test_the_network_that_works(odd_hosts, mpi):
    """The MPI and the ranks find the network that connects the hosts, beside bridges and dead interfaces."""
    where = ("-H", "node1:1,node0:1,node2:1")
    # The tensors take the same network whichever MPI has started the ranks.
    job = program("reduces.py" if mpi == "openmpi5" else "identity.py")
    done = odd_hosts.run("launch", *where, job, mpi=mpi)
    ranks = done.assert_ok().records
    placed = [(rank["host"], rank["interface"]) for rank in ranks]
    assert placed == [("node1", "ens5"), ("node0", "eth0"), ("node2", "enp3s0")]
    master = odd_hosts["node1"].address
    assert {(rank["master"], rank.get("sum", 6)) for rank in ranks} == {(master, 6)}


CALLS_RANK_0 = """
import os, torch.distributed.rpc as rpc
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
if rank:
    print(rpc.rpc_sync("worker0", max, args=([3, 5],)), flush=True)
rpc.shutdown()
"""


def test_rpc_between_hosts(odd_hosts):
    """torch's RPC works on hosts whose own names lead to 127.0.1.1."""
    script = odd_hosts.script(CALLS_RANK_0)
    done = odd_hosts.run("launch", "-H", "node0:1,node1:1", script)
    assert done.assert_ok().lines == ["5"]


REACHES_INIT_LATE = """
import os, sys, time, mpiddp
time.sleep(float(sys.argv[1]) if os.environ["RANK"] == "0" else 0)
print(mpiddp.init(backend="gloo").world_size)
"""


def test_a_script_that_reaches_init_late(here):
    """--timeout is for the start of all ranks. Then a script has the time of a process group."""
    start_s = 4 * slowness()
    options = (*here.where(2), "--timeout", f"{start_s}s")
    done = here.run("launch", *options, here.script(REACHES_INIT_LATE), str(start_s + 2))
    assert done.assert_ok().lines == ["2", "2"]


def test_a_plain_mpirun_avoids_the_bridges(odd_hosts):
    """Under a raw mpirun, the ranks use the network that MPIDDP_INTERFACE names."""
    network = "10.77.0.0/24"
    flags = f"-H node0:1,node1:1 -x MPIDDP_INTERFACE={network} --mca oob_tcp_if_include {network}"
    mpirun, *rest = mpirun_command(2, *RUN, program("reduces.py"))
    done = odd_hosts.run(mpirun, *flags.split(), *rest)
    assert [rank["host"] for rank in done.assert_ok().records] == ["node0", "node1"]
    assert {rank["sum"] for rank in done.records} == {3}


def test_an_interface_that_one_host_lacks(odd_hosts):
    """If one host lacks the interface of --interface, nothing starts, and the error names the host."""
    options = ("--interface", "eth0", "-H", "node0:1,node1:1")
    (sentence,) = odd_hosts.run("launch", *options, program("identity.py")).refusals
    assert re.fullmatch(error("interface", '"eth0"', "node1", "ens5"), sentence), sentence


NAME_SERVER = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 53))
print("ready", flush=True)
while True:
    print(server.recv(4096), flush=True)
"""


def test_a_name_server_that_does_not_answer(odd_hosts):
    """A name server that does not answer does not delay the start."""
    address = odd_hosts["node0"].address
    script = odd_hosts.script(NAME_SERVER)
    server = odd_hosts.start("python", script, address).until("ready")
    texts = {
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "/etc/resolv.conf": f"options timeout:1 attempts:1\nnameserver {address}\n",
    }
    with ExitStack() as stack:
        for host in odd_hosts.cluster.hosts:
            for path, text in texts.items():
                stack.enter_context(faults.changed(host, path, lambda _, text=text: text))
        done = odd_hosts.run("launch", "-H", "node1:1,node0:1", program("reduces.py")).assert_ok()
    assert [rank["sum"] for rank in done.records] == [3] * 2
    assert "hostname" not in done.stderr  # torch's warning, of each rank
    assert "in-addr" not in server.stdout


# --- one script, many launchers ---

# The number of threads determines the order of additions on a CPU.
ENV = {"OMP_NUM_THREADS": "1"}
TRAIN = shlex.split(
    "-m mpiddp train --use-syn --backend=gloo --arch=resnet20 --batch-size=8 --epochs=1 "
    "--steps-per-epoch=3 --amp=off --out"
)
EXAMPLE = str(ROOT / "examples" / "message_passing.py")
MESSAGES = [
    "worker_0 has received 10 from rank 1",
    "worker_0 sent data to Rank 1",
    "worker_1 has received data from rank 0",
]
STATIC = "--node-rank={rank} --master-addr={address} --master-port=29511"
C10D = "--rdzv-backend=c10d --rdzv-endpoint={address}:29513 --rdzv-id=job"
LAUNCHERS = ("openmpi5", "mpich", "torch.distributed.launch", "srun")
Run = Callable[..., str]


def agents(hosts: Hosts, program: str, rendezvous: str) -> Run:
    """A torchrun agent on each of two hosts.

    Their exit codes are ignored: on a busy machine one may be 1 although all ranks succeeded.
    """

    def run(*job: str) -> str:
        command = [sys.executable, "-m", program, "--nnodes=2", "--nproc-per-node=1"]
        started = []
        for rank, host in enumerate(hosts.cluster.hosts[:2]):
            where = rendezvous.format(rank=rank, address=hosts["node0"].address)
            started.append(host.popen([*command, *where.split(), *job], env=ENV, cwd=hosts.folder))
        return "".join(agent.communicate()[0] for agent in started)

    return run


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest, hosts: Hosts) -> Run:
    """How a launcher, which the parameter names, runs a Python program on two ranks."""
    name: str = request.param
    if name.startswith("torch"):
        module = name if name == "torch.distributed.launch" else "torch.distributed.run"
        return agents(hosts, module, C10D if name == "torchrun" else STATIC)
    if name == "sbatch":
        batch = request.getfixturevalue("batch")

        def submit(*job: str) -> str:
            script = f"#!/bin/sh\n{shlex.join([sys.executable, '-m', 'mpiddp', 'launch', *job])}\n"
            done = batch.sbatch(script, "-N2", "--ntasks-per-node=1", cwd=hosts.folder, env=ENV)
            return str(Done(done.returncode, done.stdout, done.stderr).assert_ok().stdout)

        return submit
    if name.startswith("srun"):
        request.getfixturevalue("batch")
        pmi = "pmi2" if name == "srun-pmi2" else "none"
        command = ["srun", "-N2", "--ntasks-per-node=1", f"--mpi={pmi}", sys.executable]
    else:
        command = ["launch", "-H", "node0:1,node1:1", "--mpirun", mpirun_of(name)]
    return lambda *job: hosts.run(*command, *job, env=ENV).assert_ok().stdout


@pytest.fixture(scope="module")
def weights(cluster: Cluster) -> dict[str, torch.Tensor]:
    """The weights that forks on one host have trained, as the pods of a PyTorchJob do."""
    with Hosts.on(cluster, "reference") as hosts:
        done = hosts.fork("node0:2", *TRAIN, "run", env=ENV).assert_ok()
        assert "2 ranks on 1 host over gloo" in done.stdout
        return contents(hosts.folder / "run", 3)["model"]


def test_launchers_train_the_same_bits(launcher, hosts, weights):
    """A training ends with the same weights, bit for bit, under mpirun of two kinds, torchrun and srun."""
    assert "2 ranks on 2 hosts over gloo" in launcher(*TRAIN, "run")
    assert unequal(contents(hosts.folder / "run", 3)["model"], weights) == []


@pytest.mark.parametrize(
    ("launcher", "way"),
    [("openmpi5", ()), ("torchrun", ()), ("srun-pmi2", RUN), ("sbatch", ())],
    indirect=["launcher"],
)
def test_message_passing(launcher, way):
    """A script for torchrun runs unchanged under torchrun, `mpiddp launch`, srun and sbatch."""
    stdout = launcher(*way, EXAMPLE, "--backend", "gloo")
    # Not compared by line: with PYTHONUNBUFFERED, messages of two ranks can share a line.
    assert [stdout.count(message) for message in MESSAGES] == [1] * len(MESSAGES), stdout


@pytest.mark.parametrize("way", ["mpirun", "one", "torchrun", "alone", "batch"])
def test_by_hand(here, way):
    """`mpiddp run script.py` is a rank under mpirun and under torchrun, and else `mpiddp launch`."""
    script = program("reduces.py")
    commands = {
        "mpirun": mpirun_command(2, *RUN, script),
        "torchrun": [*TORCHRUN, "--nproc-per-node=2", "--standalone", *RUN, script],
        "alone": ["run", "-n", "2", program("identity.py")],
        "one": mpirun_command(1, *RUN, script),
        "batch": ["run", "-n", "2", "-H", "localhost:2", program("identity.py")],
    }
    # A batch script of Slurm has variables of its job, and is no task of it.
    env = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"} if way == "batch" else {}
    ranks = here.run(*commands[way], env=env).assert_ok().records
    count = 1 if way == "one" else 2
    places = [(rank["RANK"], rank["LOCAL_RANK"], rank["GROUP_RANK"]) for rank in ranks]
    assert places == [(0, 0, 0), (1, 1, 0)][:count]
    assert {rank.get("sum", 3) for rank in ranks} == {count * (count + 1) // 2}


JOINS = """
import json, os, mpiddp, torch, torch.distributed as dist
with mpiddp.process_group(backend="gloo") as world:
    total = torch.tensor([world.rank + 1])
    dist.all_reduce(total)
    line = json.dumps({"RANK": world.rank, "sum": total.item(), "WORLD_SIZE": world.world_size})
    os.write(1, f"{line}\\n".encode())
"""


@every_mpi
def test_a_raw_mpirun(here, mpi):
    """A script that calls mpiddp.init() or mpiddp.process_group() starts with `mpirun python train.py`."""
    mpirun = mpirun_of(mpi)
    flags = ("--allow-run-as-root", "--bind-to", "none", "--oversubscribe")
    options = flags if mpi.startswith("openmpi") else ()
    path = f"{Path(mpirun).parent}:/usr/bin:/bin"  # Intel's mpirun needs its own folder
    # How they meet depends on the MPI, but not what follows.
    job = [here.script(JOINS)] if mpi in ("openmpi5", "mpich") else [*RUN, program("identity.py")]
    command = (mpirun, *options, "-n", "2", sys.executable, *job)
    ranks = here.run(*command, env={"PATH": path, **library_of(mpi)}).assert_ok().records
    assert [(rank["RANK"], rank["WORLD_SIZE"], rank.get("sum", 3)) for rank in ranks] == [
        (0, 2, 3),
        (1, 2, 3),
    ]


USES_MPI = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))"
KEEPS_MPI = f"{USES_MPI}; import mpiddp; mpiddp.init(backend='gloo'); {USES_MPI}"


def test_a_script_that_uses_mpi4py(here):
    """A script under mpirun may use mpi4py if it imports it before mpiddp.init(). Later the import fails."""
    kept = here.run(*mpirun_command(2, here.script(KEEPS_MPI))).assert_ok()
    assert kept.lines == ["2"] * 4
    done = here.run(*mpirun_command(2, *RUN, here.script(USES_MPI)))
    assert done.code == 1
    assert "ImportError" in done.stderr
    assert "mpiddp launch" in done.stderr


def test_a_line_of_mpirun(here):
    """The options and the program of an mpirun run behind `mpiddp launch`. A note has the same in its own words."""
    (here.folder / "hosts").write_text("localhost slots=2\n")
    script, options = program("identity.py"), ["-np", "2", "-hostfile", "hosts"]
    line = [*options, "-bind-to", "none", "-map-by", "slot", "-mca", "pml", "ob1", "-x", "PATH"]
    done = here.run("launch", *line, sys.executable, script).assert_ok()
    assert [rank["RANK"] for rank in done.records] == [0, 1]
    words = shlex.join(["mpiddp", "launch", *options, "-x", "PATH", script])
    left_out = "without meaning here: -bind-to none, -map-by slot and -mca pml ob1."
    assert done.said == [f"{left_out} The same in mpiddp's words: {words}"]
    other = here.script(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', "python3")
    Path(other).chmod(0o755)
    done = here.run("launch", *options, other, "-c", "import os; print(os.environ['RANK'])")
    assert sorted(line[-1] for line in done.assert_ok().lines) == ["0", "1"]
    assert (
        f"{other} is not the Python of mpiddp, {sys.executable}, so it runs as a command"
        in done.stderr
    )


# --- a script, and any command ---


ALONE = {"RANK": "0", "WORLD_SIZE": "1"}  # without them, `mpiddp run` is `mpiddp launch`
ENDS = {
    "exit": "import sys\nsys.exit('a last message')",
    "raise": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError('a bug') from e",
    "syntax": "x = = 1",
    # Python ends what a script leaves in its globals: an open file gets its last lines.
    "globals": "# torch\nclass End:\n    def __del__(self, say=print):\n        say('ended')\nend = End()",
    "hook": "import sys\nsys.excepthook = lambda *a: print('my hook', a[0].__name__)\n1 / 0",
    "failing hook": "import sys\ndef hook(*_):\n    {}['a']\nsys.excepthook = hook\n1 / 0",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_as_under_python(here, end):
    """A script has the exit code, the output and the traceback that Python gives it."""
    script = here.script(ENDS[end])
    plain, done = here.run("python", script), here.run("run", script, env=ALONE)
    assert (done.code, done.stdout) == (plain.code, plain.stdout)
    own = r"^mpiddp: rank 0 on \S+ (failed: |ended with exit code ).*\n"
    assert re.sub(own, "", done.stderr, flags=re.MULTILINE) == plain.stderr


@pytest.mark.parametrize("inner", ["torchrun", "launch"])
def test_a_job_inside_of_a_rank(here, inner):
    """A rank may start a torchrun or an `mpiddp launch`, which is a separate job."""
    torchrun = [sys.executable, *TORCHRUN[1:], "--nproc-per-node=2", "--standalone"]
    launch = [sys.executable, "-m", "mpiddp", "launch", "-H", "localhost:2"]
    command = [*(torchrun if inner == "torchrun" else launch), program("reduces.py")]
    nested = ("--", "sh", "-c", '[ "$RANK" != 0 ] || exec "$@"', "sh", *command)
    done = here.run("launch", *here.where(3), *nested)
    assert [(rank["RANK"], rank["sum"]) for rank in done.assert_ok().records] == [(0, 3), (1, 3)]


@pytest.mark.parametrize("kind", ["container", "shell", "other torch"])
def test_a_command_is_a_rank(here, kind):
    """Any command can be a rank: a shell, or a container that has its own torch and no MPI."""
    for name in ("reduces.py", "identity.py"):
        shutil.copy(program(name), here.folder)
    command = ["bash", "-c", f"{sys.executable} identity.py; exit $?"]
    if kind != "shell":
        other = installs.OTHER_TORCH if kind == "other torch" else None
        if other is not None and not installs.has_other_torch():
            pytest.skip("no other torch: python -m tests.support.installs all")
        command = containers.container(here.folder, "reduces.py", other)
    done = here.run("launch", *here.where(2), "--", *command).assert_ok()
    assert {rank["cwd"] for rank in done.records} == {str(here.folder) if kind == "shell" else "/"}
    own, is_other = importlib.metadata.version("torch"), kind == "other torch"
    told = [(rank["RANK"], rank.get("sum"), rank.get("torch", own) == own) for rank in done.records]
    assert told == [(n, None if kind == "shell" else 3, not is_other) for n in range(2)]


CHILD = """
import os
if os.fork() == 0:
    raise ValueError("of a child")
print("its exit code:", os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_child_that_fails(here):
    """A rank may start child processes. A child that fails does not end the job."""
    done = here.run("launch", *here.where(1), here.script(CHILD)).assert_ok()
    assert done.lines == ["its exit code: 1"]
    assert done.stderr.count("ValueError: of a child\n") == 1
    assert done.said == []


# --- nothing starts silently wrong ---


@pytest.mark.parametrize("how", ["script", "import", "module", "PYTHONPATH"])
def test_all_hosts_run_the_same_code(hosts, how):
    """A script, or a file of its folder or of `-m MODULE`, that differs on a host stops the start.

    The error line names the file. The doctor compares the same files.
    """
    code = Path("/root", how)
    changed = "train.py" if how == "script" else "pkg/net.py"
    for name in hosts.hosts_of(2):
        shell(hosts[name], f"mkdir -p {code}/pkg; cd {code}; touch pkg/__init__.py pkg/train.py")
        shell(hosts[name], f"cd {code}; echo 'from pkg import net' >train.py; touch pkg/net.py")
        shell(hosts[name], f'cd {code}; echo "print(1)  # {name}" >>{changed}')
    job, where, env = {
        "module": (("-m", "pkg.train"), code, {}),
        "PYTHONPATH": (("-m", "pkg.train"), hosts.folder, {"PYTHONPATH": f"{ROOT}:{code}"}),
    }.get(how, ((code / "train.py",), hosts.folder, {}))
    done = hosts.run("launch", *hosts.where(2), *job, cwd=where, env=env)
    assert (done.code, done.stdout) == (2, ""), done.stderr
    named = rf"{changed} differs on node1 .*\n  fix: mpiddp hosts push"
    assert re.search(named, done.stderr), done.stderr
    if how == "import":  # the script, a file as any other of its folder, goes the same way
        done = hosts.run("doctor", *hosts.where(2), "--script", *job)
        (line,) = re.findall("^fail +files +(.*)$", done.stdout, re.MULTILINE)
        assert f"{changed} differs: " in line


def test_packages_of_pythonpath(hosts):
    """Packages that only PYTHONPATH names count as installed on every host, for the doctor as well."""
    packages = Path(importlib.metadata.distribution("torch").locate_file(""))
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = {"PYTHONPATH": f"{ROOT}:{packages}", "PATH": path}
    own = (sys._base_executable, "-m", "mpiddp")  # without torch, outside of a virtual environment
    hosts.run(*own, "launch", *hosts.where(2), hosts.script("import numpy"), env=env).assert_ok()
    doctor = hosts.run(*own, "doctor", *hosts.where(2), env=env)
    assert " the same on every host: mpi4py " in doctor.stdout


@pytest.mark.parametrize(
    "fault", ["script", "port", "address", "library", "MPICH", "Intel MPI", "launcher"]
)
def test_a_refusal_is_printed_once(here, fault):
    """All ranks refuse bad input together, also under a plain mpirun: exit code 2, and one error line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        # With the library of another MPI, mpirun would start three jobs of one rank. Without that MPI,
        # this fault alone is skipped.
        names = {"MPICH": "mpich", "Intel MPI": "intelmpi"}
        other = library_of(names[fault]) if fault in names else {}
        of_another = (other, f"{fault} (libmpi.so.12).")
        env, words = {
            "script": ({}, "nowhere.py not found"),
            "port": ({"MASTER_PORT": port}, f"MASTER_PORT={port} "),
            "address": ({"MASTER_ADDR": "192.0.2.7"}, "192.0.2.7 "),
            "library": ({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "cannot load MPI library"),
            "MPICH": of_another,
            "Intel MPI": of_another,
            "launcher": ({"TORCHELASTIC_RUN_ID": "stale"}, "torchrun's "),
        }[fault]
        job = (*RUN, "nowhere.py" if fault == "script" else program("identity.py"))
        done = here.run(*mpirun_command(3, *job), env=env)
        if not own_lines(
            done.stderr
        ):  # a loaded machine has begun rank 0 after the end of another rank
            done = here.run(*mpirun_command(3, *job), env=env)
    assert (done.code, done.stdout) == (2, ""), done.stderr
    (sentence,) = [line for line in own_lines(done.stderr) if not line.startswith("  fix: ")]
    assert words in sentence


def test_two_scripts_are_no_job(here):
    """A raw mpirun that starts two scripts is refused, also on one host, and the error names both."""
    here.script("print('began')", "a.py")
    here.script("print('began')", "b.py")
    mpirun, python = mpirun_command(2, *RUN), sys.executable
    line = (*mpirun, "a.py", ":", "-np", "1", python, *RUN, "./a.py")
    assert here.run(*line).assert_ok().lines == ["began"] * 3
    for other in (("b.py",), ("-m", "a")):
        done = here.run(*line[:-1], *other).assert_code(2)
        both = rf"mpiddp: rank 0 on \S+ runs a\.py, and rank 2 on \S+ runs {' '.join(other)};"
        assert re.match(both, own_lines(done.stderr)[0])
        assert done.stdout == ""


# Replaces the hosts node0 and node1 by node0 twice, as a configuration of the MPI could.
ELSEWHERE = """\
for word; do
  shift
  [ "$word" = node0,node1 ] && word=node0,node0
  set -- "$@" "$word"
done
exec MPIRUN "$@"
"""


def test_ranks_elsewhere_than_listed(hosts):
    """The ranks check where they run. If the MPI placed one on another host, the job ends, and says so."""
    real, bin_ = Path(mpirun_of("openmpi5")), hosts.folder / "bin"
    wrong = executable(bin_ / "mpirun", ELSEWHERE.replace("MPIRUN", str(real)))
    for daemon in ("prted", "prterun"):  # they are looked for beside it
        (bin_ / daemon).symlink_to(real.with_name(daemon))
    where = ("-H", "node0:1,node1:1")
    done = hosts.run("launch", "--mpirun", wrong, *where, program("identity.py"))
    assert (done.code, done.stdout) == (2, ""), done.stderr
    assert "(node0:1,node1:1)" in done.stderr
    row = [line.split() for line in done.stderr.splitlines() if "node1" in line.split()][-1]
    assert [*row[-4:-2], row[-1]] == ["1", "node0", "node1"], done.stderr


def test_all_broken_hosts_at_once(hosts):
    """The preflight names every broken host at once, each with its fix, before anything starts."""
    with faults.key_refused(hosts["node1"]), faults.no_sshd(hosts["node2"]):
        where = ("-H", "node0:1,node1:1,node2:1,nowhere:1")
        done = hosts.run("launch", *where, program("identity.py"))
    key, no_sshd, no_name = done.refusals
    assert re.fullmatch(error("(publickey)", "ssh node1: ", "ssh-copy-id node1 "), key), key
    assert re.fullmatch(error("connection refused", "ssh node2: ", "sshd"), no_sshd), no_sshd
    assert re.fullmatch(error("be resolved", "nowhere: ", "/etc/hosts"), no_name), no_name


OTHER_TORCH = "/run/other/torch-2.9.dist-info"
TORCH = importlib.metadata.version("torch")
DIFFER = {  # what node0 alone gets, the job, and how its refusal begins
    "folder": (
        "mkdir /run/work",
        ("--", "true"),
        "node1: the working folder /run/work is missing.",
    ),
    "program": (
        "cp /bin/true /run/only",
        ("--", "/run/only"),
        "node1: /run/only is missing or not",
    ),
    "torch": (
        f"mkdir -p {OTHER_TORCH}; echo Version: 2.9 >{OTHER_TORCH}/METADATA",
        (program("identity.py"),),
        f"torch differs: 2.9 on node0, {TORCH} on node1.\n{FIX}install the same version",
    ),
}


@pytest.mark.parametrize("what", DIFFER)
def test_hosts_that_differ(hosts, what):
    """The preflight names a host that lacks the folder, program or torch version of the others.

    Packages that only PYTHONPATH names count.
    """
    made, job, words = DIFFER[what]
    cwd, env = "/run/work" if what == "folder" else None, {"PYTHONPATH": f"/run/other:{ROOT}"}
    with shelled(hosts["node0"], made, "rm -rf /run/work /run/only /run/other"):
        (sentence,) = hosts.run("launch", *hosts.where(2), *job, cwd=cwd, env=env).refusals
    assert sentence.startswith(words), sentence


def test_one_machine_under_two_names(hosts):
    """A machine that is listed by its name and by its address is refused."""
    address = hosts["node1"].address
    where = ("-H", f"node1:1,{address}:1,node0:1")
    (sentence,) = hosts.run("launch", *where, program("alone.py")).refusals
    assert sentence.endswith(f"{address} and node1 are the same machine.\n{FIX}merge them into one")


def test_hosts_that_come_up_late(hosts):
    """--wait-for-hosts starts the job as soon as all hosts answer. Ctrl-C ends the wait."""
    launch = ("launch", "--wait-for-hosts", "10m", "-H", "node0:1,node1:1,node2:1")
    with faults.no_sshd(hosts["node2"]):
        with faults.without_lines(hosts["node0"], "/etc/hosts", "node1"):
            given_up = hosts.start(*launch, program("identity.py"))
            given_up.until("waiting for node1, node2").signal(2)
            assert (given_up.wait().code, given_up.stdout) == (130, "")
            job = hosts.start(*launch, program("identity.py")).until("waiting for node1, node2")
        job.until("waiting for node2 ")
    assert [rank["host"] for rank in job.wait().assert_ok().records] == hosts.hosts
