"""Allocations: in a scheduler's job, mpiddp uses the job's hosts.

Slurm and Grid Engine are real. PBS, LSF, Flux and Kubeflow's MPIJob cannot run here: their
variables are those of their documentation (tests/support/allocations.py).
"""

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from mpiddp.text import FIX
from tests.support import cluster as test_cluster
from tests.support.allocations import MPIJOB
from tests.support.cluster import USER, Cluster, Layout, faults, grid_engine, needs
from tests.support.cluster.grid_engine import GridEngine
from tests.support.cluster.slurm import Slurm
from tests.support.cluster.ssh import stop_sshd
from tests.support.errors import error
from tests.support.installs import library_of, mpirun_of
from tests.support.machine import executable, python_that_needs
from tests.support.place import Done, Hosts, eventually, program, two_mpis
from tests.support.ranks import LAUNCH, ROOT

RUN = (sys.executable, "-m", "mpiddp", "run")
ENV = {"OMP_NUM_THREADS": "1"}
NO_SSH = "echo 'ssh is not allowed here' >&2; exit 1"
TWO_EACH = ("-N2", "--ntasks-per-node=2")
THREE = ("-N3", "--ntasks-per-node=1")
ON_TWO = [("node0", 0, 0), ("node0", 1, 0), ("node1", 0, 1), ("node1", 1, 1)]


def placed(done: Done) -> list[tuple[str, int, int]]:
    """The host, the local rank and the number of the host of each rank. The job must have ended well."""
    ranks = done.assert_ok().records
    return [(rank["host"], rank["LOCAL_RANK"], rank["GROUP_RANK"]) for rank in ranks]


def one_line(done: Done, word: str) -> str:
    """The error of a refused launch with its fix, which may stand among others of a job's output."""
    assert done.code == 2, done.stdout + done.stderr
    (error_with_fix,) = re.findall(
        rf"^mpiddp: (.*{re.escape(word)}.*(?:\n{FIX}.*)?)", done.stderr, re.MULTILINE
    )
    return error_with_fix


# --- Slurm ---


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Own names resolve to 127.0.1.1, one network is dead, and the interfaces' names differ."""
    layout = Layout(interfaces=("eth0", "ens5"), own_name_is_loopback=True, dead_network=True)
    with test_cluster.up_or_skip(3, layout=layout) as up:
        yield up


@pytest.fixture
def sbatch(hosts: Hosts, batch: Slurm) -> Callable[..., Done]:
    """Run `mpiddp launch` in a batch script, by default with two tasks on each of two hosts, without ssh.

    Each srun adds a line with its options to the file "steps".
    """
    bin_ = hosts.folder / "bin"
    executable(bin_ / "ssh", NO_SSH)
    executable(bin_ / "srun", f'echo "$@" >>{hosts.folder}/steps; exec /usr/bin/srun "$@"')

    def submit(
        *arguments: str, first: str = "", how: str = "exec", job: tuple[str, ...] = TWO_EACH
    ) -> Done:
        launch = f"{how} {shlex.join([*LAUNCH, *arguments])}" if arguments else ""
        text = f"#!/bin/bash\nexport PATH={bin_}:$PATH\n{first}\n{launch}\n"
        done = batch.sbatch(text, *job, cwd=hosts.folder, env=ENV)
        return Done(done.returncode, done.stdout, done.stdout)

    return submit


def test_a_slurm_job(hosts, sbatch):
    """In a Slurm job, `mpiddp launch` starts a rank for each task on the job's hosts, without ssh."""
    options = ("--wait-for-hosts=1h", "--interface", "10.77.0.0/24")
    done = sbatch(*options, program("identity.py"))
    assert placed(done) == ON_TWO
    # A login for the preflight and the variables, and the ranks.
    steps = (hosts.folder / "steps").read_text().splitlines()
    kinds = ["--overlap" in step for step in steps if "--ntasks" in step]
    assert kinds[:2] == [True, False], steps
    assert kinds.count(False) == 1, steps  # a slow start is asked for its reason
    assert done.said[0].startswith("no hosts given: using Slurm job ")
    master = hosts["node0"].address
    network = [(rank["interface"], rank["master"]) for rank in done.records]
    assert network == [("eth0", master)] * 2 + [("ens5", master)] * 2


