"""`mpiddp report RUN…`: one page about runs, without any other file. `mpiddp runs DIR`: a line for each run.

    mpiddp report runs/a runs/b -o report.html
    mpiddp runs runs

`runs` needs the standard library alone, and reads only the end of the records.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpiddp import __version__
from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, UserError, named_by
from mpiddp.files import replace_file
from mpiddp.report import tables
from mpiddp.report.html import MAX_RUNS, STYLE, items, legend, section, text
from mpiddp.report.read import UNKNOWN, Run, is_run, read_run
from mpiddp.text import align_columns, as_json, counted, escaped, listed, shown

_HEAD = ("RUN", "STATE", "STEP", "ACCURACY", "LOSS", "RATE", "DURATION")


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
    with named_by("--out"):
        replace_file(out, content)
    for note in (note for run in runs for note in run.notes):
        print(escaped(note), file=sys.stderr)
    print(escaped(f"{options.out}: {counted(len(runs), 'run')}, {len(content) / 1e6:.1f} MB"))
    return DONE


def page(runs: Sequence[Run]) -> str:
    """The page about these runs as HTML."""
    from mpiddp.report.charts import Charts  # needs bokeh

    charts = Charts(runs)
    marks = '<p class="quiet">Dotted: a save. Solid: a restart resumed from here.</p>'
    body = "\n".join(
        [
            _title(runs),
            section("What ran", tables.facts(runs)),
            section("Failures", tables.failures(runs)),
            section("Curves", charts.curves and marks + charts.curves),
            section("Time lost", tables.time_lost(runs)),
            section("Settings", tables.settings(runs)),
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


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"<h1>{text(runs[0].name)}</h1>"
    return f"<h1>{len(runs)} runs</h1>{legend([run.path for run in runs])}"


def list_runs(argv: list[str]) -> int:
    """Run `mpiddp runs ARGV`.

    Raises:
        UserError: bad usage, or DIR contains no run, or cannot be read.
        JobFailed: a disk has failed.
    """
    parser = OneSentenceParser(
        prog="mpiddp runs",
        description="List the runs of a folder with state, step, accuracy, loss, rate and duration.",
        allow_abbrev=False,
    )
    parser.add_argument("dir", metavar="DIR", nargs="?", default="runs", help="(default: runs)")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    options = parser.parse_args(argv)
    folder = Path(options.dir)
    with named_by(""):
        runs = _runs([folder]) or _runs(sorted(folder.iterdir()))
    if not runs:
        raise UserError(f"{folder} contains no run. Expected a folder of runs, or of one run.")
    if options.json:
        print(as_json("runs", {"runs": [*map(_facts, runs)]}))
        return DONE
    rows = [_HEAD, *map(_row, runs)]
    columns = [each for each in zip(*rows, strict=True) if set(each[1:]) != {UNKNOWN}]
    right = [index for index, (name, *_) in enumerate(columns) if name not in ("RUN", "STATE")]
    print(align_columns(list(zip(*columns, strict=True)), right=right))
    return DONE


def _runs(folders: Sequence[Path]) -> list[Run]:
    """Each folder that is a run's, or that cannot be read: it is another user's, or lost+found."""
    found = []
    for folder in folders:
        try:
            if is_run(folder):
                found.append(read_run(folder, only_end=True))
        except OSError as error:
            found.append(Run(folder, f"({error.strerror})"))
    return found


def _row(run: Run) -> tuple[str, ...]:
    return (
        escaped(run.name),
        run.state,
        UNKNOWN if run.step is None else f"{run.step:,}",
        run.shown("{:.2%}", "test_accuracy"),
        run.shown("{:.4g}", "train_loss", "loss"),
        run.shown("{:,.0f} images/s", "images_per_s"),
        tables.time_text(run.seconds),
    )


def _facts(run: Run) -> dict[str, Any]:
    return {
        "path": str(run.path),
        "name": run.name,
        "state": run.state,
        "step": run.step,
        "test_accuracy": run.latest("test_accuracy"),
        "train_loss": run.latest("train_loss", "loss"),
        "images_per_s": run.latest("images_per_s"),
        "wall_s": run.seconds,
    }
