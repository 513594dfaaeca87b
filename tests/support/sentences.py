"""Every sentence of an error in the package, by its id, in one file: tests/data/sentences.txt.

    python -m tests.support.sentences --update

An id is the place of the error: `hosts.hostfile:_slots`, and `hosts.hostfile:_slots:2` for the second
sentence of that function. What varies is shown as {}. So a better sentence is one line of a diff, and all can
be read in one place. `untested` names those that no test holds.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/data/sentences.txt"
ERRORS = ("UserError", "JobFailed", "Failed")
OWN = ("sentences.py", "test_sentences.py")
GAP = "{}"
_WORDS = 4  # that a test has to hold in a row; fewer where a sentence has no more between its gaps


def sentences() -> dict[str, str]:
    """Of each error that is made from a text: its id, and the text with a gap for each value."""
    found: dict[str, str] = {}
    for file in sorted((ROOT / "mpiddp").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT / "mpiddp").with_suffix("").parts)
        counts: Counter[str] = Counter()
        for name, text in _errors(ast.parse(file.read_text()), ""):
            place = f"{module}:{name}" if name else module
            counts[place] += 1
            found[place if counts[place] == 1 else f"{place}:{counts[place]}"] = text
    return found


def _errors(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    """The errors below a node: the function or method that makes them, and their texts."""
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = f"{function}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call) and child.args and _name(child.func) in ERRORS:
            text = text_of(child.args[0])
            if text is not None and text.replace(GAP, "").strip():
                yield function, text
        yield from _errors(child, inside)


def _name(function: ast.expr) -> str:
    return getattr(function, "id", "") or getattr(function, "attr", "")


def text_of(node: ast.AST) -> str | None:
    """The text of a string, an f-string, or a sum of them; None for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else GAP for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = text_of(left), text_of(right)
            if texts != (None, None):
                return "".join(GAP if text is None else text for text in texts)
    return None


def golden(found: dict[str, str]) -> str:
    """The text of the file."""
    return "".join(f"{place}\n{indent(text, '    ')}\n" for place, text in found.items())


def untested(found: dict[str, str]) -> list[str]:
    """The ids of the sentences of which no test holds some words in a row."""
    held = _texts_of_tests()
    return [place for place, text in found.items() if not _is_held(text, held)]


@cache
def _texts_of_tests() -> str:
    """All texts of the tests. A pattern's backslashes are left out."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file.name not in OWN]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return "\n".join(re.sub(r"\\(.)", r"\1", text) for node in nodes if (text := text_of(node)))


def _is_held(text: str, held: str) -> bool:
    parts = [part.split() for part in text.split(GAP)]
    longest = min(_WORDS, max(map(len, parts)))
    rows = [
        " ".join(part[start : start + longest])
        for part in parts
        for start in range(len(part) - longest + 1)
    ]
    return any(row in held for row in rows)


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("python -m tests.support.sentences --update")
    GOLDEN.write_text(golden(sentences()))
