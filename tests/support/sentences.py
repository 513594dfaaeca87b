"""Every sentence of an error in the package, by its id, in one file: tests/data/sentences.txt.

    python -m tests.support.sentences --update

A sentence ends with its id: "hosts.txt not found. [hostfile-missing]". Tests name the id, the values that a
user gave and the command that mends it (`error`), so a better sentence is one line of this file's diff.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/data/sentences.txt"
OWN = ("sentences.py", "test_sentences.py")
GAP = "{}"
_ERRORS = ("UserError", "JobFailed", "Failed", "NotSaved", "NoAnswer", "ChannelLost", "cause_of")
_ID = re.compile(r"(?:^| )\[([a-z][a-z0-9]*(?:-[a-z0-9]+)+)\]\n?$", re.MULTILINE)
_WORDS = 6  # that no test holds in a row: they are the sentence's own


def error(id: str, *values: str) -> str:
    """A pattern: one line with the error `id`, which shows these values in this order.

    `re.fullmatch` asserts that nothing stands before or after it.
    """
    return "".join(rf"[^\n]*?{re.escape(value)}" for value in values) + rf"[^\n]*?\[{id}\]"


def sentences() -> dict[str, str]:
    """Of each error: its id, and its text with a gap for each value.

    Raises:
        ValueError: two have the same id.
    """
    found: dict[str, str] = {}
    for file in sorted((ROOT / "mpiddp").rglob("*.py")):
        for text in _texts(ast.parse(file.read_text())):
            if match := _ID.search(text):
                if match[1] in found:
                    raise ValueError(f"{file}: a second [{match[1]}]")
                found[match[1]] = _ID.sub("", text)
    return found


def without_id() -> list[str]:
    """The places of errors that are made from a text of their own, and have no id."""
    return [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in sorted((ROOT / "mpiddp").rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and call.args and _name(call.func) in _ERRORS
        if (text := text_of(call.args[0])) and _says_something(text) and not _ID.search(text)
    ]


def _says_something(text: str) -> bool:
    """Whether it is more than another error's sentence with a name before it."""
    return bool(re.search("[a-z]", text.replace(GAP, ""))) and not text.endswith(GAP)


def _texts(node: ast.AST) -> Iterator[str]:
    """The texts below a node that are not a part of another one, and those in the gaps of texts."""
    for child in ast.iter_child_nodes(node):
        text = text_of(child)
        if text is None:
            yield from _texts(child)
        else:
            yield text
            for gap in _gaps(child):
                yield from _texts(gap)


def _gaps(text: ast.AST) -> Iterator[ast.AST]:
    """What varies in a text."""
    if isinstance(text, ast.JoinedStr):
        yield from (part for part in text.values if not isinstance(part, ast.Constant))
    elif isinstance(text, ast.BinOp):
        for side in (text.left, text.right):
            yield from _gaps(side) if text_of(side) is not None else [side]


def _name(function: ast.expr) -> str:
    """The name of what is called. `cause_of(error)(text)` makes an error, too."""
    while isinstance(function, ast.Call):
        function = function.func
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
    return "".join(f"{id}\n{indent(text, '    ')}\n" for id, text in sorted(found.items()))


def untested(found: dict[str, str]) -> list[str]:
    """The ids that no test names."""
    return [id for id in found if not re.search(rf"(?<![a-z0-9-]){id}(?![a-z0-9-])", _in_tests())]


def repeated(found: dict[str, str]) -> list[str]:
    """The ids whose sentence a test repeats, so that a better one would be more than one diff."""
    return [id for id, text in found.items() if any(row in _in_tests() for row in _rows(text))]


@cache
def _in_tests() -> str:
    """All texts of the tests. A pattern's backslashes are left out."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file.name not in OWN]
    texts = (text for file in files for text in _texts(ast.parse(file.read_text())))
    return "\n".join(re.sub(r"\\(.)", r"\1", text) for text in texts)


def _rows(text: str) -> Iterator[str]:
    """All rows of so many words in a sentence, between its gaps."""
    for part in text.split(GAP):
        words = part.split()
        for start in range(len(words) - _WORDS + 1):
            yield " ".join(words[start : start + _WORDS])


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("python -m tests.support.sentences --update")
    GOLDEN.write_text(golden(sentences()))
