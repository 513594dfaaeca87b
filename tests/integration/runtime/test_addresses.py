"""The address of rank 0: given, or computed from Slurm's list. Ranks that find nobody there.

Tests mpiddp/runtime/rendezvous/by_hand.py, mpiddp/runtime/rendezvous/store.py.
"""

import re
import socket

import pytest

from mpiddp.errors import JobFailed
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.rendezvous.by_hand import address_of_rank_0, connect_by_address
from mpiddp.world import World
from tests.support.errors import error

ENV = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "localhost",
}


@pytest.mark.parametrize(
    ("env", "address"),
    [
        (ENV | {"MASTER_ADDR": "127.0.0.3", "MASTER_PORT": "1"}, "127.0.0.3"),
        (ENV | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "127.0.0.1"),
        (SRUN, "127.0.0.1"),
        (SRUN | {"MASTER_ADDR": "127.0.0.4"}, "127.0.0.4"),
    ],
)
def test_the_address_of_rank_0(env, address):
    found, port = address_of_rank_0(World.from_env(env), env)
    assert found == address
    assert port == 1 if "MASTER_PORT" in env else 20000 <= port < 52768


def test_a_rank_that_cannot_reach_rank_0_names_the_address(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = str(silent.getsockname()[1])
        rank_1 = ENV | {"RANK": "1", "LOCAL_RANK": "1"}
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(JobFailed) as refused:
            connect_by_address(Coordinator(World.from_env(rank_1)), 0.3)
    values = (f"rank 1 on {socket.gethostname()} ", f" at 127.0.0.1:{port} ", "refused")
    assert re.fullmatch(error("reach rank 0's channel", *values), str(refused.value))
