"""The variables of the ranks: which of this shell's reach other hosts, and those of -x and --env-file.

Tests mpiddp/launch/{variables,plan}.py. The promises have the command line for each MPI.
python -m pytest tests/unit/launch/test_variables.py
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.interfaces import Interface
from mpiddp.launch.command import JobNetwork, Request
from mpiddp.launch.options import LaunchOptions, parse_options
from mpiddp.launch.plan import rank_variables
from mpiddp.launch.starters import STARTERS, find_starter
from mpiddp.launch.variables import (
    forwarded,
    is_secret,
    parse_env_file,
    without_values,
)
from tests.support.machine import an_mpirun

PASSED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_DEVICE_ORDER"),
    *("NCCL_DEBUG", "NCCL_IB_PKEY", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "GLOO_SOCKET_IFNAME"),
    *("OMP_NUM_THREADS", "HIP_PLATFORM", "ROCR_X", "RCCL_X", "ZE_X", "ONEAPI_DEVICE_SELECTOR"),
    *("UCX_TLS", "FI_PROVIDER", "HF_HOME", "MPIDDP_DATA", "MPI4PY_LIBMPI"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "MKL_NUM_THREADS", "KMP_AFFINITY"),
    *("PYTHONHASHSEED", "PYTHONWARNINGS", "CUDNN_LOGLEVEL_DBG", "SLURM_JOB_ID"),
)
OF_A_HOST = ("HOME", "USER", "PYTHONHOME", "PWD", "SSH_AUTH_SOCK", "OMPI_MCA_btl", "SLURM_PROCID")
FREE = ("LD_PRELOAD", "WANDB_MODE", "AWS_REGION")
SECRETS = (
    *("HF_TOKEN", "NCCL_SECRET", "UCX_KEY", "TORCH_PASSWORD", "FI_CREDENTIALS", "HF_AUTH"),
    *("MPIDDP_COOKIE", "OMP_SESSION", "TORCH_DSN", "hf_token"),
)


def test_variables_of_the_allow_list_reach_the_ranks_and_no_secret() -> None:
    env = dict.fromkeys((*PASSED, *OF_A_HOST, *FREE, *SECRETS), "1")
    assert forwarded(env) == dict.fromkeys(sorted(PASSED), "1")
    assert forwarded(env, env_all=True) == dict.fromkeys(sorted((*PASSED, *FREE)), "1")
    assert all(map(is_secret, SECRETS))


FILE = r"""
# a comment
PLAIN=one two
export EXPORTED=three   # no comment
EMPTY=
SINGLE='as $written \n # ${HOME}'
DOUBLE="it's"
URL=postgres://u:p@h/db?a=b&c=$d
HERE
"""


def parse(text: str) -> dict[str, str]:
    return dict(parse_env_file(text.encode(), "f", {"HERE": "x"}))


def test_the_format_of_the_file() -> None:
    assert parse(FILE) == {
        "PLAIN": "one two",
        "EXPORTED": "three   # no comment",
        "EMPTY": "",
        "SINGLE": r"as $written \n # ${HOME}",
        "DOUBLE": "it's",
        "URL": "postgres://u:p@h/db?a=b&c=$d",
        "HERE": "x",
    }
    assert parse("\ufeffA=1\r\nB='2'\r\n") == {"A": "1", "B": "2"}  # as Windows writes it


def test_a_pipe_is_read_once_and_options_take_precedence(tmp_path: Path) -> None:
    """As `--env-file <(pass show wandb)` has it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=("A=1\nB=1\n",)).start()
    how = parse_options(["--env-file", str(pipe), "-x", "B=2", "-x", "C=", __file__])
    assert how.variables == {"A": "1", "B": "2", "C": ""}


def test_a_printed_command_has_no_values() -> None:
    exports = ["HF_TOKEN=abc", "MY_KEY=d=e", "A=h", "PLAIN=i", "TOKEN", "V="]
    own = ["-x", "HF_TOKEN=abc", "-xMY_KEY=d=e", "-x=A=h", "-vxPLAIN=i", "-x", "TOKEN", "-x", "V="]
    assert without_values([*own, "--hostfile", "f"], exports) == [
        *("-x", "HF_TOKEN=…", "-xMY_KEY=…", "-x=A=…", "-vxPLAIN=…", "-x", "TOKEN", "-x", "V=…"),
        *("--hostfile", "f"),
    ]


(SRUN,) = (kind for kind in STARTERS if kind.has_scheduler)
OPEN_MPI = next(kind for kind in STARTERS if kind.library)


@pytest.mark.parametrize("kind", [SRUN, OPEN_MPI])
@pytest.mark.parametrize("env", [{}, {"MASTER_ADDR": "10.0.0.9"}])
def test_the_ranks_are_told_their_network(kind: Any, env: dict[str, str]) -> None:
    """And of rank 0's address only what the user has said."""
    network = JobNetwork(Interface("eth0", "10.0.0.5", "10.0.0.0/24"), ("eth0",))
    placed = Hosts("", tuple(Host(name, ranks=1) for name in ("localhost", "far.invalid")))
    starter = kind._replace(program=Path("/mpi/bin/starter"))
    request = Request(placed, (), "/home/me", env=env, network=network)
    found = rank_variables(LaunchOptions(), starter, request)
    assert found.get("MASTER_ADDR") == env.get("MASTER_ADDR")
    assert found["MPIDDP_NETWORKS"] == "eth0"
    assert "MPIDDP_TIMEOUT" not in found


def test_mpi4py_gets_the_library_of_the_mpirun_in_use(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libmpi.so.40"
    for folder in ("lib", "bin"):
        (tmp_path / folder).mkdir()
    library.touch()
    mpirun = an_mpirun(tmp_path / "bin")
    env = {"PATH": f"{tmp_path}/bin:/bin", "MPI4PY_LIBMPI": "/my/libmpi.so"}
    python = Path("/venv/bin/python")

    def found(explicit: str | None, env: dict[str, str], python: Path = python) -> str:
        return str(find_starter("mpirun", explicit, python, env).libmpi)

    assert found(None, env) == "None"  # mpi4py takes the one of the user's variable
    assert found(mpirun, env) == found(None, {"PATH": env["PATH"]}) == str(library)
    # mpi4py finds a library beside Python by itself.
    assert found(None, {"PATH": env["PATH"]}, tmp_path / "bin" / "python") == "None"
