"""The launcher's words to each MPI, pinned: one command line for every starter and scenario.

tests/data/command_lines.txt has them. After an intended change:
python -m tests.unit.launch.test_command_lines
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.transport import BLAUNCH, QRSH, SSH, Transport
from mpiddp.launch.starters import openmpi
from mpiddp.launch.starters.command import JobNetwork, Request
from mpiddp.launch.starters.environment import (
    ALLOWED,
    ALLOWED_BEGINNINGS,
    SECRET_WORDS,
    forwarded,
    is_secret,
)
from tests.unit.launch.test_starters import JOB, MPIS

GOLDEN = Path(__file__).parents[2] / "data" / "command_lines.txt"

NETWORK = JobNetwork(Interface("eth0", "10.0.0.1", "10.0.0.0/24"), ("10.0.0.0/24",), "10.0.0.1")
ONE = (Host("node0", ranks=4),)
THREE = (Host("node0", ranks=2), Host("node1", ranks=1), Host("10.0.0.3", ranks=4))
USERS = (Host("node0", ranks=1), Host("node1.lab.org", ranks=1, user="ann", port=2222))


@dataclass(frozen=True)
class Scenario:
    hosts: tuple[Host, ...]
    network: JobNetwork = NETWORK
    transport: Transport = SSH
    env: tuple[tuple[str, str], ...] = ()
    bind: str = "none"
    is_command: bool = False
    is_root: bool = False
    mpi_args: tuple[str, ...] = ()


SCENARIOS = {
    "one host": Scenario(ONE, JobNetwork()),
    "three hosts": Scenario(THREE),
    "users and ports": Scenario(USERS),
    "more hosts than Open MPI's tree": Scenario(
        tuple(Host(f"node{number}", ranks=1) for number in range(65))
    ),
    "in a job of Grid Engine": Scenario(
        THREE, transport=QRSH, env=(("JOB_ID", "7"), ("PE_HOSTFILE", "/spool/pe_hostfile"))
    ),
    "in a job of Slurm": Scenario(
        THREE,
        env=(
            ("SLURM_JOB_ID", "7"),
            ("SLURM_CPUS_PER_TASK", "12"),
            ("SLURM_NTASKS", "7"),
            ("HOME", "/home/ann"),
        ),
    ),
    "as root": Scenario(ONE, JobNetwork(), is_root=True),
    "a container": Scenario(THREE, is_command=True),
    "bound to NUMA nodes": Scenario(ONE, JobNetwork(), bind="numa"),
    "bound to cores": Scenario(ONE, JobNetwork(), bind="core"),
    "in a job of LSF": Scenario(
        THREE, transport=BLAUNCH, env=(("LSB_JOBID", "7"), ("LSB_DJOB_HOSTFILE", "/spool/hosts"))
    ),
    "arguments of the user": Scenario(
        THREE, mpi_args=("--mca", "pml", "ucx"), env=(("UCX_TLS", "rc"),)
    ),
}


def command_line(mpi: str, scenario: Scenario) -> str:
    """The variables, the command and the files of a job, as text."""
    job = ("apptainer", "exec", "image.sif", "python", "train.py") if scenario.is_command else JOB
    request = Request(
        hosts=Hosts("hosts.txt", scenario.hosts, transport=scenario.transport),
        job=job,
        folder="/work",
        variables={"PATH": "/venv/bin:/bin", "NCCL_DEBUG": "INFO", "MPIDDP_JOB": "1f"},
        env={"PATH": "/venv/bin:/bin", "NCCL_DEBUG": "INFO", **dict(scenario.env)},
        network=scenario.network,
        bind=scenario.bind,
        mpi_args=scenario.mpi_args,
        is_command=scenario.is_command,
    )
    command = MPIS[mpi].compose(request)
    assignments = [f"{name}={shlex.quote(value)}" for name, value in command.settings.items()]
    lines = [" ".join([*assignments, shlex.join(command.argv)])]
    for path, text in command.files.items():
        lines += [f"file {path}:", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(lines)


def rendered(patch: pytest.MonkeyPatch) -> str:
    """All command lines, the same on every machine."""
    patch.setattr(openmpi, "can_shield", lambda: True)
    blocks = []
    for name, scenario in SCENARIOS.items():
        patch.setattr("os.geteuid", lambda is_root=scenario.is_root: 0 if is_root else 1000)
        blocks += [f"[{name}, {mpi}]\n{command_line(mpi, scenario)}\n" for mpi in MPIS]
    return "\n".join(blocks)


def test_every_command_line_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendered(monkeypatch) == GOLDEN.read_text()


def test_a_golden_command_line_notices_a_lost_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(SCENARIOS["one host"], bind="core")
    monkeypatch.setitem(SCENARIOS, "one host", changed)
    assert rendered(monkeypatch) != GOLDEN.read_text()


PASSED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_DEVICE_ORDER"),
    *("NCCL_DEBUG", "NCCL_IB_PKEY", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "GLOO_SOCKET_IFNAME"),
    *("OMP_NUM_THREADS", "HIP_PLATFORM", "ROCR_X", "RCCL_X", "ZE_X", "ONEAPI_DEVICE_SELECTOR"),
    *("UCX_TLS", "FI_PROVIDER", "HF_HOME", "MPIDDP_DATA", "MPI4PY_LIBMPI"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
NOT_PASSED = ("HOME", "USER", "LD_PRELOAD", "PYTHONHASHSEED", "WANDB_MODE", "AWS_REGION", "PWD")
SECRETS = (
    *("HF_TOKEN", "NCCL_SECRET", "UCX_KEY", "TORCH_PASSWORD", "FI_CREDENTIALS", "HF_AUTH"),
    *("MPIDDP_COOKIE", "OMP_SESSION", "TORCH_DSN", "hf_token"),
)


@pytest.mark.parametrize("name", PASSED)
def test_a_variable_of_the_allow_list_reaches_the_ranks(name: str) -> None:
    assert forwarded({name: "1"}, {}) == {name: "1"}


@pytest.mark.parametrize("name", [*NOT_PASSED, *SECRETS])
def test_another_variable_or_a_secret_stays_here(name: str) -> None:
    assert forwarded({name: "1"}, {}) == {}


@pytest.mark.parametrize("name", SECRETS)
def test_the_words_of_a_secret(name: str) -> None:
    assert is_secret(name)


def test_the_tables_above_are_complete() -> None:
    """A row that is added or removed has to be added or removed here."""
    assert (len(ALLOWED), len(ALLOWED_BEGINNINGS)) == (9, 14)
    assert len(SECRET_WORDS) == 9


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as context:
        GOLDEN.write_text(rendered(context))
