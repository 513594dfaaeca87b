"""What the page is made of: its look, tables, lists, and the letters and colours of runs.

All that stands in a run's files is data. `text` escapes it, and only this module writes cells and items.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# The colour of each run: Okabe and Ito's, which colour-blind readers can distinguish as well.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#A0A000", "#444444"),
)
MAX_RUNS = len(COLOURS)  # more curves in one chart cannot be told apart

# For a phone and for a wide screen.
STYLE = """
:root { --quiet: #5f6670; --line: #dfe2e6; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 16px; background: #ffffff; color: #1c1e21;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 8px 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
.charts { display: grid; gap: 20px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 5px 18px 5px 0; }
tr { border-bottom: 1px solid var(--line); }
th[scope=row] { font-weight: 400; color: var(--quiet); }
td { overflow-wrap: anywhere; white-space: pre-wrap; min-width: 9em; }
td.long { min-width: 14em; }
@media (max-width: 600px) { body { font-size: 14px; } th, td { padding-right: 10px; } }
li { overflow-wrap: anywhere; }
ul { padding-left: 20px; }
.legend { list-style: none; padding: 0; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; }
.quiet, footer { color: var(--quiet); }
summary { cursor: pointer; padding: 4px 0; }
footer { margin: 40px 0 8px; font-size: 13px; }
"""


def text(value: object) -> str:
    """A text of a run's files as HTML: none of it is markup."""
    return escape(str(value))


def section(title: str, content: str) -> str:
    """A part of the page; nothing without content."""
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose rows begin with their name; nothing without rows."""
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{text(name)}</th>{"".join(map(_cell, cells))}</tr>'
        for name, *cells in rows
    )
    thead = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{thead}<tbody>{lines}</tbody></table></div>'


def details(summary: str, content: str) -> str:
    """Content that unfolds."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def _cell(content: str) -> str:
    return f"<td{' class=long' * (len(content) > 60)}>{text(content)}</td>"


def items(sentences: Iterable[str]) -> str:
    lines = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences)
    return f"<ul>{lines}</ul>" if lines else ""


def legend(names: Sequence[object]) -> str:
    """The runs with their letters and colours."""
    lines = "".join(
        f'<li><i class="swatch" style="background:{COLOURS[index]}"></i> '
        f"<b>{letter(index)}</b> {text(name)}</li>"
        for index, name in enumerate(names)
    )
    return f'<ul class="legend">{lines}</ul>'


def letter(index: int) -> str:
    """The short name of a run in tables and charts."""
    return "ABCDEFGH"[index]
