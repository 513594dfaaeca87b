"""`mpiddp report RUN…`: what the folders of runs tell, as one page that needs no other file and no network.

mpiddp report runs/a runs/b -o report.html
"""

from __future__ import annotations

import sys
from pathlib import Path

from mpiddp.arguments import OneSentenceParser
from mpiddp.checkpoints.records import replacing
from mpiddp.errors import DONE, UserError
from mpiddp.paths import named_by
from mpiddp.report.html import MAX_RUNS
from mpiddp.report.read import read_run
from mpiddp.text import counted, escaped, shown


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
    from mpiddp.report.page import page  # needs bokeh

    content = page(runs).encode(errors="replace")
    with named_by("--out"), replacing(out) as file:
        file.write(content)
    for note in (note for run in runs for note in run.notes):
        print(escaped(note), file=sys.stderr)
    print(escaped(f"{options.out}: {counted(len(runs), 'run')}, {len(content) / 1e6:.1f} MB"))
    return DONE
