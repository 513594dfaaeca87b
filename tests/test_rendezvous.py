"""Ranks that the real mpirun started meet: who is where, one store on one address, and MPI is over."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import clean_env, mpirun, own_lines

JOBS = Path(__file__).parent / "jobs"
EXPORTED = (
    "GLOO_SOCKET_IFNAME GROUP_RANK LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "NCCL_SOCKET_IFNAME RANK WORLD_SIZE"
).split()


def job(name: str) -> str:
    return str(JOBS / f"{name}.py")


def facts(ranks: int, *args: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    done = mpirun(ranks, "-m", "tests.jobs.facts", *args, env=env, timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(told, key=lambda fact: int(fact["world"]["rank"]))


# --- the meeting ---


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_knows_its_place_and_where_rank_0_listens(ranks: int) -> None:
    told = facts(ranks)
    addr, port = told[0]["world"]["master_addr"], told[0]["world"]["master_port"]
    assert addr == "127.0.0.1"
    for rank, fact in enumerate(told):
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
        assert fact["exported"] == {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": addr,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "=lo",
        }
        assert fact["touched"] == EXPORTED
        assert fact["listening"] == ([[addr, port]] if rank == 0 else [])
        assert fact["mpi_is_over"] is (True if ranks > 1 else None)  # alone it is never started


def test_what_the_user_has_set_stays() -> None:
    with socket.create_server(("127.0.0.7", 0)) as free:
        port = str(free.getsockname()[1])
    wishes = {"MASTER_ADDR": "127.0.0.7", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo,any"}
    for fact in facts(2, env=wishes | {"RANK": "0", "WORLD_SIZE": "1"}):
        assert fact["exported"].items() >= wishes.items()
        assert fact["exported"]["WORLD_SIZE"] == "2"
        if fact["world"]["rank"] == 0:
            assert fact["listening"] == [["127.0.0.7", int(port)]]


def test_mpi_lives_on_for_a_script_that_uses_it() -> None:
    for fact in facts(2, "keep-mpi"):
        assert (fact["mpi_is_over"], fact["mpi_size"]) == (False, 2)


# --- one store for all who need one ---


def test_an_env_script_and_a_late_group_use_the_one_store() -> None:
    done = mpirun(3, job("late_group"), timeout_s=60)
    assert sorted(done.stdout.splitlines()) == ["rank 1 has 6", "rank 2 has 6"]
    assert (done.returncode, done.stderr) == (0, "")


def test_groups_may_follow_each_other_and_are_destroyed_on_errors_too() -> None:
    done = mpirun(2, job("groups"), timeout_s=60)
    ranks = [f"rank {rank} of 2 on cpu has {turn * 2}" for rank in range(2) for turn in range(3)]
    assert sorted(done.stdout.splitlines()) == ["on all ranks"] * 2 + ranks
    assert (done.returncode, done.stderr) == (0, "")


def test_init_lasts_until_the_interpreter_ends() -> None:
    done = mpirun(2, job("call"), timeout_s=60)
    assert sorted(done.stdout.splitlines()) == ["destroyed"] * 2 + ["gloo over 2 ranks has 2"] * 2
    assert (done.returncode, done.stderr) == (0, "")


# --- when they cannot meet ---


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The only line on stderr, of a job that ended with code 2."""
    assert done.returncode == 2
    (sentence,) = own_lines(done.stderr)
    return sentence


def test_a_taken_port_is_said_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for _ in range(5):  # a race, if it is not right
            done = mpirun(4, job("meeting"), env={"MASTER_PORT": port}, timeout_s=20)
            assert refusal(done) == (
                f"MASTER_PORT={port} is taken on {socket.gethostname()} (127.0.0.1). "
                "Leave it unset, and a free one is chosen."
            )


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"MASTER_PORT": "http"}, 'MASTER_PORT="http" is not a port. Expected 1 to 65535'),
        ({"MASTER_ADDR": "192.0.2.7"}, "192.0.2.7 is no address of .*, where rank 0 runs"),
        ({"MASTER_ADDR": "a..b"}, "a..b: cannot be resolved from "),
        ({"MPI4PY_LIBMPI": "/none.so"}, "mpi4py found no MPI library .*MPI4PY_LIBMPI"),
    ],
)
def test_what_cannot_be_is_said_once(env: dict[str, str], sentence: str) -> None:
    assert re.match(sentence, refusal(mpirun(3, job("meeting"), env=env, timeout_s=20)))


def test_ranks_that_do_not_come_are_not_waited_for_in_silence() -> None:
    """MPI_Init waits for all ranks and holds the GIL: no thread of a rank could say anything."""
    done = mpirun(3, job("meeting"), env={"MPIDDP_TEST_SLEEPER": "0"}, timeout_s=30)
    (sentence,) = (line for line in own_lines(done.stderr) if "rank" in line)
    assert sentence.startswith(
        f"rank 1 on {socket.gethostname()}: the ranks did not meet over MPI in 2 s. Usual causes: "
    )
    assert done.returncode != 0


def test_a_foreign_mpi_is_refused_once() -> None:
    """Ranks of a size that MPI does not report: mpirun and libmpi come from different MPIs."""
    ranks = [
        subprocess.Popen(
            [sys.executable, job("meeting")],
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
    said = [rank.communicate(timeout=30)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert said == [
        "openmpi started 2 ranks but MPI reports size 1: mpirun and libmpi come from different "
        "MPIs. Set MPI4PY_LIBMPI to the library of that mpirun.\n",
        "",
    ]


def test_mpi_that_has_ended_already_is_refused() -> None:
    code = (
        "from mpi4py import MPI; MPI.Finalize()\n"
        "from mpiddp.rendezvous import meet_over_mpi; from mpiddp.world import World\n"
        "meet_over_mpi(World.from_env(), timeout_s=5)"
    )
    sentence = refusal(mpirun(2, "-c", code, timeout_s=30))
    assert sentence.startswith("MPI was finalized in this process before the ranks could meet")


# --- where there is no MPI: env:// by hand ---


def by_hand(rank: int, env: dict[str, str]) -> subprocess.Popen[str]:
    row = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.jobs.facts"],
        env=clean_env(row | env),
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
