"""`mpiddp runs DIR`: the runs of a folder, one a line, with state, step, accuracy, loss, rate and duration.

    mpiddp runs runs

The standard library is enough, and of the records only the end is read.
"""

from __future__ import annotations

from pathlib import Path

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import DONE, UserError
from mpiddp.paths import named_by
from mpiddp.report.read import UNKNOWN, Run, is_run, read_run
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
        rows = [_HEAD, *map(_row_of, _find(folder))]
    columns = [each for each in zip(*rows, strict=True) if set(each[1:]) != {UNKNOWN}]
    kept = [column[0] for column in columns]
    right = [index for index, name in enumerate(kept) if name not in ("RUN", "STATE")]
    print(align_columns(list(zip(*columns, strict=True)), right=right))
    return DONE


def _find(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else the runs in it, by name."""
    if is_run(folder):
        return [folder]
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {problem}. Expected a folder of runs.")
    found = sorted(each for each in folder.iterdir() if _is_run(each))
    if not found:
        raise UserError(f"{folder} contains no run. Expected a folder of runs, or of one run.")
    return found


def _is_run(folder: Path) -> bool:
    try:
        return folder.is_dir() and is_run(folder)
    except OSError:  # another user's, or lost+found
        return False


def _row_of(folder: Path) -> tuple[str, ...]:
    try:
        return _row(read_run(folder, only_end=True))
    except OSError as error:
        return (escaped(folder.name), f"({error.strerror})", *[UNKNOWN] * (len(_HEAD) - 2))


def _row(run: Run) -> tuple[str, ...]:
    return (
        escaped(run.name),
        run.state,
        UNKNOWN if run.step is None else f"{run.step:,}",
        run.shown("{:.2%}", "test_accuracy"),
        run.shown("{:.4g}", "train_loss", "loss"),
        run.shown("{:,.0f} images/s", "images_per_s"),
        UNKNOWN if run.seconds is None else duration(run.seconds),
    )
