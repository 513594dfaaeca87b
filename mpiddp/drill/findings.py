"""From what was recorded to pass or fail, with the cause in one sentence. Pure functions.

A resumed run passes if it ends with the bits of the undisturbed one. Otherwise the cause is the first step,
and the first entry of the state, that differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpiddp.drill.faults import Fault
from mpiddp.drill.history import RATE, History, Recording
from mpiddp.drill.rehearse import Ended, Rehearsal
from mpiddp.errors import DONE
from mpiddp.explain.explain import VERDICT

# Behind the launcher's prefix, and torch's own: "[rank 1 node1] [rank1]: RuntimeError: …".
_ERROR = re.compile(
    r"^(?:\[rank \d+[^\]]*\] )?(?:\[rank\d+\]: )?((?:[\w.]+\.)?\w*(?:Error|Exception): .*)", re.M
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PHRASE_LENGTH = 160


@dataclass(frozen=True)
class Result:
    """One row of the table. `passed` is None if the fault did not occur; other None are not known.

    differs_from: the first step before the fault whose weights are not those of the undisturbed run, None if
    all are. Then the end of the run is not compared. weights_equal: the bits of parameters, optimizer and
    buffers at the end.
    """

    fault: str
    passed: bool | None
    cause: str = ""
    codes: tuple[int | None, ...] = ()
    differs_from: int | None = None
    steps_lost: int | None = None
    weights_equal: bool | None = None


def judge(undisturbed: Rehearsal, fault: Fault, disturbed: Rehearsal) -> Result:
    """Compare a disturbed run with the undisturbed one."""
    before, after, last = undisturbed.recording, disturbed.recording, disturbed.ended[-1]
    if not disturbed.injected:
        why = "the script ended before" if last.code == DONE else last_error(last)
        return Result(fault.name, None, f"did not occur: {why}", disturbed.codes)
    attempt = after.ranks[0].attempts[0]
    pairs = enumerate(zip(before.ranks[0].steps, [attempt.first, *attempt.steps], strict=False))
    differs_from = next((n for n, (a, b) in pairs if b and a["weights"] != b["weights"]), None)
    is_compared = differs_from is None and not fault.fewer and last.code == DONE
    difference = _difference(before, after) if is_compared else ""
    cause, at = next(_causes(fault, disturbed, difference), ""), after.ranks[0].last_resume
    return Result(
        fault.name,
        not cause,
        cause,
        disturbed.codes,
        differs_from,
        None if at is None else after.reached - at,
        not difference if is_compared else None,
    )


def judge_undisturbed(undisturbed: Rehearsal) -> Result:
    """Whether the script can be drilled at all, and what shows without a fault."""
    recording, [end], cause = undisturbed.recording, undisturbed.ended, ""
    if end.code is None:
        cause = (
            "the undisturbed run did not end within an hour: end it after fewer steps, --steps N"
        )
    elif end.code != DONE:
        cause = f"the undisturbed run ended with code {end.code}: {last_error(end)}"
    elif not recording.length:
        cause = "no step of a torch optimizer was seen"
    else:
        cause = _shared_file(recording)
    return Result("none", not cause, cause, undisturbed.codes)


def _causes(fault: Fault, disturbed: Rehearsal, difference: str) -> Iterator[str]:
    """What is wrong, each in a sentence; the first one is the cause of the others."""
    rank, last = disturbed.recording.ranks[0], disturbed.ended[-1]
    if last.code is None:
        yield "the resumed run did not end in time"
    elif last.code != DONE:
        yield f"the resumed run ended with code {last.code}: {last_error(last)}"
    if rank.has_resumed and rank.last_resume is None:
        difference = "its weights at the resume are those of no step of the run"
    if fault.flips and difference:
        yield f"the damaged checkpoint was taken: {difference}"
    if rank.last_resume == 0:
        saved = disturbed.recording.saved_steps(slice(1))
        yield f"begins anew{f', although it had saved at step {saved[-1]}' if saved else ''}"
    if difference:
        yield difference


def _difference(before: Recording, after: Recording) -> str:
    """Where the resumed run differs from the undisturbed one; "" if it ends with the same bits."""
    pairs = list(zip(before.ranks, after.ranks, strict=True))
    if all(rank.steps[-1]["entries"] == other.steps[-1]["entries"] for rank, other in pairs):
        return ""
    for number, (rank, other) in enumerate(pairs):
        for step, entry in _differences(rank, other):
            of_rank = f" on rank {number}" if number else ""
            return f"differs from step {step}{of_rank}: first in {entry}"
    return f"ends after step {after.length}, the undisturbed run after step {before.length}"


def _differences(before: History, after: History) -> Iterator[tuple[int, str]]:
    """The steps from the resume on that differ, and the first entry of each that does."""
    at, first = after.last_resume or 0, after.attempts[-1].first
    if at and first is not None:
        rate = {RATE: before.steps[at]["entries"].get(RATE)}
        after.steps[at] = {"entries": rate | first["entries"]}
    steps = list(zip(before.steps, after.steps, strict=False))
    for number, (step, other) in enumerate(steps[at:], at):
        ours, theirs = step["entries"], other["entries"]
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                lacks = "" if name in theirs else ", which is missing"
                yield number, f"{name}{lacks}"
                break


def _shared_file(recording: Recording) -> str:
    """A sentence about a file that several ranks write."""
    writers: dict[str, list[str]] = {}
    for number, rank in enumerate(recording.ranks):
        saves = (save["path"] for attempt in rank.attempts for save in attempt.saves)
        for path in {*saves} - {""}:
            writers.setdefault(path, []).append(str(number))
    for path, ranks in writers.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(ranks)} write one file, {Path(path).name}"
    return ""


def last_error(end: Ended) -> str:
    """The error that a command has printed: of Python, of mpiddp, or else its last line."""
    said = _COLOUR.sub("", end.said)
    lines = [line for line in said.splitlines() if line.strip()]
    verdicts = [line for line in lines if VERDICT.fullmatch(line)]
    errors = _ERROR.findall(said) or verdicts or lines[-1:] or ["it printed no error"]
    text = errors[0].removeprefix("mpiddp: ").strip().rstrip(".")
    return text if len(text) <= _PHRASE_LENGTH else f"{text[:_PHRASE_LENGTH]}…"
