"""Ranks of a real mpirun join: the host of each rank, one store on one address, and MPI is finalized.

Tests mpiddp/runtime/rendezvous/mpi.py, mpiddp/runtime/rendezvous/store.py.
python -m pytest tests/test_rendezvous.py
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.slurm import expand_nodelist
from mpiddp.runtime.rendezvous.address import find_by_address
from mpiddp.world import World
from tests.patience import PATIENCE_S
from tests.ranks import ROOT, clean_env, mpirun, own_lines

JOBS = Path(__file__).parent / "jobs"


def job(name: str) -> str:
    return str(JOBS / f"{name}.py")


def rank_facts(ranks: int, *args: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    done = mpirun(ranks, "-m", "tests.jobs.facts", *args, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(found, key=lambda fact: int(fact["world"]["rank"]))


def reserved(address: str) -> socket.socket:
    """A socket that reserves a port. The kernel never assigns it, but a process may request it."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((address, 0))
    return reservation


# --- the rendezvous ---


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.quick)])
def test_every_rank_has_its_world_and_the_address_of_rank_0(ranks: int) -> None:
    found = rank_facts(ranks)
    addr, port = found[0]["world"]["master_addr"], found[0]["world"]["master_port"]
    assert addr == "127.0.0.1"
    run_ids: set[str] = set()
    for rank, fact in enumerate(found):
        assert fact["launcher"] == "openmpi"
        assert fact["world"] == {
            "rank": rank,
            "world_size": ranks,
            "local_rank": rank,
            "local_world_size": ranks,
            "hostname": socket.gethostname(),
            "node_rank": 0,
            "num_nodes": 1,
            "master_addr": addr,
            "master_port": port,
            "backend": None,
            "device": None,
        }
        touched = fact["touched"]
        run_ids.add(touched.pop("MPIDDP_RUN_ID"))
        assert touched.pop("TORCHELASTIC_ERROR_FILE").endswith(f"-{rank}-error.json")
        address, secret = (
            touched.pop("MPIDDP_CHANNEL", ""),
            touched.pop("MPIDDP_CHANNEL_SECRET", ""),
        )
        assert address.startswith("127.0.0.1:") is (len(secret) == 32) is (ranks > 1)
        assert touched == {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RUN_ID": max(run_ids),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "MASTER_ADDR": addr,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "=lo",
        }
        assert fact["listening"] == ([[addr, port]] if rank == 0 else [])
        # A single rank never initializes MPI.
        assert fact["mpi_is_forbidden"] is (ranks > 1)
    assert len(run_ids) == 1