def test_a_python_of_a_module_in_a_slurm_job(hosts, sbatch):
    """In a Slurm job, a Python that needs LD_LIBRARY_PATH, as one of a module, starts on every host."""
    python = python_that_needs(libraries := hosts.folder / "needed")
    first = f"export LD_LIBRARY_PATH={libraries}; exec {python} -m mpiddp launch {program('identity.py')}"
    assert placed(sbatch("unused", first=first)) == ON_TWO


def test_a_launch_from_a_login_node(hosts, batch):
    """`salloc … mpiddp launch` works on a login node, which is not one of the job's nodes."""
    salloc = ("salloc", "-N2", "--nodelist=node1,node2", "--ntasks-per-node=1")
    options = ("--interface", "10.77.0.0/24")
    done = hosts.run(*salloc, *LAUNCH, *options, program("identity.py"), env=ENV)
    assert placed(done) == [("node1", 0, 0), ("node2", 0, 1)]
    assert {rank["master"] for rank in done.records} == {hosts["node1"].address}
    # Slurm divides three GPUs among two nodes, and no variable says how.
    salloc = ("salloc", "-N2", "--nodelist=node1,node2", "--gpus=3")
    ranks = placed(hosts.run(*salloc, *LAUNCH, *options, program("identity.py"), env=ENV))
    assert sorted(Counter(host for host, *_ in ranks).values()) == [1, 2], ranks


# The kernel kills it on node2, until that host is left out.
KILLED_ON_NODE2 = """
import os, signal, socket, mpiddp
mpiddp.should_stop()  # all ranks have begun
if socket.gethostname() == "node2":
    os.kill(os.getpid(), signal.SIGKILL)
print(os.environ["WORLD_SIZE"], "ranks", os.environ["MARK"], flush=True)
"""


def test_a_sick_host_of_a_slurm_job(hosts, sbatch):
    """In a Slurm job, all verbs work on its hosts: check, push, pull, run, doctor, and all of launch."""
    folder, mpiddp = Path("/run/project"), shlex.join(LAUNCH[:-1])
    hosts.script(KILLED_ON_NODE2, "fails.py")
    lines = [
        f"exec 2>&1; mkdir {folder} {folder}/run; cd {folder}; cp {hosts.folder}/fails.py .",
        "export MARK='a b,$c'",
        f"{mpiddp} launch fails.py; echo code $?",
        f"{mpiddp} hosts push {folder}",
        f"{mpiddp} launch --spares 1 fails.py; echo code $?",
        f"{mpiddp} launch --max-restarts 3 --min-hosts 2 fails.py; echo code $?",
        f"{mpiddp} hosts check",
        f"{mpiddp} hosts run -- sh -c 'hostname >{folder}/run/$(hostname)'",
        f"{mpiddp} hosts pull run; ls run",
        f"{mpiddp} doctor --quick",
        # The end of the doctor's job may reach Slurm late.
        "until [ $(squeue --steps --noheader | wc -l) = 1 ]; do sleep 0.1; done",
        "squeue --steps --noheader --format=%i",
        f"{mpiddp} hosts run -- rm -r {folder}",
    ]
    done = sbatch(first="\n".join(lines), job=THREE)
    said = [
        *(f"mpiddp: .*node{number}: the working folder {folder} is missing" for number in (1, 2)),
        "code 2",
        r"node\[1-2\]: .* sent",
        "mpiddp: kept in reserve: node2",
        r"2 ranks a b,\$c",
        "code 0",
        "mpiddp: leaving out a host: node2 has ended two attempts in a row.",
        r"2 ranks a b,\$c",
        "code 0",
        "3 hosts, 3 slots",
        "node2: 1 file",
        "node2",
        "ok +preflight +3 hosts can start ranks",
        r"\d+.batch",
    ]
    rest = iter(done.stdout.splitlines())
    for line in said:
        assert any(re.match(line, text) for text in rest), f"{line}\n{done.stdout}"
    assert [*rest] == [], done.stdout


