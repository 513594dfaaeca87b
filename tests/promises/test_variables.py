"""Variables: which of them reach the ranks, and the command line that starts the ranks.

python -m tests.promises.test_variables     # write tests/data/command_lines.txt, after an intended change
"""

import io
import os
import re
import shlex
import signal
import socket
import sys
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

from mpiddp.cli import main
from tests.support import cluster as test_cluster
from tests.support.allocations import FLUX, GRID_ENGINE, LSF, MPIJOB, PBS, SLURM, enter_folder
from tests.support.cluster import faults
from tests.support.errors import error
from tests.support.installs import mpirun_of
from tests.support.machine import TWO_GPUS, executable, reserved, tool
from tests.support.place import MPIS, eventually, every_mpi, every_mpi_on_hosts, program, two_mpis
from tests.support.ranks import ROOT, mpirun_command

GOLDEN = ROOT / "tests" / "data" / "command_lines.txt"


@every_mpi
def test_what_reaches_other_hosts(hosts, mpi):
    """All ranks get every variable of the launcher, byte by byte. -x sets one, -x NAME- keeps one at home."""
    env = {"EDITOR": "a\n'b' $c", "MY_KEY": "\udcff", "BASH_FUNC_f%%": "() {  echo é\n}"}
    env |= {"MODE": "slow", "HF_TOKEN": "private-value", "WANDB_API_KEY": "private-value"}
    options = ("-H", "node1:1,node0:1,node2:1", "-x", "MODE=private a", "-x", "WANDB_API_KEY-")
    job = hosts.start("launch", *options, program("variables.py"), *env, "wait", env=env, mpi=mpi)
    job.until('"RANK"', times=3)
    commands = "\n".join(process.command for process in hosts.processes())
    job.signal(signal.SIGINT)
    passed = {**env, "MODE": "private a"}
    del passed["WANDB_API_KEY"]
    ranks = job.wait().records
    assert [rank["host"] for rank in ranks] == ["node1", "node0", "node2"]
    assert [rank["found"] for rank in ranks] == [passed] * 3
    assert program("variables.py") in commands
    assert "private-value" not in commands
    assert commands.count("private a") == 1  # as the user typed it


@every_mpi_on_hosts
def test_names_like_those_of_a_scheduler_or_an_mpi(place, mpi):
    """Facebook's Hydra, Label Studio and models called Flux have variables too, which reach all ranks.

    So does every variable that -x names, even if its name is one that the MPI may set.
    """
    names = ("HYDRA_FULL_ERROR", "GROUP_NAME", "FLUX_DEV", "LS_API_KEY", "QUEUE", "PBS_ROOT")
    typed = ("OMPI_MINE", "PMI_MINE", "I_MPI_MINE", "SLURM_MINE")
    options = [word for name in typed for word in ("-x", f"{name}=1")]
    job = (*place.where(2), *options, program("variables.py"), *names, *typed)
    env = dict.fromkeys(names, "1")
    done = place.run("launch", "--log-ranks", "all", *job, env=env, mpi=mpi).assert_ok()
    assert [rank["found"] for rank in done.records] == [env | dict.fromkeys(typed, "1")] * 2


READS_OPEN_MPIS = """
import os, subprocess, sys
import torch, torch.distributed as dist
ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
theirs = [f"OMPI_COMM_WORLD_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
def check():
    found = {name for name in os.environ if name.startswith(("OMPI_COMM", "PMI"))}
    assert found == {*theirs}, found
    assert [os.environ[name] for name in ours] == [os.environ[name] for name in theirs]
check()
dist.init_process_group("gloo")
dist.all_reduce(number := torch.ones(1))
from mpi4py import MPI
check()
alone = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
child = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True)
print(int(number), MPI.COMM_WORLD.allreduce(1), child.stdout.strip(), flush=True)
"""


