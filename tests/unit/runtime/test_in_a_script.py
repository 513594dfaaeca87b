"""What happens inside the process of a script, without any other process."""

import gc
import importlib
import importlib.util
import json
import os
import socket
import sys
import threading
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder

import pytest

from mpiddp.runtime import at_import
from mpiddp.runtime.at_import import AtImport
from mpiddp.runtime.job.coordinator import ChannelLost, Coordinator
from mpiddp.runtime.job.progress import Progress
from mpiddp.runtime.job.session import ProcessKind, Session
from mpiddp.runtime.job.writes import Writes, WritesOfScript, Writing
from mpiddp.runtime.script import _ahead, _import_ahead, _message_of_agent
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


def test_a_finder_that_asks_all_others(monkeypatch):
    """As one of the script for the same module does."""

    class Asks:
        def find_spec(self, name, path=None, target=None):
            others = (finder for finder in sys.meta_path if finder is not self)
            return next(
                filter(None, (finder.find_spec(name, path, target) for finder in others)), None
            )

    ends = []

    @contextmanager
    def around():
        yield
        ends.append(True)

    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    finder = AtImport(["colorsys"], around)
    monkeypatch.setattr(sys, "meta_path", [Asks(), finder, *sys.meta_path])
    __import__("colorsys")
    assert ends == [True]


def test_what_a_spare_imports():
    """It has the variables that the script had set or removed before its import."""
    before = {"A": "2", "C": "3"}, ["/x"]
    assert _ahead("torch", {"A": "1", "B": "1"}, before) == {
        "module": "torch",
        "variables": {"A": "2", "B": None, "C": "3"},
        "path": ["/x"],
    }


def test_a_folder_that_an_import_adds(tmp_path, monkeypatch):
    """It stays on sys.path, as in a fresh process."""
    (tmp_path / "adding_module.py").write_text("import sys\nsys.path.append('/added')")
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        _import_ahead(
            {"module": "adding_module", "variables": {}, "path": [str(tmp_path), *sys.path]}
        )
    finally:
        sys.modules.pop("adding_module")
    assert sys.path[-1] == "/added"
    assert str(tmp_path) not in sys.path


class OnlyLoads:
    """A loader of an import hook, as Python 3.10 and 3.11 still allow."""

    def __init__(self, own):
        self.own = own

    def load_module(self, name):
        spec = importlib.util.spec_from_file_location(name, self.own.path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


class WithSlots:
    __slots__ = ("own",)

    def __init__(self, own):
        self.own = own

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.own.exec_module(module)


class ForAllModules:
    """One object for every import: it must have its methods afterwards."""

    @classmethod
    def of(cls, own):
        cls.own = own
        return cls

    @classmethod
    def create_module(cls, spec):
        return None

    @classmethod
    def exec_module(cls, module):
        cls.own.exec_module(module)


@pytest.mark.parametrize("kind", [OnlyLoads, WithSlots, ForAllModules.of])
def test_a_loader_of_an_import_hook_stays_as_it_is(kind, monkeypatch, tmp_path):
    """Whatever plain Python imports, a script imports, and a look whether a module is there changes nothing."""
    (tmp_path / "surrounded.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    if kind is OnlyLoads and sys.version_info >= (3, 12):
        pytest.skip("this Python takes no such loader")

    class Hook:
        @staticmethod
        def find_spec(name, path=None, target=None):
            own = PathFinder.find_spec(name, path)
            return name == "surrounded" and ModuleSpec(name, kind(own.loader), origin=own.origin)

    entered = []

    @contextmanager
    def around():
        entered.append("enter")
        yield
        entered.append("leave")

    monkeypatch.setattr(sys, "meta_path", [AtImport(["surrounded"], around), Hook, *sys.meta_path])
    assert importlib.util.find_spec("surrounded") is not None
    assert entered == []
    module = importlib.import_module("surrounded")
    assert (module.x, entered) == (1, ["enter", "leave"])
    importlib.reload(module)
    assert entered == ["enter", "leave"]
    sys.modules.pop("surrounded")


def test_two_messages_of_the_agent_at_once():
    ours, theirs = socket.socketpair()
    messages = [{"type": "ask"}, {"type": "go", "args": ["x" * 100_000]}]
    with ours, theirs:
        ours.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
        assert [_message_of_agent(theirs) for _ in messages] == messages


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
        shown.append(session.end.say(KeyboardInterrupt(), is_printed=True))
    assert shown == [True, False]


def test_the_page_of_writes():
    """The agent sees the writes of all threads, but not those of a fork. Its signal comes before the next write."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writes = Writes(Progress(Coordinator(World(0, 1, 0, 1)), lambda *_: None))
        writes.share(ours, b"writes\n")
        _, files, *_ = socket.recv_fds(theirs, 100, 1)
    of_script = WritesOfScript(*files)
    assert (of_script.now, of_script.last, of_script.are_over()) == (None, None, True)
    of_script.go_on()
    with Writing(writes, "a.pt"):
        with pytest.raises(OSError, match="full"), Writing(writes, "b.pt"):
            raise OSError("full")
        assert (of_script.now.path, of_script.last, of_script.are_over()) == ("a.pt", None, False)
        with Writing(writes, "c.pt"):
            assert of_script.now.path == "c.pt"
        assert (of_script.now.path, of_script.last.path) == ("a.pt", "c.pt")
        of_script.go_on()
    assert (of_script.now, of_script.last.path) == (None, "a.pt")
    if (pid := os.fork()) == 0:
        with Writing(writes, "of a fork"):
            os._exit(0)
    os.waitpid(pid, 0)
    assert (of_script.now, of_script.last.path) == (None, "a.pt")

    assert of_script.are_over()  # the agent is about to send a signal
    has_begun = threading.Event()

    def write() -> None:
        with Writing(writes, "d.pt"):
            has_begun.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not has_begun.wait(0.05)
    of_script.go_on()
    thread.join()
    assert of_script.last.path == "d.pt"
