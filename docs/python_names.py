"""The page of the public Python names, from their docstrings.

python -m docs.python_names     # writes python-names.md
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import mpiddp
from mpiddp.checkpoints.resumed import Resumed

PAGE = Path(__file__).parent / "python-names.md"

_HEAD = """\
# Python names

<!-- Written by `python -m docs.python_names` from the docstrings of mpiddp. Change them there. -->

`python -m pydoc mpiddp.init`, for example, prints all of a name. The site has all of every name as
*Python names in full*. The calls of `Checkpoints`, of a checkpoint and of `Sampler` stand
[below](#checkpoints).

| name | does |
|---|---|
"""
# The classes whose calls a script makes.
_CLASSES = (mpiddp.Checkpoints, Resumed, mpiddp.Sampler)


def text() -> str:
    """The page."""
    rows = []
    for name in sorted(mpiddp.__all__, key=str.lower):
        summary = (inspect.getdoc(getattr(mpiddp, name)) or "").partition("\n\n")[0]
        rows.append(f"| `mpiddp.{name}` | {' '.join(summary.split())} |".replace("<", "&lt;"))
    parts = [part for cls in _CLASSES for part in (f"\n## {cls.__name__}", *_calls(cls))]
    return _HEAD + "\n".join([*rows, *parts]) + "\n"


def _calls(cls: type) -> Iterator[str]:
    """The docstring of the class, and of each of its public calls."""
    yield f"\n```text\n{inspect.getdoc(cls)}\n```"
    for name, call in vars(cls).items():
        if inspect.isfunction(call) and call.__doc__ and (name == "__init__" or name[0] != "_"):
            title = cls.__name__ if name == "__init__" else name
            yield f"\n`{title}`:\n\n```text\n{inspect.getdoc(call)}\n```"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
