"""The command that `mpiddp launch` composes for each MPI. Nothing is started here.

Tests mpiddp/launch/starters/.
python -m pytest tests/unit/launch/test_starters.py
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.transport import BLAUNCH, QRSH, SSH, Transport
from mpiddp.launch.starters.command import Command, JobNetwork, RankStarter, Request
from mpiddp.launch.starters.environment import (
    fill_in_hint,
    forwarded,
    parse_exports,
    shell_line,
    without_values,
)
from mpiddp.launch.starters.openmpi import can_shield
from mpiddp.launch.starters.table import STARTERS, _find_library
from tests.support.patience import PATIENCE_S

# What their --version prints.
VERSIONS = {
    "openmpi5": "mpirun (Open MPI) 5.0.11",
    "openmpi4": "mpirun (Open MPI) 4.1.8",
    "mpich": "HYDRA build details:\n    Version:      5.0.2",
    "intelmpi": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 2026",
    "slurm": "slurm-wlm 22.05.8",
}


def starter_of(answer: str) -> RankStarter:
    """The starter whose --version prints `answer`."""
    kind = next(each for each in STARTERS if each.version.search(answer))
    match = kind.version.search(answer)
    assert match is not None
    return RankStarter(kind, match[1], Path("/mpi/bin/mpirun"))


MPIS = {name: starter_of(answer) for name, answer in VERSIONS.items()}
JOB = ("/venv/bin/python", "train.py", "--lr", "0.1")


def hosts(*counts: tuple[str, int], transport: Transport = SSH) -> Hosts:
    """Hosts with their numbers of ranks."""
    placed = tuple(Host(name, ranks=ranks) for name, ranks in counts)
    return Hosts("hosts.txt", placed, transport=transport)


ENV = {"PATH": "/bin", "TOKEN": "private-value"}
UNEQUAL = Request(hosts(("node1", 2), ("node0", 1)), JOB, "/home/me", variables=ENV, env=ENV)


def argv_of(mpi: str, request: Request) -> list[str]:
    return MPIS[mpi].compose(request).argv


def follows(argv: list[str], *expected: str) -> bool:
    """Whether argv contains the expected arguments in a row."""
    spans = zip(*(argv[start:] for start in range(len(expected))), strict=False)
    return expected in spans


@pytest.mark.parametrize(
    ("mpi", "placement"),
    [
        ("openmpi5", "-n 3 -H node1,node1,node0 --map-by seq"),
        ("openmpi4", "-n 3 -H node1,node1,node0 --map-by seq"),
        ("mpich", "-hosts node1:2,node0:1"),
        ("intelmpi", "-machinefile mpiddp-machines"),
        ("slurm", "--ntasks=3 --distribution=arbitrary --nodelist=node1,node1,node0"),
    ],
)
def test_ranks_are_placed_in_the_order_of_the_hostfile(mpi: str, placement: str) -> None:
    assert follows(argv_of(mpi, UNEQUAL), *placement.split())


@pytest.mark.parametrize(
    ("mpi", "flags", "first_lines"),
    [
        ("openmpi5", "--hostfile mpiddp-hosts --map-by seq", ["node0"] * 8 + ["node1"]),
        ("mpich", "-f mpiddp-hosts", ["node0:8", "node1:8"]),
        ("slurm", "--distribution=arbitrary --mpi=none", ["node0"] * 8 + ["node1"]),
    ],
)
def test_a_host_list_that_is_too_long_for_an_argument_is_a_file(
    mpi: str, flags: str, first_lines: list[str]
) -> None:
    many = hosts(*((f"node{number}", 8) for number in range(13_000)))
    command = MPIS[mpi].compose(UNEQUAL._replace(hosts=many))
    assert follows(command.argv, *flags.split())
    assert max(map(len, command.argv)) < 128 * 1024
    lines = command.files["mpiddp-hosts"].splitlines()
    assert lines[: len(first_lines)] == first_lines
    if mpi == "slurm":
        assert command.settings["SLURM_HOSTFILE"] == "mpiddp-hosts"


def test_intel_mpi_reads_the_counts_from_a_file() -> None:
    command = MPIS["intelmpi"].compose(UNEQUAL._replace(scratch="/tmp/x"))
    assert command.files == {"/tmp/x/mpiddp-machines": "node1:2\nnode0:1\n"}
    assert follows(command.argv, "-machinefile", "/tmp/x/mpiddp-machines")


@pytest.mark.parametrize("mpi", MPIS)
def test_the_job_comes_last_and_no_host_is_oversubscribed(mpi: str) -> None:
    argv = argv_of(mpi, UNEQUAL)
    assert argv[0] == str(MPIS[mpi].program)
    assert argv[-len(JOB) :] == list(JOB)
    assert "oversubscribe" not in " ".join(argv)


@pytest.mark.parametrize(
    ("mpi", "flag"),
    [
        ("openmpi5", "-x TOKEN"),
        ("openmpi4", "-x TOKEN"),
        ("mpich", "-genvlist PATH,TOKEN,UCX_TLS"),
        ("intelmpi", "-genvlist PATH,TOKEN"),
        ("slurm", "--export=HOME,PATH,TOKEN"),
    ],
)
def test_variables_are_passed_by_name_without_their_values(mpi: str, flag: str) -> None:
    request = UNEQUAL._replace(env={"PATH": "/bin", "HOME": "/home/me", "OTHER": "1"})
    command = MPIS[mpi].compose(request)
    assert follows(command.argv, *flag.split())
    assert "private-value" not in " ".join(command.argv)
    assert command.settings["TOKEN"] == "private-value"
    assert "PATH" not in command.settings  # mpirun inherits it


@pytest.mark.parametrize(
    ("mpi", "bind", "flag"),
    [
        ("openmpi5", "none", "--bind-to none"),
        ("openmpi4", "numa", "--bind-to numa"),
        ("mpich", "core", "-bind-to core"),
        ("intelmpi", "none", "-genv I_MPI_PIN 0"),
        ("intelmpi", "core", "-genv I_MPI_PIN_DOMAIN core"),
        ("intelmpi", "numa", "-genv I_MPI_PIN_DOMAIN numa"),
        ("slurm", "numa", "--cpu-bind=ldoms"),
    ],
)
def test_binding(mpi: str, bind: str, flag: str) -> None:
    assert follows(argv_of(mpi, UNEQUAL._replace(bind=bind)), *flag.split())


@pytest.mark.parametrize(("user", "is_root"), [(0, True), (1000, False)])
def test_only_root_gets_allow_run_as_root(
    monkeypatch: pytest.MonkeyPatch, user: int, is_root: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert ("--allow-run-as-root" in argv_of("openmpi5", UNEQUAL)) == is_root


def test_open_mpi_parameters_of_the_user_are_kept() -> None:
    assert follows(argv_of("openmpi5", UNEQUAL), "--mca", "pml", "ob1")
    argv = argv_of("openmpi5", UNEQUAL._replace(env={"OMPI_MCA_pml": "ucx"}))
    assert "pml" not in argv
    assert follows(argv, "--mca", "btl", "self,vader,tcp")


def test_a_network_is_named_for_several_hosts_only() -> None:
    eth1 = Interface("eth1", "10.0.0.1", "10.0.0.0/24")
    requested = UNEQUAL._replace(network=JobNetwork(eth1, ("10.0.0.0/24",)))
    assert follows(argv_of("openmpi5", requested), "--mca", "btl_tcp_if_include", "10.0.0.0/24")
    assert follows(argv_of("openmpi4", requested), "--mca", "oob_tcp_if_include", "10.0.0.0/24")
    assert follows(argv_of("mpich", requested), "-iface", "eth1")
    assert follows(argv_of("intelmpi", requested), "-iface", "eth1")
    alone = requested._replace(hosts=hosts(("node0", 2)))
    for mpi in MPIS:
        assert not {"btl_tcp_if_include", "-iface"} & set(argv_of(mpi, alone))


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4"])
def test_only_this_host_logs_in_to_the_others(mpi: str) -> None:
    """With more than 64 hosts, Open MPI by default lets hosts start the daemons of others."""
    few, many = (hosts(*((f"node{i}", 1) for i in range(count))) for count in (64, 65))
    flag = ("--mca", "plm_rsh_no_tree_spawn", "1")
    assert not follows(argv_of(mpi, UNEQUAL._replace(hosts=few)), *flag)
    assert follows(argv_of(mpi, UNEQUAL._replace(hosts=many)), *flag)


@pytest.mark.parametrize(("mpi", "runtime"), [("openmpi5", "prte"), ("openmpi4", "orte")])
def test_names_with_the_same_short_form_are_kept_whole(mpi: str, runtime: str) -> None:
    twins = UNEQUAL._replace(hosts=hosts(("a.x.org", 1), ("a.y.org", 1)))
    assert follows(argv_of(mpi, twins), "--mca", f"{runtime}_keep_fqdn_hostnames", "1")
    addresses = UNEQUAL._replace(hosts=hosts(("10.0.0.1", 1), ("10.0.0.2", 1)))
    assert "fqdn" not in " ".join(argv_of(mpi, addresses))


@pytest.mark.parametrize(
    ("mpi", "where"),
    [
        ("openmpi5", "--mca plm_rsh_args '-F s/mpiddp-ssh_config'"),
        ("mpich", "HYDRA_LAUNCHER_EXTRA_ARGS='-F s/mpiddp-ssh_config'"),
        ("intelmpi", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS='-F s/mpiddp-ssh_config'"),
    ],
)
def test_users_and_ports_reach_ssh_in_a_config_file(mpi: str, where: str) -> None:
    special = (Host("node1", user="me", port=2222, ranks=1), Host("node0", ranks=1))
    request = UNEQUAL._replace(hosts=Hosts("hosts.txt", special), scratch="s")
    command = MPIS[mpi].compose(request)
    assert where in command.explained()
    assert command.files["s/mpiddp-ssh_config"] == (
        "Host node1\n  User me\n  Port 2222\n"
        "Host *\n  Include ~/.ssh/config\n  Include /etc/ssh/ssh_config\n"
    )


@pytest.mark.parametrize("mpi", MPIS)
def test_a_dry_run_prints_a_command_to_paste_and_a_reason_for_every_flag(mpi: str) -> None:
    variables = {"MPIDDP_PLACEMENT": "node1:2,node0:1", "B": "b c"}
    variables |= dict.fromkeys(("A", "API_KEY", "MY_KEY"), "private-value")
    env = {"API_KEY": "private-value", "A": "other"}
    command = MPIS[mpi].compose(UNEQUAL._replace(variables=variables, env=env))
    text = command.explained({"A", "API_KEY"})
    pasted = next(line for line in text.splitlines() if line.startswith("MPIDDP_PLACEMENT="))
    assert "B='b c' A=… MY_KEY=… " in pasted
    assert "API_KEY=" not in pasted  # the shell has it
    assert "private-value" not in text
    assert shlex.split(pasted)[-len(command.argv) :] == command.argv
    for flag in command.flags:
        assert f"\n  {shlex.join(flag.arguments)}\n" in text
        assert f"\n      {flag.reason}" in text


def test_the_pasted_command_creates_its_files() -> None:
    text = Command("mpirun", (), ("job",), files={"machines": "node1:2\n"}).explained()
    assert text.startswith("cat > machines <<'END'\nnode1:2\nEND\nmpirun job\n")


def test_the_allow_list_of_variables() -> None:
    allowed = ("HF_HOME", "MASTER_PORT", "MPIDDP_X", "NCCL_DEBUG", "OMP_NUM_THREADS", "PATH")
    not_forwarded = (
        "AWS_REGION",
        "HF_TOKEN",
        "HOME",
        "MPIDDP_API_KEY",
        "NCCL_SECRET",
        "OMPI_MCA_pml",
    )
    env = dict.fromkeys(allowed + not_forwarded, "")
    assert tuple(forwarded(env)) == allowed
    assert "HF_TOKEN" in forwarded(env, ["HF_TOKEN"])


def test_the_gpus_of_this_host_are_not_imposed_on_others() -> None:
    """A value that hides all GPUs asks for a job without them, and travels."""
    env = {
        "CUDA_VISIBLE_DEVICES": "0,2",
        "HIP_VISIBLE_DEVICES": "-1",
        "ROCR_VISIBLE_DEVICES": "",
        "ZE_AFFINITY_MASK": "0.1",
        "ZE_FLAT_DEVICE_HIERARCHY": "FLAT",
        "ONEAPI_DEVICE_SELECTOR": "level_zero:gpu",
        "RCCL_MSCCL_ENABLE": "0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert forwarded(env).keys() == env.keys() - {"CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"}
    assert "CUDA_VISIBLE_DEVICES" in forwarded(env, ["CUDA_VISIBLE_DEVICES"])


def test_exports_by_name_and_with_a_value() -> None:
    exports = parse_exports(["A", "B=1=2", "C="], {"A": "x"})
    assert exports == {"A": None, "B": "1=2", "C": ""}


@pytest.mark.parametrize("word", ["PASS", "AUTH", "COOKIE", "SESSION", "DSN", "TOKEN", "PASSWD"])
def test_a_variable_that_may_be_a_password_is_not_forwarded(word: str) -> None:
    names = [f"HF_{word}", f"NCCL_{word}_A", f"MPIDDP_MY{word.lower()}"]
    assert forwarded(dict.fromkeys(names, "")) == {}
    assert forwarded(dict.fromkeys(names, "x"), names[:1]) == {names[0]: "x"}


def test_a_printed_command_has_no_values() -> None:
    exports = ["HF_TOKEN=abc", "MY_KEY=d=e", "A=h", "PLAIN=i", "SAME=j", "TOKEN", "V="]
    own = ["-x", "HF_TOKEN=abc", "-xMY_KEY=d=e", "-x=A=h", "-vxPLAIN=i", "-vx", "SAME=j"]
    own += ["-x", "TOKEN", "-x", "V=", "--hostfile", "PLAIN=i", "-xSAME=j"]
    env = {"SAME": "j", "PLAIN": "other"}
    assert without_values(own, exports, env) == [
        "-x", "HF_TOKEN=…", "-xMY_KEY=…", "-x=A=…", "-vxPLAIN=…", "-vx", "SAME",
        "-x", "TOKEN", "-x", "V=…", "--hostfile", "PLAIN=i", "-xSAME",
    ]  # fmt: skip
    assert fill_in_hint(exports, env) == (
        "… replaces values that are never printed here. Fill in: A, HF_TOKEN, MY_KEY, PLAIN, V"
    )
    assert fill_in_hint(["SAME=j", "TOKEN"], env) == ""


def test_a_printed_command_is_one_line_that_bash_reads() -> None:
    arguments = ["-x", "A=…", "it's", "a\nmpiddp: b\\n'c'", "\x1b[31m", "\u202e", "", "a b"]
    line = shell_line(arguments)
    assert line.startswith("-x A=… ")
    assert line.isprintable()
    read = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"],
        env={**os.environ, "LC_ALL": "C.UTF-8"}, capture_output=True, text=True, timeout=PATIENCE_S
    )  # fmt: skip
    assert read.stdout.split("\0")[:-1] == arguments


def inside(variable: str, transport: Transport = SSH) -> Request:
    granted = hosts(("node1", 2), ("node0", 1), transport=transport)
    return UNEQUAL._replace(hosts=granted, env={variable: "7"})


IN_SLURM = inside("SLURM_JOB_ID")
IN_GRID_ENGINE = inside("PE_HOSTFILE", QRSH)
IN_LSF = inside("LSB_JOBID", BLAUNCH)
SHIELD = "env --ignore-signal=TERM " if can_shield() else ""


@pytest.mark.parametrize(
    ("mpi", "request_", "flags"),
    [
        ("openmpi5", IN_SLURM, "--prtemca ras ^flux,slurm,pbs,lsf,gridengine,pals"),
        ("openmpi5", IN_SLURM, "--prtemca plm ssh --prtemca plm_ssh_disable_qrsh 1"),
        ("openmpi4", IN_SLURM, "--mca ras ^slurm,tm,lsf,gridengine,alps --mca plm rsh"),
        ("openmpi4", IN_GRID_ENGINE, "--mca plm_rsh_disable_qrsh 1"),
        ("openmpi4", IN_GRID_ENGINE, ["--mca", "plm_rsh_agent", f"{SHIELD}qrsh -inherit"]),
        ("openmpi5", IN_LSF, ["--mca", "plm_rsh_agent", f"{SHIELD}blaunch"]),
        ("openmpi5", UNEQUAL, ["--mca", "plm_rsh_agent", f"{SHIELD}ssh -x"] if SHIELD else ["-n"]),
        # MPICH's mpiexec(1), "-launcher" and "-rmk".
        ("mpich", IN_SLURM, "-launcher ssh -rmk user"),
        ("mpich", IN_GRID_ENGINE, "-launcher sge -rmk user"),
        ("mpich", IN_LSF, "-launcher rsh -launcher-exec blaunch -rmk user"),
        # Intel MPI's developer reference, "Bootstrap Options".
        ("intelmpi", IN_SLURM, "-bootstrap ssh"),
        ("intelmpi", IN_GRID_ENGINE, "-bootstrap sge"),
        ("intelmpi", IN_LSF, "-bootstrap rsh -bootstrap-exec blaunch"),
    ],
)
def test_an_mpi_does_not_follow_a_scheduler(
    mpi: str, request_: Request, flags: str | list[str]
) -> None:
    expected = flags.split() if isinstance(flags, str) else flags
    command = MPIS[mpi].compose(request_)
    assert follows(command.argv, *expected)
    if mpi == "intelmpi" and request_ is not UNEQUAL:
        # "Job Schedulers Support" in the developer reference.
        assert command.settings["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] == "off"


@pytest.mark.parametrize("mpi", [mpi for mpi in MPIS if mpi != "slurm"])
def test_the_reason_names_the_scheduler(mpi: str) -> None:
    text = MPIS[mpi].compose(IN_SLURM).explained()
    assert "those of this command; mpirun would follow Slurm" in text
    assert "would follow" not in MPIS[mpi].compose(UNEQUAL).explained()


def test_a_choice_of_the_user_is_kept() -> None:
    argv = argv_of("openmpi5", IN_SLURM._replace(env={**IN_SLURM.env, "PRTE_MCA_plm": "slurm"}))
    assert not follows(argv, "plm", "ssh")
    assert follows(argv, "--prtemca", "ras")


@pytest.mark.parametrize("folder", ["lib", "lib64", "lib/release", "lib/x86_64-linux-gnu"])
def test_the_library_of_an_mpi_lies_beside_its_mpirun(tmp_path: Path, folder: str) -> None:
    program = tmp_path / "bin" / "mpirun"
    assert _find_library("libmpi.so", program) is None
    library = tmp_path / folder / "libmpi.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert _find_library("libmpi.so", program) == library
    assert _find_library("", program) is None  # srun has none


def test_srun_passes_the_variables_of_a_login() -> None:
    login = dict.fromkeys(("HOME", "USER", "LOGNAME", "SHELL", "LANG"), "x")
    request = UNEQUAL._replace(env={**login, "OTHER": "y"}, variables={"A": "1"})
    exports = next(each for each in argv_of("slurm", request) if "--export=" in each)
    names = exports.removeprefix("--export=").split(",")
    assert {"A", *login} <= set(names)
    assert "OTHER" not in names
    assert names == sorted(names)


def test_srun_gets_the_cores_of_a_task() -> None:
    request = UNEQUAL._replace(env={"SLURM_CPUS_PER_TASK": "7", "SLURM_NTASKS": "3"})
    assert "--cpus-per-task=7" in argv_of("slurm", request)
    assert not any("cpus-per-task" in each for each in argv_of("slurm", UNEQUAL))


@pytest.mark.parametrize(("cpus", "flags"), [("7", ["--cpus-per-task=3"]), ("1", []), ("", [])])
def test_ranks_beyond_the_one_task_of_a_host_share_its_cores(cpus: str, flags: list[str]) -> None:
    """A script for torchrun asks for no tasks. Slurm then grants the cores of one on each host."""
    request = UNEQUAL._replace(env={"SLURM_CPUS_PER_TASK": cpus})
    assert max(host.ranks for host in request.hosts.hosts) == 2
    argv = argv_of("slurm", request)
    assert [each for each in argv if "cpus-per-task" in each] == flags
    assert "--overcommit" in argv
    asked = request._replace(env={**request.env, "SLURM_NTASKS": "3"})
    assert "--overcommit" not in argv_of("slurm", asked)


def test_whether_env_can_shield_a_program_from_sigterm() -> None:
    done = subprocess.run(
        ["env", "--ignore-signal=TERM", "true"], stderr=subprocess.DEVNULL, timeout=60
    )
    assert can_shield() == (done.returncode == 0)