@two_mpis
def test_mpi_variables(here, mpi):
    """With --mpi-variables, a script finds Open MPI's four variables of its rank. No child joins an MPI by them."""
    launch = ("launch", *here.where(2), "--log-ranks", "all", "--mpi-variables")
    done = here.run(*launch, here.script(READS_OPEN_MPIS), mpi=mpi).assert_ok()
    assert sorted(line.split("] ")[-1].strip() for line in done.lines) == ["2 2 1"] * 2
    words = "echo $RANK $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE $PMIX_RANK$PMI_RANK"
    done = here.run(*launch, "--", "sh", "-c", words, mpi=mpi).assert_ok()
    ranks = sorted(line.split("] ")[-1].strip() for line in done.lines)
    assert ranks == ["0 0 of 2", "1 1 of 2"]
    inner = ("--", sys.executable, "-m", "mpiddp", "launch", "-H", "localhost:2")
    done = here.run("launch", *here.where(1), "--mpi-variables", *inner, "--", "sh", "-c", words)
    assert sorted(line.split("] ")[-1].strip() for line in done.assert_ok().lines) == [
        "0 of",
        "1 of",
    ]


def test_the_options_of_a_hostfile(hosts):
    """Lines "#: OPTIONS" of a hostfile choose its network. A variable of theirs precedes that of the shell.

    --env-file precedes both, and -x precedes all of these, as NAME- too.
    """
    (hosts.folder / "job.env").write_text("NCCL_DEBUG=INFO\n")
    file = hosts.folder / "hosts.txt"
    options = "#: --exclude node2 -x NCCL_DEBUG=VERSION -x GLOO_SOCKET_IFNAME=eth0"
    file.write_text(f"{options}\nnode1 slots=2\nnode0 slots=1 #: -n 1\nnode2\n")
    job = (program("variables.py"), "NCCL_DEBUG", "GLOO_SOCKET_IFNAME")
    chosen, kept = ("-x", "NCCL_DEBUG=WARN"), ("-x", "NCCL_DEBUG-")
    of_file = ("--env-file", "job.env")
    rows = (
        ((), "VERSION"),
        (of_file, "INFO"),
        ((*chosen, *of_file), "WARN"),
        ((*of_file, *kept), None),
    )
    for typed, debug in rows:
        where, env = ("--hostfile", file), {"NCCL_DEBUG": "TRACE"}
        done = hosts.run("launch", *where, *typed, *job, env=env).assert_ok()
        places = [(rank["host"], rank["found"]) for rank in done.records]
        variables = ({"NCCL_DEBUG": debug} if debug else {}) | {"GLOO_SOCKET_IFNAME": "eth0"}
        assert places == [(host, variables) for host in ("node1", "node1", "node0")]
    checked = hosts.run("hosts", "check", file).assert_ok().stdout
    assert checked.endswith(f"{file}:1: {options}\n")


@pytest.mark.parametrize(
    "option",
    [
        *(
            "--mpirun {program}",
            "--on-end {program}",
            "--env-file {program}",
            "--report x",
            "--push",
            "--image {program}.sif",
        ),
        *("-x LD_PRELOAD=x.so", "-x NCCL_NET_PLUGIN=x", "-x NCCL_DEBUG_FILE=x", "-x UCX_TLS=/x"),
        *("-x 'UCX_GDB_COMMAND=touch ran'", "-x UCX_STATS_DEST=file:x", "-x NCCL_NET=x"),
    ],
)
def test_a_hostfile_is_no_program(here, option):
    """A hostfile runs no program, sends nothing and writes no file, whatever its lines say."""
    ran = here.folder / "ran"
    line = option.format(program=executable(here.folder / "evil", f"touch {ran}"))
    (file := here.folder / "hosts.txt").write_text(f"#: {line}\nlocalhost\n")
    for dry in ((), ("--dry-run",)):
        done = here.run("launch", *dry, "--hostfile", file, here.script("")).assert_code(2)
        assert "a hostfile may only choose networks" in done.stderr
        if line.startswith("-x"):
            name = line.partition("=")[0].replace("'", "")
            assert done.stderr.splitlines()[1:] == [f"  fix: mpiddp launch {name}=…"]
    assert not ran.exists()


