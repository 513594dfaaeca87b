"""The command that `mpiddp launch` composes for each MPI. Nothing is started here.

Tests mpiddp/launch/starters/.
python -m pytest tests/unit/launch/test_starters.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.transport import BLAUNCH, QRSH, SSH, Transport
from mpiddp.launch.starters.command import Command, RankStarter, Request
from mpiddp.launch.starters.openmpi import can_shield
from mpiddp.launch.starters.table import STARTERS, _find_library
from mpiddp.launch.variables import forwarded

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


def test_the_pasted_command_creates_its_files() -> None:
    text = Command("mpirun", (), ("job",), files={"machines": "node1:2\n"}).explained()
    assert text.startswith("cat > machines <<'END'\nnode1:2\nEND\nmpirun job\n")


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
