"""A process has one session, which a forked child does not share.

Tests mpiddp/runtime/job/session.py, mpiddp/runtime/start/run.py.
python -m pytest tests/unit/runtime/test_one_session.py
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import mpiddp
from mpiddp.runtime.job.session import current

RUNTIME = Path(mpiddp.__file__).parent / "runtime"


def test_a_process_has_one_session() -> None:
    assert current() is current()
    assert current().is_of_this_process


def test_a_forked_child_is_not_a_rank() -> None:
    session = current()
    session.stop.is_requested = True
    child = os.fork()
    if child == 0:
        is_new = current() is not session and not current().stop.is_requested
        os._exit(0 if is_new and not session.is_of_this_process and session.launcher is None else 1)
    session.stop.is_requested = False
    assert os.waitpid(child, 0)[1] == 0
    assert current() is session


def test_the_session_is_the_only_mutable_global_of_the_runtime() -> None:
    found = [
        (path.name, name)
        for path in sorted(RUNTIME.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
        for name in node.names
    ]
    assert set(found) == {("session.py", "_current")}
