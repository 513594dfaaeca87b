"""The parts of `mpiddp.spawn` that need no ranks: its options, pickles, refusals and errors.

Tests mpiddp/spawning/, mpiddp/runtime/function.py.
python -m pytest tests/integration/launch/test_spawning.py
"""

from __future__ import annotations

import functools
import importlib.util
import io
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
from base64 import b64decode, b64encode
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

import mpiddp
from mpiddp.errors import RankFailed, UserError
from mpiddp.protocol.channel import mac
from mpiddp.runtime import function as run_function
from mpiddp.runtime.shipped import packed
from mpiddp.spawning.spawn import (
    MAX_RESULT_BYTES,
    _copy,
    _refuse_within_a_job,
    pickled_call,
    unpickled,
)
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env


def as_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a launcher that runs the tests."""
    for name in os.environ.keys() - clean_env().keys():
        monkeypatch.delenv(name)


# A rank of a job, or a process that one has started


@pytest.mark.parametrize(
    ("env", "id", "values"),
    [
        ({"MPIDDP_JOB": "ab"}, "mpiddp. Call", ["mpiddp.spawn "]),
        (
            {"MPIDDP_RUN_ID": "1", "TORCHELASTIC_RUN_ID": "1"},
            "mpiddp. Call",
            ["mpiddp.spawn "],
        ),
        (
            {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
            | {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")},
            "script once",
            ["mpiddp.spawn ", "rank 1 of 2 (openmpi)", "python"],
        ),
    ],
)
def test_a_rank_may_not_spawn(env, id, values):
    with pytest.raises(UserError, match=error(id, *values)):
        _refuse_within_a_job(env)


def _sentence(connection: Any) -> None:
    try:
        mpiddp.spawn(len, "ab", hosts="localhost:1")
    except UserError as refused:
        connection.send(str(refused))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_multiprocessing_may_not_spawn(method):
    """A DataLoader's worker is one. Started by "spawn", it runs a script without a guard again."""
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_sentence, args=(theirs,))
    child.start()
    assert ours.poll(PATIENCE_S)
    assert re.fullmatch(error("mpiddp.spawn is", ': if __name__ == "__main__": '), ours.recv())
    child.join(PATIENCE_S)


# What travels


def test_a_module_that_is_registered_travels_in_the_pickle(tmp_path, monkeypatch):
    """cloudpickle's own way, for a module that no rank can import."""
    path = tmp_path / "own_elsewhere.py"
    path.write_text("FIVE = 5\ndef five():\n    return FIVE\n")
    spec: Any = importlib.util.spec_from_file_location("own_elsewhere", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_elsewhere", module)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    _, call = pickled_call(functools.partial(module.five), MAX_RESULT_BYTES)
    cloudpickle.unregister_pickle_by_value(module)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)())"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.loads(b64decode(call))[1], capture_output=True
    )
    assert done.stdout == b"5\n", done.stderr


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()
    for function, args, name in (
        (lambda: lock, (), "<lambda>, "),
        (print, (1, lock), " print, "),
        (functools.partial(print, lock), (), " print, "),
    ):
        sentence = error("Create it", name, ": TypeError: ", "object. ")
        with pytest.raises(UserError, match=f"^{sentence}$"):
            pickled_call(functools.partial(function, *args), MAX_RESULT_BYTES)


def test_a_module_that_a_host_lacks_is_named():
    facts = {"name": "work", "cloudpickle": "0", "source": {}, "path": [], "modules": packed({})}

    def receive(body: bytes) -> None:
        value = b64encode(pickle.dumps((facts, body)))
        answered = {"mac": mac("key", mac("", "function", value))}
        rank: Any = SimpleNamespace(
            world=SimpleNamespace(hostname="node1"),
            server=SimpleNamespace(key="key"),
            ask=lambda _: (answered, value),
        )
        run_function.received_call(rank)

    missing = pickle.dumps((subprocess.run, ())).replace(b"subprocess", b"subprocesz")
    lacks = "ModuleNotFoundError: No module named 'subprocesz'"
    values = ("work ", "node1: ", lacks, "Install subprocesz ")
    sentence = error("unpickled on", *values)
    with pytest.raises(UserError, match=f"^{sentence}$"):
        receive(missing)
    values = ("work ", "node1: ", cloudpickle.__version__, "and 0 in the calling process")
    with pytest.raises(UserError, match=error("unpickled on", *values)):
        receive(b"no pickle")


def test_a_result_is_pickled_within_the_limit():
    facts = {"name": "work", "max_result_bytes": 100}
    assert pickle.loads(run_function.pickled_result([1, 2], facts, "rank 1 on node1")) == [1, 2]
    values = ("rank 1 on node1: ", " work ", " bytes", "max_result_bytes=100.", "max_result_bytes")
    with pytest.raises(UserError, match=error("Return less", *values)):
        run_function.pickled_result(bytes(101), facts, "rank 1 on node1")
    values = ("rank 1 on node1: work ", "generator ", ": TypeError: ")
    with pytest.raises(UserError, match=error("has returned", *values)):
        run_function.pickled_result((x for x in [1]), facts, "rank 1 on node1")


# What the caller gets


def test_a_failed_rank_has_its_traceback_and_can_be_pickled():
    failed = RankFailed("rank 1 on node1 failed first: X.", 1, "node1", "Traceback …\nX\n")
    copy = pickle.loads(pickle.dumps(failed))
    for each in (failed, copy):
        assert (each.rank, each.hostname, each.traceback) == (1, "node1", "Traceback …\nX\n")
        assert str(each) == "rank 1 on node1 failed first: X.\n\nTraceback …\nX"
    assert str(RankFailed("rank 1 was killed.", 1, "node1")) == "rank 1 was killed."
    assert isinstance(failed, mpiddp.JobFailed)


class _Ascii:
    """A stream of a limited encoding, whose reader goes away after some text."""

    encoding = "ascii"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text.encode("ascii").decode()
        if "break" in self.text:
            raise BrokenPipeError

    def flush(self) -> None:
        pass


def test_output_that_cannot_be_shown_does_not_end_the_job():
    stream: Any = _Ascii()
    _copy(io.BytesIO("a ä\rb\nbreak\nlost\n".encode()), stream)
    assert stream.text.startswith("a \\xe4\rb\nbreak\n")


def test_a_launcher_that_cannot_start_is_one_sentence(monkeypatch):
    as_a_user(monkeypatch)
    no_folder = error("mpiddp.spawn", "mpiddp.spawn: /no/folder: ", "No such file or directory")
    with pytest.raises(UserError, match=no_folder):
        mpiddp.spawn(len, "ab", cwd="/no/folder")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(mpiddp.JobFailed, match=error("launcher ended", "exit code 1 ")):
        mpiddp.spawn(len, "ab", hosts="localhost:1")


def test_a_result_whose_module_is_missing_here():
    body = pickle.dumps(subprocess.run).replace(b"subprocess", b"subprocesz")
    lacks = "ModuleNotFoundError: No module named 'subprocesz'"
    sentence = error("Return plain", " work ", "rank 2 ", lacks)
    with pytest.raises(UserError, match=f"^{sentence}$"):
        unpickled(body, "work", 2)


@pytest.mark.parametrize(
    ("keywords", "id", "values"),
    [
        ({"hosts": []}, "is not a host", ['-H: ""']),
        ({"timeout": "soon"}, "--help", ["argument --timeout: ", "'soon'", "90"]),
        ({"max_restart": 1}, "--help", ["--max-restart"]),
        ({"dry_run": True}, "Leave it out", ["mpiddp.spawn: --dry-run "]),
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