@every_mpi
def test_what_crosses_the_network(hosts, mpi):
    """No variable crosses the network in clear text, nor the job's key. No file of them is left."""
    captured = hosts.folder / "captured"
    hosts.start("ssh", "node1", sys.executable, program("sniffer.py"), str(captured)).until("ready")
    options = ("-H", "node1:1,node0:1", "-x", "MODE=a-set-value", "--log-ranks", "none")
    private = os.urandom(8).hex()
    env = {"MY_KEY": private, "NCCL_DEBUG": "a-public-value", "HF_TOKEN": "a-secret"}
    job = hosts.start("launch", *options, program("variables.py"), "none", env=env, mpi=mpi)
    kept: dict[str, str] = {}
    while "MY_KEY" not in kept and job.process.poll() is None:
        for file in Path("/tmp").glob("mpiddp-private-*/variables"):  # which hosts and tests share
            with suppress(OSError):
                assert file.stat().st_mode & 0o777 == 0o600
                assert file.parent.stat().st_mode & 0o777 == 0o700
                rows = file.read_text(encoding="utf-8").split("\0")[:-1]
                found = dict(row.split("=", 1) for row in rows)
                if found.get("MY_KEY") == private:
                    kept, folder = found, file.parent
        time.sleep(0.002)
    job.wait().assert_ok()
    eventually(
        lambda: kept["MPIDDP_JOB"].encode() in captured.read_bytes()
    )  # what mpirun sends to its daemon
    seen = captured.read_bytes()
    values = [kept[name] for name in (*env, "MODE", "MPIDDP_ORDERS")]
    assert [value for value in values if value.encode() in seen] == []
    assert not folder.exists()


def test_what_a_refused_start_leaves(hosts):
    """If a rank refuses its options before it has met the others, no host keeps their variables."""
    node1 = hosts["node1"]  # real hosts do not share /tmp
    with faults.mounted(node1, "/tmp"):
        job = (*hosts.where(2), "--log-dir=/proc/none", program("variables.py"))
        hosts.run("launch", *job).assert_refused("--log-dir /proc/none: No such file")
        assert [*node1.path("/tmp").glob("mpiddp-private-*")] == []


@pytest.mark.parametrize("locale", ["zh_CN.GBK", "ja_JP.EUC-JP"])
def test_a_locale_that_is_not_utf_8(hosts, locale):
    """In a locale such as GBK or EUC-JP, a job runs on several hosts, and the doctor checks them."""
    language, charset = locale.split(".")
    built = hosts.folder / locale
    hosts.run("localedef", "-i", language, "-f", charset, str(built))
    if not built.is_dir():
        test_cluster.lacking(f"localedef cannot make {locale}. Run: apt-get install locales")
    env = {"LOCPATH": str(hosts.folder), "LC_ALL": locale, "PYTHONUTF8": "0"}
    script = hosts.script("import locale\nprint('中', locale.getpreferredencoding())\n")
    both = ("-x", "LOCPATH", "-x", "LC_ALL", "--log-ranks", "all")
    done = hosts.run("launch", *hosts.where(2), *both, script, env=env).assert_ok()
    said = "中".encode(charset).decode(errors="surrogateescape")
    assert [line.endswith(f"{said} {charset}") for line in done.lines] == [True] * 2, done.stdout
    if charset == "GBK":
        hosts.run("doctor", *hosts.where(2), env=env).assert_ok()


SEEN = """
import json, os
print(json.dumps({"RANK": int(os.environ["RANK"]), "names": sorted(os.environ)}))
"""
# Of the host, the rank, or the test's own way to start a job there.
OF_A_RANK = (
    r"LOCAL_RANK|(OMPI|PMIX|PRTE|HWLOC|SSH|XDG)_\w+|DYLD_LIBRARY_PATH|MAIL|MOTD\w*|TMPDIR|LANG|LC_CTYPE"
    r"|_|PWD|OLDPWD|SHLVL"
)


def test_the_same_environment_on_all_ranks(hosts):
    """Ranks beside the launcher have no variable that those of other hosts lack."""
    env = {"CUDA_LAUNCH_BLOCKING": "1", "MODE": "fast", "HF_TOKEN": "x", "PEFT_MODE": "x"}
    of_places = {"SLURMD_NODENAME": "x", "PE": "x", "SKYPILOT_NODE_RANK": "0"}
    env |= {"SLURM_JOB_ID": "7", "SGE_TASK_ID": "3", "SKYPILOT_NUM_NODES": "1", "TERM": "xterm"}
    done = hosts.run("launch", *hosts.where(2), hosts.script(SEEN), env=env | of_places).assert_ok()
    first, second = ({*rank["names"]} for rank in done.records)
    different = {name for name in first ^ second if not re.fullmatch(OF_A_RANK, name)}
    assert different == set()
    assert env.keys() <= first
    assert not first & {*of_places, "MPIDDP_ORDERS", "MPIDDP_PRIVATE"}


