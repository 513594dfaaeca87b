"""From the records of two runs to pass or fail, with the cause in one sentence. Pure functions.

A resumed run passes if it ends with the bits of the undisturbed run. Otherwise the cause is the first step,
and the first entry of the state, that differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpiddp.drill.faults import Fault
from mpiddp.drill.history import RATE
from mpiddp.drill.rehearse import Rehearsal
from mpiddp.errors import DONE


@dataclass(frozen=True)
class Result:
    """One row of the table. `passed` is None if the fault did not occur, or if nothing could be compared.

    weights_equal: whether the bits of parameters, optimizer and buffers are equal at the end; None if they
    are not compared. steps_lost: None if it is unknown.
    """

    fault: str
    passed: bool | None
    cause: str = ""
    codes: tuple[int | None, ...] = ()
    steps_lost: int | None = None
    weights_equal: bool | None = None


def judge(undisturbed: Rehearsal, fault: Fault, disturbed: Rehearsal) -> Result:
    """Compare a disturbed run with the undisturbed one."""
    last = disturbed.ended[-1]
    if not disturbed.injected:
        why = "the script ended before" if last.code == DONE else last.error
        return Result(fault.name, None, f"did not occur: {why}", disturbed.codes)
    first, resume = disturbed.ranks[0].attempts[0].steps, disturbed.ranks[0].last_resume
    pairs = enumerate(zip(undisturbed.ranks[0].steps, first, strict=False))
    differs_from = next((n for n, (a, b) in pairs if a["weights"] != b["weights"]), None)
    is_compared = differs_from is None and not fault.fewer and last.code == DONE
    difference = _difference(undisturbed, disturbed) if is_compared else ""
    cause = _cause(fault, disturbed, difference)
    lost = None if resume is None else len(first) - 1 - resume
    equal = not difference if is_compared else None
    passed = None if differs_from is not None and not cause else not cause
    if passed is None:
        cause = (
            f"not compared: two runs without a fault differ from step {differs_from}. "
            "Call torch.manual_seed(0) before the model"
        )
    return Result(fault.name, passed, cause, disturbed.codes, lost, equal)


def judge_undisturbed(undisturbed: Rehearsal) -> Result:
    """Whether the script can be drilled at all, by its run without a fault."""
    [end] = undisturbed.ended
    cause = _shared_file(undisturbed)
    if end.code is None:
        cause = "the undisturbed run did not end within an hour: end it earlier, --steps N"
    elif end.code != DONE:
        cause = f"the undisturbed run ended with code {end.code}: {end.error}"
    elif not undisturbed.length:
        cause = "no step of a torch optimizer was seen"
    return Result("none", not cause, cause, undisturbed.codes)


def _cause(fault: Fault, disturbed: Rehearsal, difference: str) -> str:
    """The first fault of the resumed run, in a sentence; "" if it has none."""
    last, saved = disturbed.ended[-1], disturbed.saved_steps(slice(1))
    run = "the resumed run" if fault.ends else "the run"
    if last.code is None:
        return f"{run} did not end in time"
    if last.code != DONE:
        return f"{run} ended with code {last.code}: {last.error}"
    if not fault.ends and len(disturbed.ranks[0].attempts) > 1:
        return "the job has restarted, and had to go on"
    if fault.flips and difference:
        return f"the damaged checkpoint was taken: {difference}"
    if disturbed.ranks[0].last_resume == 0:
        return f"begins anew{f', although it had saved at step {saved[-1]}' if saved else ''}"
    return difference


def _difference(undisturbed: Rehearsal, resumed: Rehearsal) -> str:
    """Where the resumed run differs from the undisturbed one; "" if it ends with the same bits."""
    pairs = [(a.steps, b.steps) for a, b in zip(undisturbed.ranks, resumed.ranks, strict=True)]
    if all(expected[-1]["entries"] == actual[-1]["entries"] for expected, actual in pairs):
        return ""
    for number, (expected, actual) in enumerate(pairs):
        on_rank, at = f" on rank {number}" if number else "", resumed.ranks[number].last_resume or 0
        for step in range(at, min(len(expected), len(actual))):
            before, after = expected[step]["entries"], actual[step]["entries"]
            # The state before the first step of a process has no learning rate.
            names = [name for name in {**before, **after} if name != RATE or step > at]
            if name := next((name for name in names if before.get(name) != after.get(name)), ""):
                lacks = "" if name in after else ", which is missing"
                return f"differs from step {step}{on_rank}: first in {name}{lacks}"
    return f"ends after step {resumed.length}, the undisturbed run after step {undisturbed.length}"


def _shared_file(undisturbed: Rehearsal) -> str:
    """A sentence about a file that several ranks write."""
    writers: dict[str, list[str]] = {}
    for number, rank in enumerate(undisturbed.ranks):
        saves = (save["path"] for attempt in rank.attempts for save in attempt.saves)
        for path in {*saves} - {""}:
            writers.setdefault(path, []).append(str(number))
    for path, ranks in writers.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(ranks)} write one file, {Path(path).name}"
    return ""
