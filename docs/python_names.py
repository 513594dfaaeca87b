"""The page of the public Python names, from their docstrings.

python -m docs.python_names     # writes python-names.md
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import mpiddp

PAGE = Path(__file__).parent / "python-names.md"

_HEAD = """\
# Python names

<!-- Written by `python -m docs.python_names` from the docstrings of mpiddp. Change them there. -->

`python -m pydoc mpiddp.init`, for example, prints the same at a terminal.

| name | does |
|---|---|
"""


def text() -> str:
    """The page: a row for each name, then all of its docstring."""
    names = sorted(mpiddp.__all__, key=str.lower)
    public = {f"mpiddp.{name}": getattr(mpiddp, name) for name in names}
    rows, parts = [], []
    for name, value in public.items():
        summary = (inspect.getdoc(value) or "").partition("\n\n")[0]
        rows.append(f"| `{name}` | {' '.join(summary.split())} |".replace("<", "&lt;"))
    for name, value in public.items():
        parts += [f"\n## {name}\n", _block(value), *_calls(value)]
    return _HEAD + "\n".join([*rows, *parts]) + "\n"


def _block(value: object) -> str:
    return f"```text\n{inspect.getdoc(value)}\n```"


def _calls(cls: object) -> Iterator[str]:
    """The docstring of each public call of a class."""
    for name, call in vars(cls).items() if isinstance(cls, type) else ():
        if inspect.isfunction(call) and call.__doc__ and (name == "__init__" or name[0] != "_"):
            title = cls.__name__ if name == "__init__" else f".{name}"
            yield f"\n`{title}`:\n\n{_block(call)}"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