def test_variables_of_the_user_are_kept_and_so_is_mpi_with_keep_mpi() -> None:
    with reserved("127.0.0.7") as reservation:
        port = str(reservation.getsockname()[1])
        requests = {"MASTER_ADDR": "127.0.0.7", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo,any"}
        found = rank_facts(2, "keep-mpi", env=requests | {"RANK": "0", "WORLD_SIZE": "1"})
    for fact in found:
        assert not fact["touched"].keys() & requests.keys()
        assert fact["touched"]["WORLD_SIZE"] == "2"  # a stale variable is overwritten
        assert (["127.0.0.7", int(port)] in fact["listening"]) == (fact["world"]["rank"] == 0)
        assert (fact["mpi_is_forbidden"], fact["mpi_size"]) == (False, 2)


# --- one store for all users ---


def test_an_env_script_and_a_late_group_use_the_one_store() -> None:
    done = mpirun(3, job("late_group"))
    assert sorted(done.stdout.splitlines()) == ["rank 1 has 6", "rank 2 has 6"]
    assert (done.returncode, done.stderr) == (0, "")


def test_groups_can_follow_each_other_and_are_always_destroyed() -> None:
    done = mpirun(2, job("groups"))
    lines = ["0 on all", "an error on all ranks", "2 on all", "init: gloo, cpu, 4", "destroyed"]
    for rank in ("rank 0: ", "rank 1: "):
        assert [
            each.removeprefix(rank) for each in done.stdout.splitlines() if rank in each
        ] == lines
    assert (done.returncode, done.stderr) == (0, "")


# --- when the ranks cannot join ---


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The only line on stderr, of a job that ended with code 2."""
    assert done.returncode == 2
    (sentence,) = own_lines(done.stderr)
    return sentence


def test_a_port_in_use_is_printed_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for _ in range(5):  # repeated to catch a race
            done = mpirun(4, job("rendezvous"), env={"MASTER_PORT": port})
            assert refusal(done) == (
                f"MASTER_PORT={port} is in use on {socket.gethostname()} (127.0.0.1). "
                "Unset it to let mpiddp choose a free port."
            )


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"MASTER_PORT": "http"}, 'MASTER_PORT="http" is not a port. Expected 1 to 65535'),
        ({"MASTER_ADDR": "192.0.2.7"}, "192.0.2.7 is not an address of .*, where rank 0 runs"),
        ({"MASTER_ADDR": "a..b"}, "a..b: cannot be resolved from "),
        ({"MPI4PY_LIBMPI": "/none.so"}, "mpi4py found no MPI library .*MPI4PY_LIBMPI"),
    ],
)
def test_bad_variables_are_printed_once(env: dict[str, str], sentence: str) -> None:
    assert re.match(sentence, refusal(mpirun(3, job("rendezvous"), env=env)))


@pytest.mark.parametrize("env", [{}, {"MPIDDP_TEST_DEAF": "1"}], ids=["", "ignores_sigterm"])
def test_ranks_that_wait_for_a_missing_rank_time_out_with_a_sentence(env: dict[str, str]) -> None:
    """MPI_Init waits for all ranks and holds the GIL, so no thread of a rank could print anything.

    A script's own handler of SIGTERM cannot run either.
    """
    done = mpirun(3, job("rendezvous"), env={"MPIDDP_TEST_SLEEPER": "0", **env})
    sentences = [line for line in own_lines(done.stderr) if line.startswith("rank ")]
    # Other ranks may report too, before a rank that ignores SIGTERM has ended.
    assert env or len(sentences) == 1
    assert sentences[0].startswith(
        f"rank 1 on {socket.gethostname()}: the rendezvous over MPI did not finish in 2 s. "
        "If a rank is still starting, allow more time: "
    )
    assert done.returncode != 0


def test_a_foreign_mpi_is_refused_once() -> None:
    """Ranks of a size that MPI does not report: mpirun and libmpi come from different MPIs."""
    ranks = [
        subprocess.Popen(
            [sys.executable, job("rendezvous")],
            env=clean_env(
                {
                    "OMPI_COMM_WORLD_RANK": str(rank),
                    "OMPI_COMM_WORLD_SIZE": "2",
                    "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                }
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert printed == [
        "openmpi started 2 ranks but MPI reports size 1: mpirun and libmpi come from different "
        "MPIs. Set MPI4PY_LIBMPI to the library of that mpirun.\n",
        "",
    ]


def test_mpi_that_is_already_finalized_is_refused() -> None:
    code = (
        "from mpi4py import MPI; MPI.Finalize()\n"
        "from mpiddp.runtime.rendezvous.mpi import rendezvous_over_mpi; from mpiddp.world import World\n"
        "rendezvous_over_mpi(World.from_env(), timeout_s=5)"
    )
    sentence = refusal(mpirun(2, "-c", code))
    assert sentence.startswith("MPI was finalized in this process before the rendezvous. ")


# --- without MPI: the address is in the environment, or computed from Slurm's variables ---

ENV = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], World]:
    """`world(env)`: the world of this process with `env` as the only variables of launchers."""

    def set_env(env: dict[str, str]) -> World:
        kept = clean_env(env)
        for name in os.environ.keys() - kept.keys():
            monkeypatch.delenv(name)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return World.from_env()

    return set_env


def test_env_ranks_started_by_hand_join(tmp_path: Path) -> None:
    with reserved("127.0.0.1") as reservation:
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(reservation.getsockname()[1])}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.jobs.facts"],
                env=clean_env(ENV | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | address),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        found = [json.loads(rank.communicate(timeout=PATIENCE_S)[0])["world"] for rank in ranks]
    assert [each["rank"] for each in found] == [0, 1]
    for each in found:
        assert (each["node_rank"], each["num_nodes"], each["master_addr"]) == (0, 1, "127.0.0.1")


@pytest.mark.parametrize(
    ("env", "address"),
    [
        (ENV | {"MASTER_ADDR": "127.0.0.3", "MASTER_PORT": "0"}, "127.0.0.3"),
        (ENV | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}, "127.0.0.1"),
        (ENV | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "127.0.0.1"),
        ({}, "127.0.0.1"),
        (SRUN, "127.0.0.1"),
        (SRUN | {"MASTER_ADDR": "127.0.0.4"}, "127.0.0.4"),
    ],
)
def test_rank_0_listens_on_the_given_address(
    world: Callable[[dict[str, str]], World], env: dict[str, str], address: str
) -> None:
    found, listener = find_by_address(world(env), 5)
    assert listener is not None
    with listener:
        assert listener.getsockname() == (address, found.master_port)
    assert found.master_addr == address


def test_every_task_of_a_slurm_step_computes_the_same_port(
    world: Callable[[dict[str, str]], World],
) -> None:
    first, listener = find_by_address(world(SRUN), 5)
    assert listener is not None
    with listener:
        second, none = find_by_address(world(SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}), 5)
    assert (first.master_port, second.master_port, none) == (20218, 20218, None)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node1", "node1"),
        ("gpu[07-09,12],login", "gpu07"),
        ("a-[1,3]-b", "a-1-b"),
        ("n1,n[2-4]", "n1"),
        ("rack[1-2]n[03-04]", "rack1n03"),
    ],
)
def test_the_first_host_of_slurms_compressed_list(nodelist: str, first: str) -> None:
    assert expand_nodelist(nodelist)[0] == first


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (ENV, "RANK=0 and WORLD_SIZE=2 are set, but MASTER_ADDR and MASTER_PORT are not. "),
        (
            ENV | {"MASTER_ADDR": "127.0.0.1"},
            "RANK=0 and WORLD_SIZE=2 are set, but MASTER_PORT is not. ",
        ),
        (ENV | {"MASTER_ADDR": "a..b", "MASTER_PORT": "1"}, "a..b: cannot be resolved from "),
        (ENV | {"MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "0"}, "192.0.2.7 is not an address of "),
        (ENV | {"MASTER_PORT": "http"}, 'MASTER_PORT="http" is not a port.'),
        ({"MASTER_PORT": "70000"}, 'MASTER_PORT="70000" is not a port.'),
        (SRUN | {"MASTER_PORT": "http"}, 'MASTER_PORT="http" is not a port.'),
    ],
)
def test_a_bad_address_is_refused(
    world: Callable[[dict[str, str]], World], env: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        find_by_address(world(env), 5)


def test_a_rank_that_cannot_reach_rank_0_names_the_address(
    world: Callable[[dict[str, str]], World],
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = str(silent.getsockname()[1])
        rank_1 = ENV | {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
        with pytest.raises(JobFailed) as refused:
            find_by_address(world(rank_1 | {"MASTER_PORT": port}), 0.3)
    assert str(refused.value) == (
        f"rank 1 on {socket.gethostname()} cannot reach rank 0 at 127.0.0.1 port {port} in 0.3 s. "
        "Check that rank 0 is running and that no firewall blocks the port."
    )
