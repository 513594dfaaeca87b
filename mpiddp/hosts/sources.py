"""A program for another host, which has a Python but none of our modules: it brings their sources along."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import ModuleType

_LOAD = """
import sys, types
for name, source in SOURCES.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
"""


def program_with(modules: Sequence[ModuleType], then: str, *, first: str = "") -> str:
    """A program that loads `modules`, each after those that it imports, and then runs `then`. It is ASCII.

    Args:
        first: lines to run before.
    """
    sources: dict[str, str] = {}
    for module in modules:
        assert module.__file__ is not None
        # The names by which they import each other, with empty parent packages.
        for name in accumulate(module.__name__.split("."), "{}.{}".format):
            sources.setdefault(name, "")
        sources[module.__name__] = Path(module.__file__).read_text()
    return f"{first}\nSOURCES = {sources!a}\n{_LOAD}{then}\n"
