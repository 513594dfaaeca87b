"""What a drill prints: a line of progress for each fault, the table, the causes, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from mpiddp.drill.verdict import Result
from mpiddp.text import align_columns

_HEAD = (
    *("fault", "verdict", "codes", "steps lost", "twice", "never", "weights", "learning rate"),
    *("left", "files", "s lost"),
)


def line(result: Result) -> str:
    """`kill: pass`, or `kill: FAIL: why`."""
    return f"{result.fault}: {_verdict(result)}" + (f": {result.cause}" if result.cause else "")


def table(results: Sequence[Result]) -> str:
    rows = [_HEAD, *(_row(each) for each in results)]
    said = [(each.fault, text) for each in results for text in (each.cause, each.note) if text]
    sentences = [f"{fault}: {text}." for fault, text in said]
    return "\n".join([align_columns(rows, right=range(3, 6)), *sentences])


def as_json(results: Sequence[Result]) -> str:
    return json.dumps([asdict(each) for each in results], indent=2)


def _row(result: Result) -> tuple[str, ...]:
    codes = ", ".join("none" if code is None else str(code) for code in result.codes)
    return (
        result.fault,
        _verdict(result),
        codes or "-",
        "-" if result.steps_lost is None else str(result.steps_lost),
        str(result.twice),
        str(result.never),
        _weights(result.difference),
        result.rate or "-",
        str(result.left),
        str(result.files_left),
        "-" if result.seconds_lost is None else f"{result.seconds_lost:.0f}",
    )


def _verdict(result: Result) -> str:
    return "-" if result.passed is None else "pass" if result.passed else "FAIL"


def _weights(difference: float | None) -> str:
    if difference is None:
        return "-"
    return "equal" if difference == 0.0 else f"{difference:.1e}"