def test_the_longest_value(here):
    """A rank gets the longest value that Linux passes to a program. tests/refusals has a longer one."""
    (here.folder / "job.env").write_text(f"BIG={'x' * 131_067}\n")
    job = ("-n", "1", "--env-file", "job.env", program("variables.py"), "BIG")
    assert len(here.run("launch", *job).assert_ok().records[0]["found"]["BIG"]) == 131_067


def test_a_file_of_variables(here):
    """--env-file passes the variables of a file and prints no value of them. -x takes precedence."""
    text = "# of the job\nMY_KEY=private-value\nMODE=file\nEDITOR\n"
    (here.folder / "job.env").write_text(text)
    options = ("-n", "1", "--env-file", "job.env", "-x", "MODE=requested")
    job, env = (*options, program("variables.py"), "MY_KEY", "MODE", "EDITOR"), {"EDITOR": "vi"}
    (rank,) = here.run("launch", *job, env=env).assert_ok().records
    assert rank["found"] == {"MY_KEY": "private-value", "MODE": "requested", "EDITOR": "vi"}
    dry = here.run("launch", "--dry-run", *job, env=env).assert_ok()
    assert "MY_KEY=… " in dry.stdout
    assert "private-value" not in dry.stdout + dry.stderr


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python")
STALE = {"PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}
STALE |= {"GROUP_RANK": "7", "TORCHELASTIC_RUN_ID": "none"}
STALE |= {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("outer", "env"),
    [
        (("python", *TORCHRUN), {}),
        (mpirun_command(1)[:-1], {}),
        ((), STALE),
        ((), {"LOCAL_RANK": "9"}),
        ((), {"RANK": "9", "LOCAL_RANK": "9"}),
        ((), {"WORLD_SIZE": "9", "MASTER_PORT": "9"}),
    ],
    ids=["torchrun", "mpirun", "left over", "one left over", "a rank left over", "two left over"],
)
def test_a_launcher_within_another(here, outer, env):
    """A job gets none of the variables of another launcher, whose rank has started it, or of its shell."""
    launch = (sys.executable, "-m", "mpiddp", "launch", "-n", "2", "--", "env")
    lines = here.run(*outer, *launch, env=env).assert_ok().lines
    ranks = [line for line in lines if re.match("(LOCAL_)?RANK=", line)]
    assert sorted(ranks) == ["LOCAL_RANK=0", "LOCAL_RANK=1", "RANK=0", "RANK=1"]
    assert lines.count("WORLD_SIZE=2") == lines.count("GROUP_RANK=0") == 2
    of_others = r"OMPI_|PMI|PRTE_|SLURM_(STEP|PROC|LOCAL)|TORCHELASTIC_RUN_ID=none"
    assert [line for line in lines if re.match(of_others, line)] == []


# What torchrun sets, and what it is on one host.
OF_TORCHRUN = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
}
OF_RANK = ("RANK", "LOCAL_RANK", "ROLE_RANK")
ONES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
OF_NETWORKS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY")


@pytest.mark.parametrize("way", ["launch", "mpirun"])
def test_the_variables_of_torchrun(here, way):
    """A script finds every variable that torchrun sets, except those that docs/differences.md names.

    Those of a network are set on several hosts only: a group of a script's own may reach another host.
    """
    names = [*OF_TORCHRUN, *OF_RANK, *ONES, *OF_NETWORKS, "TORCHELASTIC_ERROR_FILE"]
    job = [program("variables.py"), *names]
    raw = mpirun_command(2, "-m", "mpiddp", "run", *job)
    done = here.run(*raw) if way == "mpirun" else here.run("launch", *here.where(2), *job)
    first, second = (rank["found"] for rank in done.assert_ok().records)
    for number, found in enumerate((first, second)):
        assert {name: found[name] for name in OF_TORCHRUN} == OF_TORCHRUN
        assert {found[name] for name in OF_RANK} == {str(number)}
        assert not found.keys() & {*OF_NETWORKS}
    assert all(first[name] == second[name] for name in ONES)
    assert first["TORCHELASTIC_ERROR_FILE"] != second["TORCHELASTIC_ERROR_FILE"]


