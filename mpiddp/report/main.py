"""`mpiddp report RUN…`: what the folders of runs tell, as one page that needs no other file and no network.

mpiddp report runs/a runs/b -o report.html
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpiddp import __version__
from mpiddp.arguments import OneSentenceParser
from mpiddp.checkpoints.records import replacing
from mpiddp.errors import DONE, UserError
from mpiddp.paths import named_by
from mpiddp.report import tables
from mpiddp.report.html import MAX_RUNS, STYLE, items, legend, section, text
from mpiddp.report.read import Run, read_run
from mpiddp.text import counted, escaped, listed, shown


def main(argv: list[str]) -> int:
    """Run `mpiddp report ARGV`: write the page, and print its path and size.

    Raises:
        UserError: bad usage, or RUN is no run, or the page cannot be written.
        JobFailed: a disk has failed.
        ModuleNotFoundError: bokeh is not installed.
    """
    parser = OneSentenceParser(
        prog="mpiddp report",
        description="Write one page about runs, with their curves, settings and failures, that needs "
        "no other file and no network.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run")
    parser.add_argument(
        "-o", "--out", metavar="FILE", default="report.html", help="the page (default: report.html)"
    )
    options = parser.parse_args(argv)
    folders = list(dict.fromkeys(Path(each) for each in options.runs))
    if len(folders) > MAX_RUNS:
        raise UserError(f"mpiddp report: at most {MAX_RUNS} runs fit a page, not {len(folders)}.")
    out = Path(options.out)
    if not out.name or out.is_dir():
        raise UserError(f"--out {shown(str(out))} is a folder. Name a file: --out report.html")
    with named_by(""):
        runs = [read_run(each) for each in folders]
    content = page(runs).encode(errors="replace")
    with named_by("--out"), replacing(out) as file:
        file.write(content)
    for note in (note for run in runs for note in run.notes):
        print(escaped(note), file=sys.stderr)
    print(escaped(f"{options.out}: {counted(len(runs), 'run')}, {len(content) / 1e6:.1f} MB"))
    return DONE


def page(runs: Sequence[Run]) -> str:
    """The page about these runs as HTML."""
    from mpiddp.report.charts import Charts  # needs bokeh

    charts = Charts(runs)
    marks = '<p class="quiet">Dotted: a save. Solid: a restart went on from here.</p>'
    body = "\n".join(
        [
            _head(runs),
            section("What ran", tables.facts(runs)),
            section("Failures", tables.failures(runs)),
            section("Curves", charts.curves and marks + charts.curves),
            section("Time lost", tables.time_lost(runs)),
            section("Settings", tables.compared("setting", [run.config for run in runs])),
            # mpiddp/train/record.py writes it: versions, git commit and changes, packages, variables.
            section("Environment", tables.compared("fact", [run.start_record for run in runs])),
            section("What could not be read", items(note for run in runs for note in run.notes)),
        ]
    )
    # No favicon: a browser would ask the file's folder, or a server, for one.
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
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
