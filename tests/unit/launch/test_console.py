"""What a viewer of a job gets, over the console's own sockets.

Tests mpiddp/launch/monitor/console.py.
python -m pytest tests/unit/launch/test_console.py
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mpiddp.launch.monitor.console import Console, Listener, job_facts, open_console
from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.protocol import viewers
from mpiddp.protocol.server import Message
from mpiddp.protocol.viewers import JOB, STACKS
from tests.support.channels import progress


@pytest.fixture(name="folder")
def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "mpiddp"


@pytest.fixture(name="console")
def a_console(folder: Path) -> Iterator[Console]:
    console = open_console("train\x1b.py")
    yield console
    console.close()


def connected(folder: Path, kind: str) -> socket.socket:
    (path,) = folder.glob(f"*{kind}")
    viewer = socket.socket(socket.AF_UNIX)
    viewer.connect(str(path))
    viewer.settimeout(10)
    return viewer


def received(viewer: socket.socket) -> dict[str, Any] | None:
    """The facts that a viewer gets; None if its connection ends without."""
    with viewer:
        text, files, *_ = socket.recv_fds(viewer, 10, 1)
        if not files:
            return None
        assert text == b"."
        with os.fdopen(files[0], "rb") as file:
            file.seek(0)
            found: dict[str, Any] = json.loads(file.read())
            return found


def accepted(console: Console) -> tuple[str, socket.socket]:
    with selectors.DefaultSelector() as selector, console.attending(selector):
        ((key, _),) = selector.select(10)
        assert isinstance(key.data, Listener)
        viewer = console.accept(key.data, selector)
        assert viewer is not None
        assert console.accept(key.data, selector) is None  # nobody else waits
        return key.data.kind, viewer


@pytest.mark.parametrize("kind", [JOB, STACKS])
def test_a_viewer_gets_the_job_and_the_facts(console: Console, folder: Path, kind: str) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.iterdir())) == 2
    viewer = connected(folder, kind)
    found, connection = accepted(console)
    assert found == kind
    console.answer(connection, {"phase": "running"})
    facts = received(viewer)
    assert facts is not None
    assert 0 <= facts.pop("age_s") < 60
    assert facts == {"pid": os.getpid(), "name": r"train\x1b.py", "attempt": 1, "phase": "running"}


def test_those_who_wait_are_answered_together(console: Console, folder: Path) -> None:
    viewers = []
    for _ in range(18):  # two more than may wait
        viewers.append(connected(folder, STACKS))
        console.let_wait(accepted(console)[1])
    console.answer_all({"stacks": 1})
    answers = [received(viewer) for viewer in viewers]
    assert answers[:2] == [None, None]
    assert [each and each["stacks"] for each in answers[2:]] == [1] * 16
    console.answer_all({"stacks": 2})  # nobody waits
    assert console.attempts == 18


def test_a_viewer_that_has_left_does_no_harm(console: Console, folder: Path) -> None:
    connected(folder, JOB).close()
    console.answer(accepted(console)[1], {})


def test_the_last_launcher_removes_the_folder(folder: Path) -> None:
    first, second = open_console("a"), open_console("b")
    assert len(list(folder.iterdir())) == 4
    first.close()
    assert len(list(folder.iterdir())) == 2
    second.close()
    assert not folder.exists()


def test_a_folder_of_others_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    console = open_console("a")
    assert list(folder.iterdir()) == []
    console.close()


def test_the_facts_of_a_job() -> None:
    ranks = Ranks(("a", "a", "b"))
    facts = job_facts(ranks, {}, 10.0)
    assert (facts["step"], facts["rate"]) == (None, None)
    assert [(each["rank"], each["host"], each["state"]) for each in facts["ranks"]] == [
        (0, "a", "starting"), (1, "a", "starting"), (2, "b", "starting")
    ]  # fmt: skip
    assert facts["ranks"][0]["pid"] is None
    for rank, step in ((0, 5), (1, 7)):
        ranks.note(Message(rank, "progress", progress(step), 4.0))
    lines = {0: b"epoch 1\n\nloss 0.5\n \n", 1: b"10%\r20%", 2: b"x" * 300 + b"\x1b"}
    facts = job_facts(ranks, lines, 10.0)
    first, second, third = facts["ranks"]
    assert (facts["step"], first["step"], second["step"]) == (7, 5, 7)
    assert first["ago_s"] == second["ago_s"] == 6.0
    assert "step" not in third
    assert (first["line"], second["line"]) == ("loss 0.5", "20%")
    assert third["line"] == "x" * 199 + r"\x1b"


@pytest.mark.parametrize(
    ("messages", "state"),
    [
        ([], "starting"),
        ([("started", {"pid": 7})], "joining"),
        ([("started", {"pid": 7}), ("joining", {})], "running"),
        ([("joining", {}), ("saving", {"active": True})], "saving"),
        ([("joining", {}), ("saving", {"active": True}), ("saving", {"active": False})], "running"),
        ([("joining", {}), ("saving", {"active": True}), ("done", {})], "done"),
        ([("joining", {}), ("exited", {})], "done"),
        ([("joining", {}), ("lost", {"silent": False})], "failed"),
    ],
)
def test_the_state_of_a_rank(messages: list[tuple[str, dict[str, Any]]], state: str) -> None:
    ranks = Ranks(("a",))
    for kind, facts in messages:
        ranks.note(Message(0, kind, facts, 1.0))
    (found,) = job_facts(ranks, {}, 2.0)["ranks"]
    assert found["state"] == state


def test_the_times_of_a_rank() -> None:
    """Two steps in 4 s, 3 s of which the rank works itself, with 5 s of its cores."""
    ranks = Ranks(("a", "b"))
    ranks.note(Message(0, "started", {"host": "a", "pid": 7}, 0.0))
    for step, at, own_s, cpu_s in ((1, 10.0, 1.0, 1.0), (3, 14.0, 4.0, 6.0)):
        ranks.note(Message(0, "progress", progress(step, own_s=own_s) | {"cpu_s": cpu_s}, at))
    ranks.note(Message(1, "progress", progress(2), 12.0))
    facts = job_facts(ranks, {}, 15.0)
    first, second = facts["ranks"]
    assert first == {
        "rank": 0, "host": "a", "pid": 7, "state": "joining", "line": "", "step": 3, "ago_s": 1.0,
        "memory": 1 << 30, "rate": 0.5, "own_s": 1.5, "wait_s": 0.5, "cores": 1.25,
    }  # fmt: skip
    assert "rate" not in second
    assert (facts["step"], facts["rate"]) == (3, 0.5)


@pytest.mark.parametrize(
    "take", [Path.mkdir, Path.touch, os.mkfifo], ids=["folder", "file", "fifo"]
)
def test_a_name_that_others_have_taken_is_said_and_avoided(tmp_path, monkeypatch, capfd, take):
    """Who takes the name in /tmp hides no job from its user."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    usual = tmp_path / "mpiddp-7"
    take(usual)
    usual.chmod(0o777)
    monkeypatch.setattr(viewers, "_usual", lambda: usual)
    with closing(open_console("train.py")):
        (own,) = tmp_path.glob("mpiddp-7-*")
        assert own.stat().st_mode & 0o777 == 0o700
        assert f"{usual} is not a folder of yours alone" in capfd.readouterr().err
        assert own in viewers.folders()
        assert len(list(own.iterdir())) == 2
    assert not own.exists()
