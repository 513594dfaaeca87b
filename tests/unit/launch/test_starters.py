"""The command that `mpiddp launch` composes for each MPI. Nothing is started here.

Tests mpiddp/launch/{starters,command}.py.
python -m pytest tests/unit/launch/test_starters.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.launch.command import Request, Starter
from mpiddp.launch.starters import STARTERS, _find_library
from mpiddp.launch.variables import forwarded

# What their --version prints.
VERSIONS = {
    "openmpi5": "mpirun (Open MPI) 5.0.11",
    "openmpi4": "mpirun (Open MPI) 4.1.8",
    "mpich": "HYDRA build details:\n    Version:      5.0.2",
    "intelmpi": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 2026",
    "slurm": "slurm-wlm 22.05.8",
}


def starter_of(answer: str) -> Starter:
    """The starter whose --version prints `answer`."""
    kind = next(each for each in STARTERS if each.version.search(answer))
    return kind._replace(program=Path("/mpi/bin/mpirun"))


MPIS = {name: starter_of(answer) for name, answer in VERSIONS.items()}
JOB = ("/venv/bin/python", "train.py", "--lr", "0.1")


def hosts(*counts: tuple[str, int]) -> Hosts:
    """Hosts with their numbers of ranks."""
    return Hosts("hosts.txt", tuple(Host(name, ranks=ranks) for name, ranks in counts))


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


def test_a_choice_of_the_user_is_kept() -> None:
    """The record of command lines has what is chosen without one, in the job of each scheduler."""
    request = UNEQUAL._replace(env={"SLURM_JOB_ID": "7", "PRTE_MCA_plm": "slurm"})
    argv = argv_of("openmpi5", request)
    assert not follows(argv, "plm", "ssh")
    assert follows(argv, "--prtemca", "ras")
    chosen = {"PRTE_MCA_plm_ssh_agent": "rsh", "OMPI_MCA_btl": "self"}
    argv = argv_of("openmpi5", UNEQUAL._replace(env=chosen))
    assert not {"plm_rsh_agent", "plm_rsh_args", "btl"} & {*argv}
    for own in (
        {"env": {"OMPI_MCA_plm_rsh_args": "-v"}},
        {"mpi_args": ("--mca", "plm_rsh_args", "-v")},
    ):
        argv = argv_of("openmpi5", UNEQUAL._replace(**own))
        assert argv.count("plm_rsh_args") == 1
        assert follows(argv, "plm_rsh_args", "-F mpiddp-ssh_config -v")
    six = hosts(("node1", 2), ("fd77::1", 1))
    chosen = UNEQUAL._replace(hosts=six, env={"PRTE_MCA_plm_ssh_agent": "/opt/rsh"})
    with pytest.raises(UserError, match="takes no IPv6 address"):
        argv_of("openmpi5", chosen)
    own = {"HYDRA_LAUNCHER_EXTRA_ARGS": "-v"}
    command = MPIS["mpich"].compose(UNEQUAL._replace(env=own))
    assert command.settings["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-F mpiddp-ssh_config -v"


def test_each_mpirun_of_open_mpi_5_has_a_folder_of_its_own() -> None:
    """Unless the user has chosen one."""
    name = "PRTE_MCA_prte_local_tmpdir_base"
    chosen = UNEQUAL._replace(mpi_args=("--mca", "orte_tmpdir_base", "/big"))
    for mpi, request, scratch, expected in (
        ("openmpi5", UNEQUAL, "/tmp/x", "/tmp/x"),
        ("openmpi5", UNEQUAL, ".", None),
        ("openmpi5", chosen, "/tmp/x", None),
        ("openmpi4", UNEQUAL, "/tmp/x", None),
    ):
        assert MPIS[mpi].compose(request, scratch=scratch).settings.get(name) == expected


@pytest.mark.parametrize(
    ("bind", "words"), [("none", "none"), ("numa", "ldoms"), ("core", "cores")]
)
def test_slurm_has_words_of_its_own_for_a_binding(bind: str, words: str) -> None:
    assert f"--cpu-bind={words}" in argv_of("slurm", UNEQUAL._replace(bind=bind))


@pytest.mark.parametrize(
    ("name", "is_kept"), [("gpu.10", True), ("a.lab", True), ("gpu10", False), ("10.0.0.1", False)]
)
def test_open_mpi_keeps_full_names(name: str, is_kept: bool) -> None:
    request = UNEQUAL._replace(hosts=hosts((name, 1)))
    assert ("prte_keep_fqdn_hostnames" in argv_of("openmpi5", request)) is is_kept


def test_variables_that_mpirun_inherits_are_not_set_again() -> None:
    env = {**ENV, "SAME": "1"}
    variables = {**ENV, "SAME": "1", "RESTARTS": "2"}
    command = MPIS["mpich"].compose(UNEQUAL._replace(env=env, variables=variables))
    assert command.job == JOB
    assert follows(command.argv, "-genvlist", "PATH,RESTARTS,SAME,TOKEN,UCX_TLS")
    ssh = {"HYDRA_LAUNCHER_EXTRA_ARGS": "-F mpiddp-ssh_config"}
    assert command.settings == {"RESTARTS": "2", "UCX_TLS": "tcp,self", **ssh}


@pytest.mark.parametrize("folder", ["lib", "lib64", "lib/release", "lib/x86_64-linux-gnu"])
def test_the_library_of_an_mpi_lies_beside_its_mpirun(tmp_path: Path, folder: str) -> None:
    program = tmp_path / "bin" / "mpirun"
    assert _find_library("libmpi.so", program) is None
    library = tmp_path / folder / "libmpi.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert _find_library("libmpi.so", program) == library
    assert _find_library("", program) is None  # srun has none


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
