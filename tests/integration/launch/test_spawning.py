"""The parts of `mpiddp.spawn` that need no ranks: its options, pickles, refusals and connections."""

import os
import pickle
import sys
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest

import mpiddp
from mpiddp.errors import JobFailed, UserError
from mpiddp.launch.run.control import ControlServer, Exchange, listen
from mpiddp.protocol.channel import SCRIPT, mac, member_key
from mpiddp.protocol.group import TimedSelector
from mpiddp.runtime.function import received_call
from mpiddp.runtime.job.connection import Server
from mpiddp.spawning.spawn import pickled_call
from mpiddp.text import FIX
from mpiddp.world import World
from tests.support.channels import connect, cut
from tests.support.errors import error
from tests.support.ranks import ROOT, clean_env, run_command


def as_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a launcher that runs the tests."""
    for name in os.environ.keys() - clean_env().keys():
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"MPIDDP_JOB": "ab"}, f"of mpiddp.\n{FIX}call it once"),
        ({"MPIDDP_RUN_ID": "1", "TORCHELASTIC_RUN_ID": "1"}, f"of mpiddp.\n{FIX}call it once"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "rank 1 of 2 (hydra)"),
    ],
)
def test_a_rank_may_not_spawn(env, words, monkeypatch):
    as_a_user(monkeypatch)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=error(words)):
        mpiddp.spawn(len, "ab")


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()
    for function, args, name in (
        (lambda: lock, (), "<lambda>, "),
        (print, (1, lock), " print, "),
        (partial(print, lock), (), " print, "),
    ):
        sentence = error("create the object", name, ": TypeError: ", "object. ")
        with pytest.raises(UserError, match=f"^{sentence}$"):
            pickled_call(partial(function, *args))


def test_a_launcher_that_cannot_start_is_one_sentence(monkeypatch):
    as_a_user(monkeypatch)
    no_folder = error("mpiddp.spawn", "mpiddp.spawn: /no/folder: ", "No such file or directory")
    with pytest.raises(UserError, match=no_folder):
        mpiddp.spawn(len, "ab", cwd="/no/folder")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(mpiddp.JobFailed, match=error("launcher ended", "exit code 1 ")):
        mpiddp.spawn(len, "ab", hosts="localhost:1")


@pytest.mark.parametrize(
    ("keywords", "id", "values"),
    [
        ({"max_restart": 1}, "--help", ["--max-restart"]),
        ({"dry_run": True}, "leave it out", ["mpiddp.spawn: --dry-run "]),
        # Without its quiet, the launcher says that it uses this machine.
        ({"quiet": True, "exclude": ["n4", "localhost"]}, "is not in", ['--exclude: "n4" ']),
    ],
)
def test_bad_options_are_one_sentence(keywords, id, values, monkeypatch, capfd):
    """The launcher's own, raised here."""
    as_a_user(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sentence = error(id, *values)
    with pytest.raises(UserError, match=f"^{sentence}$"):
        mpiddp.spawn(len, "ab", **keywords)
    assert capfd.readouterr() == ("", "")


WORLD = World(rank=1, world_size=2, local_rank=1, local_world_size=2, hostname="node1")
ARGUMENT = b"f" * 3_000_000
FACTS = {"name": "work", "source": {}, "path": []}
FUNCTION = b64encode(pickle.dumps((FACTS, pickle.dumps(partial(len, ARGUMENT)))))


def is_robbed(where: Server) -> None:
    """The script of a rank, whose connection to the launcher somebody without the secret takes over."""
    rank = connect(where, WORLD)
    own = Server(where.address, member_key(where.key, SCRIPT, WORLD.rank), is_own=True)
    channel = connect(own, WORLD, SCRIPT)
    channel.server = Server("", "another", is_own=True)
    with pytest.raises(JobFailed, match=error("connection to", "rank 1 ")):
        received_call(channel)
    body = b64encode(b"a pickle")
    channel.send("answer", body, is_result=True, mac=mac("x", "answer", body))
    channel.server = own
    assert received_call(channel)  # and so the launcher has read what was sent before
    cut(rank)


def test_what_a_stranger_has_written_is_not_unpickled():
    """Whoever has taken over a connection does not have the secret."""
    pytest.importorskip("cloudpickle")
    exchange = Exchange(FUNCTION)
    with (
        TimedSelector() as selector,
        closing(ControlServer(listen("127.0.0.1"), 2, selector)) as server,
        ThreadPoolExecutor() as pool,
    ):
        exchange.begin(server)
        where = Server(server.address, server.key)
        script = pool.submit(is_robbed, where)
        while not script.done():
            for key, _ in selector.select(0.02):
                for message in server.receive(key.data):
                    if message.kind in ("function", "answer"):
                        exchange.take(message, server)
        script.result()
    assert exchange.results == {}


RETURNS_ITS_OWN_CLASS = """
import mpiddp

BASE = 1

class Config:
    def lr(self):
        return BASE * 2

def work():
    return Config()

earlier, method = Config(), Config.lr
(found,) = mpiddp.spawn(work, hosts="localhost:1")
BASE = 10
print(type(found) is Config, Config.lr is method, earlier.lr(), found.lr())
"""


def test_a_result_does_not_change_the_callers_own_class():
    """Its methods would go on with copies of their global variables, also those of earlier objects."""
    done = run_command([sys.executable, "-c", RETURNS_ITS_OWN_CLASS])
    assert (done.stdout, done.stderr) == ("True True 20 20\n", "")
