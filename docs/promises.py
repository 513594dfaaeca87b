"""The page of promises, from the tests that keep them.

python -m docs.promises     # writes promises.md
"""

from __future__ import annotations

import ast
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
_CHAPTERS = Path(__file__).parent.parent / "tests" / "promises"

_HEAD = """\
# Promises

<!-- Written by `python -m docs.promises` from tests/promises. Change it there. -->

mpiddp promises each sentence below, and a test of real ranks keeps it.
"""


def text() -> str:
    """The page."""
    chapters = (_chapter(path) for path in sorted(_CHAPTERS.glob("test_*.py")))
    return "\n".join([_HEAD, *chapters])


def _chapter(path: Path) -> str:
    """A chapter: its title and its promises, each with the name of its test."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    title, _, about = _first_line(module).rstrip(".").partition(": ")
    lines = [
        f"- {_first_line(test)} `{test.name.removeprefix('test_')}`" for test in _tests(module)
    ]
    link = f"[{path.name}](../tests/promises/{path.name})"
    return "\n".join([f"## {title}\n", f"{about[:1].upper()}{about[1:]}. {link}\n", *lines, ""])


def _tests(module: ast.Module) -> list[ast.FunctionDef]:
    functions = [each for each in module.body if isinstance(each, ast.FunctionDef)]
    return [each for each in functions if each.name.startswith("test_")]


def _first_line(node: ast.Module | ast.FunctionDef) -> str:
    """The first sentence of its docstring."""
    return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
