"""`mpiddp runs DIR`: the runs of a folder, one a line, with state, step, accuracy, loss, rate and duration.

    mpiddp runs runs

The standard library is enough, and of the records only the end is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, UserError
from mpiddp.paths import named_by
from mpiddp.report.read import Run, is_run, number, read_run
from mpiddp.text import align_columns, duration, escaped

_HEAD = ("RUN", "STATE", "STEP", "ACCURACY", "LOSS", "RATE", "DURATION")


def main(argv: list[str]) -> int:
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
    folder = Path(parser.parse_args(argv).dir)
    with named_by(""):
        found = [read_run(each, tail_only=True) for each in _find(folder)]
    rows = [_HEAD, *(_row(run) for run in found)]
    print(align_columns(rows, right=range(2, len(_HEAD))))
    return DONE


def _find(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else the runs in it, by name."""
    if is_run(folder):
        return [folder]
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {problem}. Expected a folder of runs.")
    found = sorted(each for each in folder.iterdir() if each.is_dir() and is_run(each))
    if not found:
        raise UserError(f"{folder} contains no run. Expected a folder of runs, or of one run.")
    return found


def _row(run: Run) -> Sequence[str]:
    """A line of the list. What the end of the records does not tell is taken from the summary."""
    accuracy = _first(number(run.summary, "test_accuracy"), run.last("test_accuracy"))
    loss = _first(run.last("train_loss"), run.last("loss"), number(run.summary, "train_loss"))
    rate = _first(number(run.summary, "images_per_s"), run.last("images_per_s"))
    return (
        escaped(run.path.name or str(run.path)),
        run.state,
        "-" if run.step is None else f"{run.step:,}",
        "-" if accuracy is None else f"{accuracy:.2%}",
        "-" if loss is None else f"{loss:.4f}",
        "-" if rate is None else f"{rate:,.0f} images/s",
        "-" if run.seconds is None else duration(run.seconds),
    )


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
