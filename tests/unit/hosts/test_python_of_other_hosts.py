"""What is sent to other hosts runs on Python 3.8 there, which this Python does not show by itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mpiddp.doctor import agent, network, stack
from mpiddp.hosts import fabric, interfaces
from mpiddp.hosts.cluster import connection, receive, rsync, run_agent, transfer, tree

SENT = (
    *(interfaces, fabric, tree, rsync, connection, transfer, receive),
    *(run_agent, agent, network, stack),
)


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without annotations: `from __future__ import annotations` keeps them text."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from evaluated(child)


@pytest.mark.parametrize("module", SENT, ids=lambda module: module.__name__)
def test_no_generic_of_python_3_9_is_evaluated(module: ModuleType) -> None:
    assert module.__file__ is not None
    parsed = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))
    nodes = list(evaluated(parsed))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert "annotations" in {alias.name for node in imports for alias in node.names}
    generics = {"list", "dict", "set", "frozenset", "tuple", "type"}
    for node in imports:
        if node.module in ("collections", "collections.abc"):
            generics |= {alias.name for alias in node.names}
    subscripted = [node.value for node in nodes if isinstance(node, ast.Subscript)]
    names = {each.id for each in subscripted if isinstance(each, ast.Name)}
    assert names & generics == set()
