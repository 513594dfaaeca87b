"""The page about runs: one file of HTML with its style, its charts and their script."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mpiddp import __version__
from mpiddp.report import tables
from mpiddp.report.charts import Charts
from mpiddp.report.html import STYLE, items, legend, section, text
from mpiddp.report.read import Run
from mpiddp.text import listed


def page(runs: Sequence[Run]) -> str:
    """The page about these runs as HTML."""
    charts = Charts(runs)
    marks = '<p class="quiet">Dotted: a save. Solid: a restart went on from here.</p>'
    body = "\n".join(
        [
            _head(runs),
            section("What ran", tables.facts(runs)),
            section("Failures", tables.failures(runs)),
            section("Curves", charts.curves and marks + charts.curves),
            section("Time lost", tables.time_lost(runs)),
            section("Settings", tables.settings(runs)),
            section("Environment", tables.environment(runs)),
            section("What could not be read", items(note for run in runs for note in run.notes)),
        ]
    )
    # No favicon: a browser would ask the file's folder, or a server, for one.
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{text(listed([run.name for run in runs]))}</title>
<style>{STYLE}</style>
{charts.library}
</head><body>
{body}
<footer>mpiddp {__version__}, {tables.date(time.time())}</footer>
{charts.script}
</body></html>
"""


def _head(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"<h1>{text(runs[0].name)}</h1>"
    return f"<h1>{len(runs)} runs</h1>{legend([run.path for run in runs])}"