def test_the_umask_of_the_shell(hosts):
    """What ranks on other hosts write has the mode that it has on this one."""
    script = hosts.script("import os\nprint(oct(os.umask(0)))")
    command = ["umask 006; exec", sys.executable, "-m", "mpiddp", "launch", *hosts.where(2), script]
    assert hosts.run("sh", "-c", " ".join(command)).assert_ok().lines == ["0o6", "0o6"]


def test_variables_of_the_user_are_kept(here):
    """The user's MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and OMP_NUM_THREADS are kept."""
    with reserved("127.0.0.7") as reservation:
        port = str(reservation.getsockname()[1])
        own = {"MASTER_ADDR": "127.0.0.7", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo,any"}
        own |= {"OMP_NUM_THREADS": "3"}
        job = mpirun_command(2, "-m", "mpiddp", "run", program("variables.py"), *own, "WORLD_SIZE")
        done = here.run(*job, env={**own, "RANK": "0", "WORLD_SIZE": "1"})
    ranks = done.assert_ok().records
    # Stale variables of an earlier launcher are overwritten.
    assert [rank["found"] for rank in ranks] == [own | {"WORLD_SIZE": "2"}] * 2


OF_MPI = r"^(OMPI|OPAL|PMIX|PMI|PRTE|HYDI|HYDRA|MPI_LOCAL|I_MPI)\w*"
OF_RANKS = ("MPIDDP_", "TORCHELASTIC_", "MASTER_", "ROLE_", "GROUP_", "GLOO_", "NCCL_")


@every_mpi
def test_the_variables_of_a_command(here, mpi):
    """A command that is a rank gets torchrun's variables, none of the MPI's, and not the job's secret."""
    text = 'echo "shown $RANK $WORLD_SIZE $LOCAL_RANK"; env'
    done = here.run("launch", *here.where(2), "--", "sh", "-c", text, mpi=mpi).assert_ok()
    assert sorted(line for line in done.lines if "shown" in line) == ["shown 0 2 0", "shown 1 2 1"]
    assert re.findall(OF_MPI, done.stdout, re.MULTILINE) == []
    assert "MPIDDP_ORDERS" not in done.stdout


def test_the_gpus_of_each_host(hosts):
    """The ranks of a host see the GPUs of gpus= in the hostfile. -x passes CUDA_VISIBLE_DEVICES.

    Each rank sees one MIG device of a list.
    """
    file = hosts.folder / "hosts.txt"
    file.write_text("node0 slots=1\nnode1 gpus=1,0\nnode2 slots=1\n")
    path = tool(hosts.folder / "tools", "nvidia-smi", TWO_GPUS)
    env = {"PATH": path, "CUDA_VISIBLE_DEVICES": "1"}
    launch = ("launch", "--hostfile", str(file))
    job = (program("variables.py"), "CUDA_VISIBLE_DEVICES")

    def seen(*options: str) -> list[tuple[str, str | None]]:
        ranks = hosts.run(*launch, *options, *job, env=env).assert_ok().records
        return [(rank["host"], rank["found"].get("CUDA_VISIBLE_DEVICES")) for rank in ranks]

    assert seen() == [("node0", "1"), *[("node1", "1,0")] * 2, ("node2", None)]
    file.write_text("node0 slots=1\nnode2 slots=1\n")
    assert seen("-x", "CUDA_VISIBLE_DEVICES") == [("node0", "1"), ("node2", "1")]
    file.write_text("node0 slots=1\nnode1 gpus=0,2\n")
    (sentence,) = hosts.run(*launch, *job, env=env).refusals
    assert re.fullmatch(error("They are", "node1 has 2 GPUs", "GPU 2 (gpus=0,2)"), sentence)
    file.write_text("node0 gpus=MIG-a,MIG-b,MIG-c\nnode1 gpus=MIG-d\n")
    assert seen() == [*[("node0", f"MIG-{each}") for each in "abc"], ("node1", "MIG-d")]
    env["CUDA_VISIBLE_DEVICES"], launch = "MIG-a,MIG-b", ("launch", "-H", "node0")
    assert seen() == [("node0", "MIG-a"), ("node0", "MIG-b")]


def test_slots_and_gpus(hosts):
    """A host without slots= runs one rank for each GPU, or one rank. A training never shares a GPU."""
    env = {"PATH": tool(hosts.folder / "tools", "nvidia-smi", TWO_GPUS)}
    ranks = hosts.run("launch", "-H", "node1,node0", program("variables.py"), env=env)
    assert [rank["host"] for rank in ranks.assert_ok().records] == ["node1"] * 2 + ["node0"] * 2
    ranks = hosts.run("launch", "-H", "node1,node0", program("variables.py"))
    assert [rank["host"] for rank in ranks.assert_ok().records] == ["node1", "node0"]
    training = ("launch", "-H", "node0:2,node1:4", "-m", "mpiddp", "train")
    (sentence,) = hosts.run(*training, env=env).refusals
    assert re.fullmatch(error("share GPUs", "node1 ", "2 GPUs", "4 slots"), sentence), sentence


# --- the command ---


@every_mpi
def test_a_dry_run_can_be_pasted(here, mpi):
    """--dry-run prints a command that starts the same job when pasted, with a reason for each flag."""
    options = (*here.where(2), "-x", "MODE", "--dry-run")
    env = {"MODE": "a b"}
    dry = here.run("launch", *options, program("variables.py"), "MODE", env=env, mpi=mpi)
    command, _, reasons = dry.assert_ok().stdout.partition("\n\n")
    # By hand, Intel's mpirun needs its folder on PATH.
    path = f"{os.environ['PATH']}:{Path(mpirun_of(mpi)).parent}"
    done = here.run("bash", "-c", command, env={"PATH": path, **env})
    assert [rank["found"] for rank in done.assert_ok().records] == [env] * 2
    flags = re.findall(r"^  (-.*)$", reasons, re.MULTILINE)
    explained = {word for line in flags for word in line.split()}
    last = shlex.split(command.splitlines()[-1])
    given = last[: last.index("mpiddp") - 2][1:]
    assert [word for word in given if word.startswith("-") and word not in explained] == []
    assert reasons.count("\n      ") >= 3


def test_a_dry_run_starts_nothing(here):
    """--dry-run contacts no host, and imports neither torch nor mpi4py."""
    code = (
        "import sys; from mpiddp.cli import main; main(sys.argv[1:])\n"
        "print([name for name in ('torch', 'numpy', 'mpi4py', 'asyncio') if name in sys.modules])"
    )
    command = ("launch", "--dry-run", "-H", "nowhere.invalid:2", program("variables.py"))
    done = here.run("python", "-c", code, *command)
    assert done.assert_ok().lines[-1] == "[]"


# Each needs another flag, or has another scheduler.
COMMAND = ("--", "apptainer", "exec", "image.sif", "python", "train.py")
SETTINGS_OF_HYDRA = {"HYDRA_LAUNCHER_EXTRA_ARGS": "-v", "I_MPI_HYDRA_BOOTSTRAP_EXEC": "myssh"}
SCENARIOS: dict[str, tuple[dict[str, str], str]] = {
    "one host": ({}, "-H localhost:4 train.py --lr 0.1"),
    "three hosts": ({}, "-H node0:2,node1:1,10.0.0.3:4 train.py --lr 0.1"),
    "users and ports": ({}, "--hostfile users.txt train.py"),
    "more hosts than Open MPI's tree": ({}, "--hostfile many.txt train.py"),
    "in a job of Slurm": (
        SLURM | {"SLURM_CPUS_PER_TASK": "12", "SLURM_NTASKS": "8"},
        "train.py",
    ),
    "in a job of Slurm for torchrun": (
        SLURM | {"SLURM_CPUS_PER_TASK": "7", "SLURM_GPUS_ON_NODE": "2", "PRTE_MCA_plm": "slurm"},
        "train.py",
    ),
    "in a job of Grid Engine": (GRID_ENGINE, "train.py"),
    "in a job of LSF": (LSF, "train.py"),
    "in a job of PBS": (PBS, "train.py"),
    "in a Flux instance": (FLUX, "train.py"),
    "in an MPIJob": (MPIJOB, "train.py"),
    "a command": ({}, f"-H node0:2,node1:1 {shlex.join(COMMAND)}"),
    "bound to NUMA nodes": ({}, "--bind numa -H localhost:4 train.py"),
    "bound to cores": ({}, "--bind core -H localhost:4 train.py"),
    "arguments of the user": (
        {"UCX_TLS": "rc"},
        "--mpi-args='--mca btl self' -H node0:2,node1:1 train.py",
    ),
    "settings of the user": (
        {"PRTE_MCA_plm_ssh_agent": "rsh", "OMPI_MCA_btl": "self", **SETTINGS_OF_HYDRA},
        "-H node0:2,node1:1 train.py",
    ),
}
STARTERS = (*MPIS, "srun")
USERS = "node0 slots=1\nnode1.lab.org slots=1 user=ann port=2222\n"


def dry_run(folder: Path, mpi: str, scenario: str) -> str:
    """The command line of a scenario, without what differs between machines."""
    variables, line = SCENARIOS[scenario]
    paths = {name: folder / text for name, text in variables.items()}
    files = {name: str(path) for name, path in paths.items() if path.is_file()}
    mpirun = [] if mpi == "srun" else ["--mpirun", mpirun_of(mpi)]
    env = {name: text for name, text in os.environ.items() if name == "HOME"}
    env |= {"PATH": f"{folder}:/usr/bin:/bin", "NCCL_DEBUG": "INFO", **variables, **files}
    printed = io.StringIO()
    # In this process: a Python of its own for each would take half a minute.
    with patch.dict(os.environ, env, clear=True), redirect_stdout(printed):
        assert main(["launch", "--quiet", "--dry-run", *mpirun, *shlex.split(line)]) == 0
    text = printed.getvalue().partition("\n\n")[0].replace(socket.gethostname(), "here")
    text = re.sub(r"\S*/(mpirun|srun) (--allow-run-as-root )?", r"/mpi/bin/\1 ", text)
    text = text.replace(str(folder), "/work").replace(sys.executable, "python")
    return re.sub(r"/\S*(libmpi\.so\.\d+)", r"/mpi/lib/\1", text).replace(str(ROOT), "/mpiddp")


def command_lines(folder: Path, mpi: str) -> dict[str, str]:
    """Those of one MPI, or of srun, by their titles in the file."""
    (folder / "train.py").touch()
    (folder / "users.txt").write_text(USERS)
    (folder / "many.txt").write_text("".join(f"node{n} slots=1\n" for n in range(65)))
    scenarios = [name for name in SCENARIOS if mpi != "srun" or "Slurm" in name]
    return {f"[{name}, {mpi}]": dry_run(folder, mpi, name) for name in scenarios}


def recorded() -> dict[str, str]:
    blocks = re.split(r"(?m)^(?=\[.*, \w+\]$)", GOLDEN.read_text())[1:]
    return {
        title: text.rstrip("\n") for title, _, text in (block.partition("\n") for block in blocks)
    }


@pytest.mark.parametrize("mpi", STARTERS)
def test_the_command_line_of_each_mpi(mpi, tmp_path, monkeypatch):
    """The command line for each MPI and scheduler is exactly the one on record."""
    on_record = {title: text for title, text in recorded().items() if title.endswith(f", {mpi}]")}
    now = command_lines(enter_folder(tmp_path, monkeypatch), mpi)
    assert now == on_record, "run: ./run.sh write"


if __name__ == "__main__":
    written = recorded()
    for starter in STARTERS:
        with pytest.MonkeyPatch.context() as context, TemporaryDirectory() as folder:
            try:
                written |= command_lines(enter_folder(Path(folder), context), starter)
            except pytest.skip.Exception as missing:
                print(f"{GOLDEN.name} keeps its lines of {starter}: {missing}", file=sys.stderr)
    titles = [f"[{scenario}, {mpi}]" for scenario in SCENARIOS for mpi in STARTERS]
    GOLDEN.write_text(
        "\n".join(f"{title}\n{written[title]}\n" for title in titles if title in written)
    )
