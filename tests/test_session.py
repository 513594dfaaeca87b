"""A process has one session, and a forked child does not share it."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import mpiddp
from mpiddp.runtime.session import current

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
        os._exit(0 if is_new and not session.is_of_this_process and session.channel is None else 1)
    session.stop.is_requested = False
    assert os.waitpid(child, 0)[1] == 0
    assert current() is session


def test_the_session_is_the_only_mutable_global_of_the_runtime() -> None:
    found = [
        (path.name, name)
        for path in sorted(RUNTIME.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
        for name in node.names
    ]
    assert set(found) == {("session.py", "_current")}


def test_imports_in_the_runtime_have_no_cycle() -> None:
    """This includes the imports in functions and the imports for types only."""
    imports = {path.stem: _imported(path) for path in RUNTIME.glob("*.py")}
    while leaves := {name for name, needed in imports.items() if not needed & imports.keys()}:
        imports = {name: needed for name, needed in imports.items() if name not in leaves}
    assert imports == {}


def _imported(path: Path) -> set[str]:
    """The modules of the runtime that this one imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpiddp.runtime"):
            package, _, module = (node.module or "").rpartition(".")
            names = [alias.name for alias in node.names]
            found |= {module} if package == "mpiddp.runtime" else set(names)
    return found
