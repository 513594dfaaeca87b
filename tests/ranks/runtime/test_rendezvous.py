"""Ranks of a real mpirun join: the host of each rank, one store on one address, and MPI is finalized.

Tests mpiddp/runtime/rendezvous/mpi.py, mpiddp/runtime/rendezvous/store.py.
python -m pytest tests/ranks/runtime/test_rendezvous.py
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.addresses import reserved
from tests.support.errors import error
from tests.support.ranks import mpirun, own_lines

JOBS = Path(__file__).parents[2] / "jobs"


def job(name: str) -> str:
    return str(JOBS / f"{name}.py")


def rank_facts(ranks: int, *args: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    done = mpirun(ranks, "-m", "tests.jobs.facts", *args, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(found, key=lambda fact: int(fact["world"]["rank"]))


# --- the rendezvous ---


@pytest.mark.parametrize("ranks", [1, 4])
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
            values = (f"MASTER_PORT={port} ", f"{socket.gethostname()} (127.0.0.1)")
            assert re.fullmatch(error("let mpiddp", *values), refusal(done))


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"MASTER_PORT": "http"}, error("65535, or", 'MASTER_PORT="http" ')),
        ({"MASTER_ADDR": "192.0.2.7"}, error("runs. Unset", "192.0.2.7 ")),
        ({"MASTER_ADDR": "a..b"}, error("host where", "a..b: ")),
        ({"MPI4PY_LIBMPI": "/none.so"}, error("mpi4py found", "MPI4PY_LIBMPI")),
    ],
)
def test_bad_variables_are_printed_once(env: dict[str, str], sentence: str) -> None:
    assert re.fullmatch(sentence, refusal(mpirun(3, job("rendezvous"), env=env)))


def test_ranks_that_wait_for_a_missing_rank_time_out_with_their_stack() -> None:
    """MPI_Init waits for all ranks and holds the GIL, so no thread of a rank could print anything."""
    done = mpirun(3, job("rendezvous"), env={"MPIDDP_TEST_SLEEPER": "0"})
    assert done.returncode != 0
    assert "Timeout (0:00:02)!" in done.stderr
    assert "_load_mpi" in done.stderr
