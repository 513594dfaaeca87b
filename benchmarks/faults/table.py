"""The results of the runs, one line of JSON each, and the tables of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import append_record, read_records
from mpiddp.bench.report import markdown

NAMES = {
    "openmpi5": "Open MPI 5.0",
    "openmpi4": "Open MPI 4.1",
    "mpich": "MPICH",
    "intelmpi": "Intel MPI",
    "-": "-",
}


@dataclass(frozen=True)
class Run:
    """One run with one fault. Times are in seconds after the fault, None if the event did not occur."""

    fault: str
    starter: str
    round: int
    detected_s: float | None = None  # until the launcher printed the sentence about it
    ended_s: float | None = None  # until the end of the launcher; None after a restart
    resumed_s: float | None = None  # until the next step
    code: int | None = None
    is_code_right: bool = False
    is_named: bool = True  # the launcher printed the right sentence
    orphans: int = 0
    steps_lost: int | None = None
    said: str = ""
    load: float = 0.0  # load average of the machine over one minute


@dataclass(frozen=True)
class Tally:
    """A fault that was repeated `times` times, with the number of right outcomes."""

    fault: str
    times: int
    right: int
    seen: str


def read(file: Path) -> tuple[list[Run], list[Tally]]:
    records = read_records(file)
    return (
        [Run(**record) for record in records if "times" not in record],
        [Tally(**record) for record in records if "times" in record],
    )


def write(file: Path, record: Run | Tally) -> None:
    append_record(file, asdict(record))


def runs_table(runs: Iterable[Run], order: Iterable[str]) -> str:
    """One row per fault and MPI, with the faults in this order."""
    times = ("named after s", "ended after s", "next step after s")
    head = (
        "fault",
        "MPI",
        "runs",
        *times,
        "exit code right",
        "named right",
        "orphans",
        "steps lost",
    )
    rows = []
    grouped: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        grouped[run.fault, run.starter].append(run)
    for fault in order:
        for starter, name in NAMES.items():
            if group := grouped.get((fault, starter)):
                right = sum(run.is_code_right for run in group)
                named = sum(run.is_named for run in group)
                lost = [run.steps_lost for run in group if run.steps_lost is not None]
                cells = [
                    fault,
                    name,
                    str(len(group)),
                    _seconds(run.detected_s for run in group),
                    _seconds(run.ended_s for run in group),
                    _seconds(run.resumed_s for run in group),
                    f"{right}/{len(group)}",
                    f"{named}/{len(group)}",
                    str(sum(run.orphans for run in group)),
                    _at_most(lost),
                ]
                rows.append(cells)
    return markdown(head, rows)


def tally_table(found: Iterable[Tally]) -> str:
    rows = [[each.fault, str(each.times), str(each.right), each.seen] for each in found]
    return markdown(("fault", "times", "right", "seen"), rows)


def _at_most(values: list[int]) -> str:
    if not values:
        return "-"
    return f"≤ {max(values)}" if any(values) else "0"


def _seconds(values: Iterable[float | None]) -> str:
    """The median, with the maximum in brackets."""
    known = [value for value in values if value is not None]
    return f"{median(known):.1f} ({max(known):.1f})" if known else "-"