@pytest.mark.parametrize(
    "job",
    [
        ("--gpus=6", "--ntasks-per-node=2"),
        ("--gpus-per-task=1", "--ntasks-per-node=2", "--mem-per-cpu=100"),
        ("--gpus-per-node=2", "--cpus-per-task=4", "--export=NONE"),
        ("--exclusive", "--gres=gpu:2", "--ntasks-per-node=2", "--mem=1000"),
    ],
)
def test_steps_of_a_slurm_job(hosts, sbatch, job):
    """The ranks have all cores and GPUs of a Slurm job, and commands on its hosts share these meanwhile."""
    run = shlex.join(
        [*LAUNCH[:-1], "hosts", "run", "--", "sh", "-c", "echo has $CUDA_VISIBLE_DEVICES"]
    )
    wait = "echo gpus $CUDA_VISIBLE_DEVICES; until [ -e finish ]; do sleep 0.1; done"
    launch = shlex.join([*LAUNCH, "--log-ranks", "all", "--", "sh", "-c", wait])
    lines = [
        f"export SLURM_LABELIO=1; {launch} &",
        f"until [ $(squeue --steps --noheader | wc -l) = 2 ]; do sleep 0.1; done; {run}",
        "touch finish; wait $!",
    ]
    done = sbatch(first="\n".join(lines), job=("-N3", *job)).assert_ok()
    # Equal lines of two hosts may come apart.
    assert set(re.findall(r"^\S+: (has .*)$", done.stdout, re.MULTILINE)) == {"has 0,1"}, (
        done.stdout
    )
    assert len(re.findall("gpus [01]", done.stdout)) == 6, done.stdout


@pytest.mark.parametrize("dies", ["slurmd", "link"])
def test_a_node_of_a_slurm_job_dies(hosts, batch, dies):
    """A Slurm job with --no-kill goes on without a node that dies. The error says what Slurm does else."""
    options = ("--max-restarts=3", "--min-hosts=2", "--lost-after=10s")
    launch = shlex.join(
        [*LAUNCH, "--log-ranks", "all", *options, program("alone.py"), "never", str(hosts.folder)]
    )
    output, script = hosts.folder / "output", f"#!/bin/sh\nexec {launch}\n"
    number = batch.submit(script, output, *THREE, "--no-kill", cwd=hosts.folder, env=ENV)
    eventually(lambda: output.exists() and output.read_text().count("ready\n") == 3)
    if dies == "slurmd":  # Slurm waits for the node, and does not take its steps for ended
        with batch.killed(hosts["node2"]):
            eventually(lambda: output.read_text().count("ready\n") == 5)
    else:
        state = ["scontrol", "update", "nodename=node2"]
        with faults.unreachable(hosts["node2"]):
            hosts["node0"].run([*state, "state=down", "reason=dead"], check=True)
            eventually(lambda: output.read_text().count("ready\n") == 5)
        hosts["node0"].run([*state, "state=resume"], check=True)
    (hosts.folder / "finish").touch()
    assert batch.wait(number, output) == 0, output.read_text()
    assert "restarting on node0 and node1 (restart 1 of 3)." in output.read_text()
    assert "#SBATCH --no-kill" in output.read_text()
    batch.wait_until_idle()


def test_a_preempted_slurm_job(hosts, batch):
    """If a job with a higher priority takes the nodes of a Slurm job, its ranks save and leave."""
    launch = shlex.join([*LAUNCH, "--log-ranks", "all", program("alone.py"), "never"])
    output, script = hosts.folder / "output", f"#!/bin/sh\nexec {launch}\n"
    number = batch.submit(script, output, *THREE, "--exclusive", cwd=hosts.folder, env=ENV)
    eventually(lambda: output.exists() and output.read_text().count("ready\n") == 3)
    done = batch.sbatch("#!/bin/sh\nsrun hostname\n", "-N3", "--partition=high", "--exclusive")
    assert sorted(done.stdout.split()) == ["node0", "node1", "node2"]
    assert batch.wait(number, output) == 75, output.read_text()


