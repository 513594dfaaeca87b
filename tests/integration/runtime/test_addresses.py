"""The address of rank 0: given, or computed from Slurm's list. Ranks that find nobody there.

Tests mpiddp/runtime/rendezvous/meet.py, mpiddp/runtime/rendezvous/store.py.
python -m pytest tests/integration/runtime/test_addresses.py
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.sockets import bind
from mpiddp.runtime.rendezvous.meet import _by_address, _serve_beside_agent, address_of_rank_0
from mpiddp.runtime.rendezvous.store import connect_to_store, serve_store
from mpiddp.world import World
from tests.support.errors import error
from tests.support.machine import reserved
from tests.support.ranks import clean_env

ENV = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
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


@pytest.mark.parametrize(
    ("env", "address"),
    [
        (ENV | {"MASTER_ADDR": "127.0.0.3", "MASTER_PORT": "1"}, "127.0.0.3"),
        (ENV | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "127.0.0.1"),
        (SRUN, "127.0.0.1"),
        (SRUN | {"MASTER_ADDR": "127.0.0.4"}, "127.0.0.4"),
    ],
)
def test_the_address_of_rank_0(world, env, address):
    found, port = address_of_rank_0(world(env), env)
    assert found == address
    assert port == 1 if "MASTER_PORT" in env else 20000 <= port < 52768


@pytest.mark.parametrize(
    ("env", "id", "values"),
    [
        (ENV, "and WORLD_SIZE=", ["RANK=0 ", "WORLD_SIZE=2 ", "MASTER_ADDR and MASTER_PORT"]),
        (ENV | {"MASTER_ADDR": "a..b", "MASTER_PORT": "1"}, "host where", ["a..b: "]),
        (
            ENV | {"MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "0"},
            "runs. Unset",
            ["192.0.2.7 ", "MASTER_ADDR"],
        ),
        (SRUN | {"MASTER_PORT": "http"}, "65535, or", ['MASTER_PORT="http"']),
    ],
)
def test_a_bad_address_is_refused(world, env, id, values):
    with pytest.raises(UserError, match=error(id, *values)):
        _by_address(world(env), 5)


def test_a_rank_that_cannot_reach_rank_0_names_the_address(world):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = str(silent.getsockname()[1])
        rank_1 = ENV | {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
        with pytest.raises(JobFailed) as refused:
            _by_address(world(rank_1 | {"MASTER_PORT": port}), 0.3)
    values = (f"rank 1 on {socket.gethostname()} ", f" at 127.0.0.1:{port} ", "refused")
    assert re.fullmatch(error("reach rank 0's channel", *values), str(refused.value))


def test_a_rank_0_that_says_nothing_in_the_store_of_an_agent():
    with bind("127.0.0.1", 0, "here") as listener:
        port = listener.getsockname()[1]
        world = replace(World(1, 2, 1, 2), master_addr="127.0.0.1", master_port=port)
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        store = serve_store(env, listener.detach())
        sentence = error("answer from", f"rank 1 on {world.hostname}: ", "0.3 s")
        with pytest.raises(JobFailed, match=f"^{sentence}$"):
            _serve_beside_agent(world, 0.3)
        del store


@pytest.fixture
def another_program() -> Iterator[int]:
    """The port of a server that says something else than ours, and hangs up."""

    def greet() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(params=["nobody", "another program"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port on which nobody listens, as behind a firewall, or another program."""
    if request.param == "nobody":
        with reserved("127.0.0.1") as reservation:
            yield reservation.getsockname()[1]
    else:
        yield request.getfixturevalue("another_program")


def test_no_store_where_it_should_be(port):
    world = replace(World(1, 2, 1, 2), master_addr="127.0.0.1", master_port=port)
    values = (f"rank 1 on {world.hostname} ", f"127.0.0.1 port {port} ", "1 s")
    with pytest.raises(JobFailed, match=error("reach torch's", *values)):
        connect_to_store(world, 1.0)
