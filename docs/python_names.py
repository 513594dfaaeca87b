"""The page of the public Python names, from their docstrings.

python -m docs.python_names     # writes python-names.md
"""

from __future__ import annotations

import inspect
from pathlib import Path

import mpiddp

PAGE = Path(__file__).parent / "python-names.md"

_HEAD = """\
# Python names

<!-- Written by `python -m docs.python_names` from the docstrings of mpiddp. Change them there. -->

`python -m pydoc mpiddp.Checkpoints`, for example, prints all of a name. The site has all of every name as
*Python names in full*.

| name | does |
|---|---|
"""


def text() -> str:
    """The page."""
    rows = []
    for name in sorted(mpiddp.__all__, key=str.lower):
        summary = (inspect.getdoc(getattr(mpiddp, name)) or "").partition("\n\n")[0]
        rows.append(f"| `mpiddp.{name}` | {' '.join(summary.split())} |".replace("<", "&lt;"))
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
