"""From what was recorded to pass or fail, with the cause in one sentence and what to change. Pure functions.

A resumed run passes if it ends with the bits of the undisturbed one. Only then does it not matter how it got
there; otherwise the first thing that differs at the first step after the resume is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mpiddp.drill.causes import UNNOTICED, cause_of, last_error, state_cause
from mpiddp.drill.faults import Fault
from mpiddp.drill.records import Recording, without_numbers
from mpiddp.drill.rehearse import Rehearsal
from mpiddp.errors import DONE


@dataclass(frozen=True)
class Result:
    """One row of the table. `passed` is None if the fault did not occur. `difference`: 0.0 for equal bits.

    note: how the fault was made, if another way than usual.
    """

    fault: str
    passed: bool | None
    cause: str = ""
    codes: tuple[int | None, ...] = ()
    steps_lost: int | None = None
    twice: int = 0  # samples
    never: int = 0
    difference: float | None = None
    rate: str = ""  # the learning rate at the first step after the resume, and what it was
    left: int = 0
    files_left: int = 0
    seconds_lost: float | None = None
    note: str = ""


def judge(
    fault: Fault, whole: Rehearsal, other: Rehearsal, again: Callable[[], Rehearsal]
) -> Result:
    """Compare a disturbed run with the undisturbed one. `again` makes a second undisturbed run."""
    if not other.fired:
        why = "the script ended before" if other.codes[-1] == DONE else last_error(other)
        why = other.note or why
        return Result(fault.name, None, f"did not occur: {why}", tuple(other.codes))
    ours, theirs = whole.recording, other.recording
    cause = cause_of(fault, whole, other)
    difference = None if fault.changes_ranks else _difference(ours, theirs)
    if not cause and not fault.changes_ranks and difference != 0.0:
        repeats = first_difference(whole, other) is None
        cause = UNNOTICED if fault.harm and repeats else state_cause(ours, theirs, repeats=repeats)
        # A script whose undisturbed runs differ as much is not to blame.
        allowed = 0.0 if cause or difference is None else _difference(ours, again().recording)
        if not cause and (difference is None or not allowed or difference > 4 * allowed):
            cause = _unequal(ours, theirs, difference, allowed)
    extra, missing = theirs.samples() - ours.samples(), ours.samples() - theirs.samples()
    at = theirs.resumed_from
    return Result(
        fault.name,
        not cause,
        cause,
        tuple(other.codes),
        steps_lost=None if at is None else theirs.reached - at,
        twice=0 if fault.changes_ranks else extra.total(),
        never=0 if fault.changes_ranks else missing.total(),
        difference=difference,
        rate=_rates(ours, theirs),
        left=other.left,
        files_left=len(_patterns(other) - _patterns(whole)),
        seconds_lost=other.seconds - whole.seconds,
        note=other.note,
    )


def judge_undisturbed(whole: Rehearsal) -> Result:
    """Whether the script can be drilled at all, and what shows without a fault."""
    recording = whole.recording
    cause = ""
    if whole.codes[-1] is None:
        cause = (
            "the undisturbed run did not end within --budget: end it after fewer steps, --steps N"
        )
    elif whole.codes[-1] != DONE:
        cause = f"the undisturbed run ended with code {whole.codes[-1]}: {last_error(whole)}"
    elif not recording.length:
        cause = "no step of a torch optimizer was seen"
    elif shared := _shared_file(recording):
        cause = f"{shared}: save on rank 0 alone"
    return Result("none", not cause, cause, tuple(whole.codes), left=whole.left)


def first_difference(whole: Rehearsal, other: Rehearsal) -> int | None:
    """The first step before the fault whose weights are not those of the undisturbed run; None if all are."""
    ours, theirs = whole.recording.ranks, other.recording.ranks
    if not theirs or len(theirs[0].attempts) == 0:
        return None
    attempt = theirs[0].attempts[0]
    pairs = zip(ours[0].steps, [*filter(None, [attempt.first]), *attempt.steps], strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a["weights"] != b["weights"]), None)


def _unequal(
    ours: Recording, theirs: Recording, difference: float | None, allowed: float | None
) -> str:
    if ours.length != theirs.length:
        return f"the resumed run ended after step {theirs.length}, the undisturbed one after {ours.length}"
    if difference and allowed:
        return (
            f"the weights at the end differ by {difference:.1e}, those of two undisturbed runs by "
            f"{allowed:.1e}"
        )
    pairs = zip(ours.ranks[0].steps, theirs.ranks[0].steps, strict=True)
    first = next((n for n, (a, b) in enumerate(pairs) if a["weights"] != b["weights"]), ours.length)
    return f"the weights differ from step {first} on, by a cause that was not recorded"


def _difference(ours: Recording, theirs: Recording) -> float | None:
    """0.0 for equal bits at the end of all ranks; else the largest relative difference of a tensor's norm."""
    if [*_ends(ours)] == [*_ends(theirs)]:
        return 0.0
    if ours.length != theirs.length or not theirs.ranks:
        return None
    a, b = ours.ranks[0].steps[-1]["norms"], theirs.ranks[0].steps[-1]["norms"]
    return max(
        (abs(x - y) / max(abs(x), abs(y), 1e-30) for x, y in zip(a, b, strict=False)), default=0.0
    ) or float.fromhex("0x1p-53")  # bits differ that no norm shows


def _ends(recording: Recording) -> Iterator[tuple[object, ...]]:
    for number, rank in enumerate(recording.ranks):
        end = rank.steps[-1] if rank.steps else {}
        # DDP sends rank 0's buffers to the others before each forward pass.
        buffers = end.get("buffers") if number == 0 else None
        yield len(rank.steps), end.get("weights"), end.get("optimizer"), buffers


def _rates(ours: Recording, theirs: Recording) -> str:
    at = theirs.resumed_from
    if at is None or at + 1 > ours.length or not theirs.ranks[0].attempts[-1].steps:
        return ""
    now = theirs.ranks[0].attempts[-1].steps[0]["rates"][0]
    was = ours.ranks[0].steps[at + 1]["rates"][0]
    return "as before" if now == was else f"{now:.3g}, was {was:.3g}"


def _shared_file(recording: Recording) -> str:
    """A sentence about a file that several ranks write."""
    writers: dict[str, set[int]] = {}
    for number, rank in enumerate(recording.ranks):
        for attempt in rank.attempts:
            for save in attempt.saves:
                if save["path"]:
                    writers.setdefault(save["path"], set()).add(number)
    for path, ranks in writers.items():
        if len(ranks) > 1:
            numbers = ", ".join(map(str, sorted(ranks)))
            return f"ranks {numbers} write into one file, {Path(path).name}"
    return ""


def _patterns(rehearsal: Rehearsal) -> set[str]:
    """The names of its files, with the same digit for each number."""
    return {without_numbers(file) for file in rehearsal.files}
