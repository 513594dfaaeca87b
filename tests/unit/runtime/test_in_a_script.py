"""What happens inside the process of a script, without any other process."""

import gc
import json
import socket
import sys
from contextlib import contextmanager

import pytest

from mpiddp.runtime import at_import
from mpiddp.runtime.at_import import AtImport
from mpiddp.runtime.job.coordinator import ChannelLost
from mpiddp.runtime.job.session import ProcessKind, Session
from mpiddp.runtime.script import _message_of_agent
from mpiddp.world import World


def test_an_import_that_follows_one_that_fails(tmp_path, monkeypatch):
    """It counts as the first one. Later ones do not count."""
    (tmp_path / "fragile_module.py").write_text("import absent_module")
    monkeypatch.syspath_prepend(tmp_path)
    ends = []

    @contextmanager
    def around():
        yield
        ends.append("fragile_module" in sys.modules)

    monkeypatch.setattr(sys, "meta_path", [AtImport(["fragile_module"], around), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError):
        __import__("fragile_module")
    (tmp_path / "absent_module.py").write_text("")
    for _ in range(2):
        __import__("fragile_module")
        assert ends == [True]
        del sys.modules["fragile_module"]


def test_a_script_with_many_objects_waits_for_no_freeze(monkeypatch):
    monkeypatch.setattr(at_import, "_MANY", 0)
    with at_import.frozen_torch():
        assert not gc.isenabled()
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_two_messages_of_the_agent_at_once():
    ours, theirs = socket.socketpair()
    messages = [{"type": "ask"}, {"type": "go", "args": ["x" * 100_000]}]
    with ours, theirs:
        ours.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
        assert [_message_of_agent(theirs)[0] for _ in messages] == messages


def test_a_rank_without_the_others_decides_no_stop():
    """Otherwise it would save after another step than they do."""
    session = Session(ProcessKind.SCRIPT)
    ranks, stop = session.coordinator, session.stop
    ranks.world, stop.is_requested = World(0, 2, 0, 2), True
    assert not stop.should_stop()  # proposes the third step
    assert not stop.should_stop()
    ranks.is_lost = True
    with pytest.raises(ChannelLost):
        stop.should_stop()


def test_a_ctrl_c_is_shown_by_rank_0_alone(monkeypatch):
    """Whatever a script writes into RANK."""
    monkeypatch.setenv("RANK", "0")
    session = Session(ProcessKind.SCRIPT)
    shown = []
    for session.rank in range(2):
        shown.append(session.fail(KeyboardInterrupt(), is_printed=True))
    assert shown == [True, False]