def test_an_mpirun_in_a_slurm_job(hosts, sbatch):
    """In a Slurm job, --mpirun and -H start the ranks over ssh instead, in other numbers than Slurm's."""
    (hosts.folder / "bin" / "ssh").unlink()
    options = ("--mpirun", mpirun_of("mpich"), "-H", "node1:1,node0:3")
    done = sbatch(*options, program("identity.py"))
    assert placed(done) == [("node1", 0, 0), ("node0", 0, 1), ("node0", 1, 1), ("node0", 2, 1)]
    done = sbatch("--mpirun", mpirun_of("openmpi5"), program("identity.py"))
    assert placed(done) == ON_TWO
    assert not (hosts.folder / "steps").exists()


def test_a_command_in_a_slurm_job(hosts, sbatch):
    """In a Slurm job, a command can be a rank. A command that fails is named, and ends the others.

    All ranks have the variables of the batch script, except one of -x NAME-.
    """
    text = "echo shown $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE; f; env"
    first = "f() { echo $MODE; }; export -f f; export MODE='a b,$c' KEPT=1"
    done = sbatch("-x", "KEPT-", "--", "bash", "-c", text, first=first).assert_ok()
    assert done.lines.count("a b,$c") == 4
    assert not re.search(r"^KEPT=", done.stdout, re.MULTILINE)
    shown = sorted(line for line in done.lines if line.startswith("shown"))
    assert shown == [f"shown {n} {n % 2} {n // 2} 4" for n in range(4)]
    assert not re.search(r"^(OMPI|PMI|PMIX)\w*=", done.stdout, re.MULTILINE)
    done = sbatch("--", "sh", "-c", "[ $RANK = 3 ] && exit 5; sleep 6000")
    assert done.code == 1, done.stdout
    assert "rank 3 on node1 ended first, with exit code 5." in done.stdout
    eventually(lambda: not hosts.processes("sleep 6000"))


def test_each_task_of_a_slurm_job(hosts, sbatch):
    """`srun mpiddp launch` is refused, because it would start a job in each task."""
    done = sbatch(program("identity.py"), how="srun --mpi=none")
    assert (done.code, done.records) == (2, [])
    values = ("SLURM_PROCID=", "4 ranks (slurm)", "mpiddp run")
    assert re.search(error("launch starts", *values), done.stdout), done.stdout


def test_the_shell_of_srun_pty(hosts, batch):
    """`mpiddp run` launches in the shell of `srun --pty`, but not in tasks that srun starts from there."""
    run, launch = (shlex.join([*verb, program("identity.py")]) for verb in (RUN, LAUNCH))
    inner = f"srun --overlap --mpi=none -N2 -n4 {launch}; echo inner $?"
    shell = f"[ $SLURM_PROCID = 0 ] || exit 0; {run}; {inner}"
    outer = ["srun", *TWO_EACH, "--mpi=none", "--pty", "sh", "-c", shell]
    terminal = "import pty, sys; pty.spawn(sys.argv[1:])"
    done = hosts.run("python", "-c", terminal, *outer, env=ENV)
    assert placed(done) == ON_TWO
    assert "inner 2" in done.stdout.replace("\r", "").splitlines(), done.stdout


# --- Grid Engine ---


@pytest.fixture(scope="module")
def without_sshd() -> Iterator[GridEngine]:
    """Grid Engine on two hosts that `qrsh -inherit` alone reaches."""
    if reason := needs.why_no_grid_engine():
        needs.lacking(reason)
    with test_cluster.up(2) as up:
        for host in up.hosts:
            stop_sshd(host)
        yield grid_engine.start(up)


