"""The process beside rank 0 that serves the job channel, whatever rank 0 does."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpiddp.hosts.processes import marked
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.job.coordinator import Coordinator
from tests.support.channels import cut, member
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import ROOT, clean_env

KEY = "a key of the job"
RANK_0 = """
import os, sys, time
from mpiddp.runtime.job.connection import Server
from mpiddp.runtime.rendezvous.channel_process import serve_beside
from mpiddp.world import World
from tests.support.channels import member
server = Server(*serve_beside(World(0, 2, 0, 2, master_addr="127.0.0.1"), key="a key of the job"))
channel = member(server, 0, 2)
print(server.address, flush=True)
exec(sys.argv[1])
"""
GATHERS = f"channel.send('gather', b'0', key='a', timeout_s={PATIENCE_S})"
HOLDS_THE_LOCK = """
print("holds", flush=True)
sum(range(10**12))
"""


@contextmanager
def job(code: str) -> Iterator[tuple[subprocess.Popen[str], Coordinator, int]]:
    """Rank 0, rank 1, which is this process, and the pid of their server."""
    name, value = "JOB_OF_A_TEST", os.urandom(8).hex()
    with subprocess.Popen(
        [sys.executable, "-c", RANK_0, code],
        env=clean_env({name: value}),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank_0:
        try:
            address = rank_0.stdout.readline().strip()
            rank_1 = member(Server(address, KEY), 1, 2)
            (server,) = {*marked(f"{name}={value}".encode())} - {rank_0.pid}
            yield rank_0, rank_1, server
        finally:
            rank_0.kill()


def test_ranks_agree_while_native_code_of_rank_0_holds_the_lock_of_its_interpreter():
    """A failure has to end the others at once, however long rank 0 computes."""
    with job(f"{GATHERS}\n{HOLDS_THE_LOCK}") as (rank_0, rank_1, _):
        assert rank_0.stdout.readline() == "holds\n"
        assert rank_1.all_gather_json(1, key="a", timeout_s=PATIENCE_S) == [0, 1]
        assert rank_1.claim_first_failure("an error") == (True, "an error")
        assert not rank_1.is_lost
        assert rank_0.poll() is None


def test_the_end_of_rank_0_ends_the_job():
    with job(HOLDS_THE_LOCK) as (rank_0, rank_1, _):
        rank_0.stdout.readline()
        rank_0.send_signal(signal.SIGKILL)
        eventually(lambda: rank_1.is_lost)


def test_rank_0_that_has_left_may_end_before_the_others():
    code = f"channel.send('leave'); channel.all_gather_json(0, key='a', timeout_s={PATIENCE_S})"
    with job(code) as (rank_0, rank_1, server):
        assert rank_1.all_gather_json(1, key="a", timeout_s=PATIENCE_S) == [0, 1]
        assert rank_0.wait(PATIENCE_S) == 0
        rank_1.give("b", 5)
        assert eventually(lambda: rank_1.given("b")) == [None, 5]
        assert not rank_1.is_lost
        cut(rank_1)
        eventually(lambda: not Path(f"/proc/{server}").exists())
