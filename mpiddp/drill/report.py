"""What a drill prints: a line of progress for each fault, the table, the causes, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from mpiddp.drill.verdict import Result
from mpiddp.text import align_columns

_HEAD = (
    *("fault", "verdict", "samples repeated", "samples skipped", "checkpoint lost"),
    *("weights equal", "leftover processes"),
)
_YES_OR_NO = {None: "-", True: "yes", False: "no"}
_VERDICTS = {None: "-", True: "pass", False: "FAIL"}


def line(result: Result) -> str:
    """`kill: pass`, or `kill: FAIL: why`."""
    return f"{result.fault}: {_VERDICTS[result.passed]}" + (result.cause and f": {result.cause}")


def table(results: Sequence[Result]) -> str:
    sentences = [f"{each.fault}: {each.cause}." for each in results if each.cause]
    return "\n".join([align_columns([_HEAD, *map(_row, results)]), *sentences])


def as_json(results: Sequence[Result]) -> str:
    return json.dumps([asdict(each) for each in results], indent=2)


def _row(result: Result) -> tuple[str, ...]:
    samples = (result.samples_repeated, result.samples_skipped)
    return (
        result.fault,
        _VERDICTS[result.passed],
        *("-" if number is None else str(number) for number in samples),
        _YES_OR_NO[result.checkpoint_lost],
        _YES_OR_NO[result.weights_equal],
        str(result.leftover_processes),
    )