@pytest.fixture
def engine(without_sshd: GridEngine, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Hosts.on(without_sshd.cluster, request.node.name) as place:
        yield place


@pytest.fixture
def qsub(without_sshd: GridEngine, engine: Hosts) -> Callable[..., Done]:
    """Run `mpiddp launch` in a job script with a parallel environment and a number of slots."""

    def submit(*job: str, pe: str = "spread 3", user: str = "root", first: str = "") -> Done:
        text = f"#!/bin/bash\n{first}\nexec {shlex.join([*LAUNCH, *job])}\n"
        how = {"cwd": engine.folder, "env": ENV, "user": user}
        done = without_sshd.qsub(text, "-pe", *pe.split(), **how)
        return Done(done.returncode, done.stdout, done.stdout)

    return submit


def left(engine: Hosts) -> list[str]:
    commands = [process.command for process in engine.processes()]
    return [command for command in commands if "sge_shepherd" not in command]


@pytest.mark.parametrize(("mpi", "user"), [("openmpi5", USER), ("mpich", "root")])
def test_a_grid_engine_job(engine, qsub, mpi, user):
    """In a job of Grid Engine, mpirun starts the ranks on the job's slots, without ssh, for any user."""
    engine.folder.chmod(0o777)
    done = qsub("--mpirun", mpirun_of(mpi), program("identity.py"), pe="fill 6", user=user)
    expected = [("node0", rank, 0) for rank in range(4)] + [("node1", rank, 1) for rank in range(2)]
    first, *rest = placed(done)
    other = {"node0": "node1", "node1": "node0"}  # the job may begin on either host
    assert [first, *rest] in (expected, [(other[host], *place) for host, *place in expected])
    assert done.said[0].startswith("no hosts given: using Grid Engine job ")
    assert {rank["user"] for rank in done.records} == {user}


def test_push_in_a_grid_engine_job(qsub):
    """In a job of Grid Engine, a push reaches the job's hosts without ssh, byte for byte."""
    folder, mpiddp = Path("/run/project"), shlex.join(LAUNCH[:-1])
    first = f"mkdir {folder}; cd {folder}; head -c 3000000 /dev/urandom >random; exec 2>&1\n"
    first += f"{mpiddp} hosts push {folder}; {mpiddp} hosts run -- sha1sum {folder}/random"
    done = qsub(
        "--min-hosts=2", "--", "rm", "-rf", str(folder), first=first, pe="spread 5"
    ).assert_ok()
    sums = dict(re.findall(r"^(node\S+): (\w+)  /run/project/random$", done.stdout, re.MULTILINE))
    assert sums.keys() in ({"node[0-1]"}, {"node0", "node1"}), done  # as they come, at once or not
    assert len({*sums.values()}) == 1


def test_tasks_of_a_grid_engine_job(engine, qsub):
    """No qrsh of a Grid Engine job is killed: Grid Engine would kill the whole job."""
    log, folder = engine.folder / "log", engine.folder / "bin"
    qrsh = f'echo began >>{log}; /usr/bin/qrsh "$@"; code=$?; echo ended $code >>{log}; exit $code'
    executable(folder / "qrsh", qrsh)
    first = f"export PATH={folder}:$PATH"
    qsub("--mpirun", mpirun_of("mpich"), program("identity.py"), first=first).assert_ok()
    lines = log.read_text().splitlines()
    assert lines.count("began") == lines.count("ended 0") > 0, lines


# mpirun and its qrsh die at once, and nothing tells the ranks. The script's parent is its agent.
KILLS_MPIRUN = """
import os, signal, time
if os.environ["RANK"] == "0":
    agent = open(f"/proc/{os.getppid()}/stat").read()
    os.kill(int(agent.rpartition(")")[2].split()[1]), signal.SIGKILL)
time.sleep(6000)
"""


@pytest.mark.parametrize(
    "why", ["failed first: RuntimeError: a bug", "mpirun was killed by SIGKILL"]
)
def test_a_grid_engine_job_that_fails(engine, qsub, why):
    """In a job of Grid Engine, a rank that fails or an mpirun that is killed ends the ranks on all hosts."""
    kills = (engine.script(KILLS_MPIRUN),)
    done = qsub(*(kills if "killed" in why else (program("alone.py"), "raise")))
    assert done.code == 1, done.stdout
    assert why in done.said[-1], done.stdout
    eventually(lambda: not left(engine))


def test_qdel(engine, without_sshd):
    """qdel ends the ranks of a Grid Engine job on all hosts."""
    login, output = engine["node0"], engine.folder / "output"
    submit = ["qsub", "-terse", "-pe", "spread", "2", "-S", "/bin/sh", "-wd", engine.folder]
    submit += ["-j", "y", "-o", output]
    text = f"exec {shlex.join([*LAUNCH, program('without_should_stop.py'), '0'])}\n"
    env = {**without_sshd.env, **ENV}
    number = login.run([*submit, "-v", "MPIDDP_LOG_RANKS=all"], env=env, stdin=text, check=True)
    eventually(lambda: output.exists() and output.read_text().count("ready") == 2)
    login.run(["qdel", number.stdout.strip()], env=without_sshd.env, check=True)
    eventually(lambda: not left(engine))


def test_an_environment_that_starts_nothing_elsewhere(qsub):
    """If a parallel environment cannot start programs on other hosts, the error shows the way over ssh."""
    line = one_line(qsub(program("identity.py"), pe="loose 3"), "failed")
    assert re.fullmatch(
        error("where ssh is allowed", "qrsh -inherit node", "--hostfile $PE_HOSTFILE"), line
    )


# --- LSF and PBS: stand-ins of their own remote programs, and no ssh ---

# "The blaunch command provides a drop-in replacement for the rsh and ssh commands" (LSF command reference).
BLAUNCH = """\
[ "$LSB_JOBID" ] || { echo "blaunch: not within a job" >&2; exit 1; }
[ "$1" = -n ] && shift && exec </dev/null
echo "$1" >> "${0%/*}/calls"
exec /usr/bin/ssh "$@"
"""
# It starts a program without a shell and without stdin, whose output goes to the job's files, and ends with
# its exit code (pbs_tmrsh(8B), src/cmds/pbs_tmrsh.c of OpenPBS).
PBS_TMRSH = f"""\
#!{sys.executable}
import os, shlex, subprocess, sys
host, *program = [word for word in sys.argv[1:] if word != "-n"]
assert os.environ["PBS_JOBID"]
folder = os.path.dirname(sys.argv[0])
with open(os.path.join(folder, "output"), "a") as output:
    ssh = ["/usr/bin/ssh", "-n", host, "exec " + shlex.join(program)]
    sys.exit(subprocess.run(ssh, stdout=output, stderr=output).returncode)
"""


@two_mpis
def test_an_lsf_job(hosts, mpi):
    """In a job of LSF, mpirun starts the ranks with blaunch, without ssh."""
    bin_ = hosts.folder / "bin"
    for name, text in (("blaunch", BLAUNCH), ("ssh", NO_SSH)):
        executable(bin_ / name, text)
    env = {"PATH": f"{bin_}:/usr/bin:/bin", "LSF_BINDIR": str(bin_), "LSB_JOBID": "105"}
    env |= {"LSB_MCPU_HOSTS": "node0 1 node1 2"}
    done = hosts.run("launch", program("identity.py"), env=env, mpi=mpi)
    assert placed(done) == [("node0", 0, 0), ("node1", 0, 1), ("node1", 1, 1)]
    assert done.said[0] == "no hosts given: using LSF job 105, slots=3"
    assert set((bin_ / "calls").read_text().split()) == {"node1"}
    del env["LSB_JOBID"]
    line = one_line(hosts.run("launch", program("identity.py"), env=env), "blaunch")
    values = ("blaunch node1 ", "not within a job", "--hostfile $LSB_DJOB_HOSTFILE")
    assert re.fullmatch(error("where ssh is allowed", *values), line)


def test_a_pbs_job_without_ssh(hosts):
    """In a PBS job without ssh, mpirun starts `mpiddp run` over pbs_tmrsh. The error of launch says so."""
    bin_, nodes = hosts.folder / "bin", hosts.folder / "nodes"
    for name, text in (("pbs_tmrsh", PBS_TMRSH), ("ssh", NO_SSH)):
        executable(bin_ / name, text)
    nodes.write_text("node0\nnode1\n")
    mpirun = Path(mpirun_of("intelmpi"))
    env = {"PBS_JOBID": "1234.head", "PBS_NODEFILE": str(nodes), "FI_PROVIDER": "tcp"}
    env |= {"PATH": f"{mpirun.parent}:{bin_}:/usr/bin:/bin", **library_of("intelmpi")}
    tmrsh = ("-bootstrap", "rsh", "-bootstrap-exec", bin_ / "pbs_tmrsh")
    where = ("-hosts", "node0,node1", "-ppn", "1", "-n", "2")
    done = hosts.run(mpirun, *tmrsh, *where, *RUN, program("identity.py"), env=env)
    assert placed(done) == [("node0", 0, 0), ("node1", 0, 1)], (bin_ / "output").read_text()
    done = hosts.run("launch", program("identity.py"), env=env)
    values = ("ssh does not run here: ", "ssh is not allowed here")
    assert re.fullmatch(error("ssh -V", *values), one_line(done, "ssh does not run"))
    assert done.stderr.endswith("start the ranks: mpirun python -m mpiddp run …\n")


# --- Kubernetes ---

KUBERNETES = ROOT / "examples" / "kubernetes"
ENTRY = str(KUBERNETES / "entrypoint.sh")
WORKERS = ("train-worker-0.train.default.svc", "train-worker-1.train.default.svc")
# ompiEnvVars and launcherEnvVars of the MPI operator's mpi_job_controller.go (0.8.2), and what it unsets
# for a launcher without GPUs.
POD = MPIJOB | {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}
POD |= {"NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}


@pytest.fixture(scope="module")
def pods() -> Iterator[Cluster]:
    """A launcher (node0) and two workers, with the operator's key, hostfile and names."""
    with test_cluster.up_or_skip(3) as up:
        key = up.shared / "id"
        keygen = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", key]
        subprocess.run(keygen, check=True)
        workers = list(zip(up.hosts[1:], WORKERS, strict=True))
        for pod in up.hosts:
            stop_sshd(pod)
            pod.run(["rm", "-r", f"{pod.home()}/.ssh"], check=True)
            keys = pod.path("/etc/mpiddp/ssh")
            keys.mkdir(parents=True, mode=0o777)  # as a mounted secret has it
            for name, source in (("id_rsa", key), ("id_rsa.pub", key.with_suffix(".pub"))):
                (keys / name).write_bytes(source.read_bytes())
            with pod.path("/etc/hosts").open("a") as names:
                names.write("".join(f"{worker.address} {name}\n" for worker, name in workers))
        up["node0"].path("/etc/mpi").mkdir()
        hostfile = "".join(f"{name} slots=1\n" for name in WORKERS)
        up["node0"].path("/etc/mpi/hostfile").write_text(hostfile)
        sshd = [worker.popen([ENTRY, "worker"]) for worker, _ in workers]
        for server in sshd:
            next(line for line in server.stderr if "Server listening" in line)
        yield up
        for server in sshd:
            server.end()


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4"], indirect=True)
def test_an_mpijob(pods, mpi):
    """The example for Kubeflow's MPIJob starts the ranks in the workers as soon as all pods have a name."""
    spec = yaml.safe_load((KUBERNETES / "mpijob.yaml").read_text())["spec"]
    container = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    options = container["args"][2 : container["args"].index("-m")]
    assert not any("hostfile" in option for option in options)  # the operator's variable names it
    command = [ENTRY, *LAUNCH, *options, "--mpirun", mpirun_of(mpi), program("identity.py")]
    with faults.without_lines(pods["node0"], "/etc/hosts", WORKERS[1]):
        job = pods["node0"].popen(command, cwd=pods.shared, env=POD)
        next(line for line in job.stderr if f"waiting for {WORKERS[1]} (up to " in line)
    out, err = job.communicate()
    done = Done(job.returncode, out, err).assert_ok()
    assert [rank["host"] for rank in done.records] == ["node1", "node2"]


def test_a_pod_of_another_job(pods):
    """The example for Kubeflow's MPIJob keeps ssh's checks: a pod with another job's key is refused."""
    pod = pods["node0"]
    ssh = ["ssh", "-o", "BatchMode=yes", WORKERS[0], "true"]
    pod.run([ENTRY, *LAUNCH, "--help"], env=POD)  # the entry point writes the keys
    assert pod.run(ssh).returncode == 0
    known = f"{pod.home()}/.ssh/known_hosts"
    _, kind, key = pod.path(known).read_text().split()
    with faults.changed(pod, known, lambda _: f"* {kind} {key[:-8]}AAAAAAA=\n"):
        refused = pod.run(ssh)
    assert refused.returncode == 255
    assert "Host key verification failed" in refused.stderr


def test_a_pytorchjob(hosts):
    """`mpiddp run` works in the pods of a Kubeflow PyTorchJob as they are."""
    env = {"WORLD_SIZE": "2", "MASTER_PORT": "23456", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    # The master's own MASTER_ADDR is localhost, as Kubeflow's operator sets it.
    pods = [
        hosts[name].popen(
            [*RUN, program("reduces.py")],
            env={**env, **ENV, "RANK": str(rank), "MASTER_ADDR": address},
        )
        for rank, (name, address) in enumerate([("node0", "localhost"), ("node1", "node0")])
    ]
    outputs = [pod.communicate() for pod in pods]
    done = Done(0, outputs[0][0] + outputs[1][0], "".join(err for _, err in outputs))
    assert placed(done) == [("node0", 0, 0), ("node1", 0, 1)], outputs
    assert {rank["sum"] for rank in done.records} == {3}


WITHOUT_LOCALS = "env -u MPI_LOCALRANKID -u MPI_LOCALNRANKS"
OPEN_MPIS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
VARIABLES = {
    "hydra": WITHOUT_LOCALS,
    "flux": f"FLUX_TASK_RANK=$PMI_RANK FLUX_JOB_SIZE=$PMI_SIZE FLUX_TASK_LOCAL_ID=$MPI_LOCALRANKID {WITHOUT_LOCALS}",
    "pals": f"PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$MPI_LOCALRANKID {WITHOUT_LOCALS}",
    # IBM's Spectrum MPI is an Open MPI.
    "jsrun": " ".join(f"JSM_NAMESPACE_{name}=$OMPI_COMM_WORLD_{name}" for name in OPEN_MPIS)
    + " env "
    + " ".join(f"-u OMPI_COMM_WORLD_{name}" for name in OPEN_MPIS),
}


@pytest.mark.parametrize("kind", VARIABLES)
def test_local_ranks_that_nobody_sets(here, kind):
    """Ranks of Flux, PALS, jsrun and Hydra get local ranks, although their launchers set none."""
    mpi = "openmpi5" if kind == "jsrun" else "mpich"
    options = ("--allow-run-as-root", "--oversubscribe") if mpi == "openmpi5" else ()
    shell = f'unset OMP_NUM_THREADS; {VARIABLES[kind]} "$@"'
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    job = ("-n", "3", "sh", "-c", shell, "sh", *RUN, program("variables.py"), *names)
    done = here.run(mpirun_of(mpi), *options, *job, env=library_of(mpi)).assert_ok()
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    found = sorted(tuple(rank["found"][name] for name in names) for rank in done.records)
    assert found == [(str(rank), "3", str(threads)) for rank in range(3)]


# --- documented variables ---


@pytest.mark.parametrize("name", ["PBS_JOBID", "PET_NNODES"])
def test_never_silently_alone(here, name):
    """A job never starts on one host in silence. If a scheduler does not list its hosts, launch refuses."""
    said = ["no hosts given: using this machine, slots=1"]
    assert here.run("launch", "-q", "--", "true").assert_ok().said == said
    assert here.run("launch", "-q", "-H", "localhost", "--", "true").assert_ok().said == []
    # tests/refusals has the sentence of each scheduler.
    (sentence,) = here.run("launch", program("identity.py"), env={name: "2"}).refusals
    assert f"{name}=2" in sentence
