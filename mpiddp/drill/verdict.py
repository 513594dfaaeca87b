"""From what was recorded to pass or fail, with the cause in one sentence and what to change. Pure functions.

A resumed run passes if it ends with the bits of the undisturbed one. Only then does it not matter how it got
there; otherwise the first thing that differs at the first step after the resume is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mpiddp.drill.faults import Fault
from mpiddp.drill.records import History, Recording, State
from mpiddp.drill.rehearse import Rehearsal
from mpiddp.errors import DONE

_DAMAGED = re.compile(
    r"PytorchStreamReader|failed finding central directory|EOFError|UnpicklingError: (pickle|invalid)|"
    r"unexpected EOF|is truncated|zip archive"
)
_ERROR = re.compile(r"^(?:\[rank \d+[^\]]*\] )?((?:[\w.]+\.)?\w*(?:Error|Exception): .*)", re.M)
_PHRASE_LENGTH = 160


@dataclass(frozen=True)
class Result:
    """One row of the table. `passed` is None if the fault did not occur. `difference`: 0.0 for equal bits."""

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


def judge(
    fault: Fault, whole: Rehearsal, other: Rehearsal, again: Callable[[], Rehearsal]
) -> Result:
    """Compare a disturbed run with the undisturbed one. `again` makes a second undisturbed run."""
    if not other.fired:
        why = "the script ended before" if other.codes[-1] == DONE else _last_error(other)
        if fault.act.endswith("in save") and not whole.recording.saves:
            why = "no call of torch.save was seen"
        return Result(fault.name, None, f"did not occur: {why}", tuple(other.codes))
    ours, theirs = whole.recording, other.recording
    cause = _cause(fault, whole, other)
    difference = None if fault.changes_ranks else _difference(ours, theirs)
    if not cause and difference:
        allowed = _difference(ours, again().recording)
        if not allowed or difference > 4 * allowed:
            cause = _unequal(whole, other)
    extra, missing = theirs.samples() - ours.samples(), ours.samples() - theirs.samples()
    at = _resumed_from(theirs)
    return Result(
        fault.name,
        not cause,
        cause,
        tuple(other.codes),
        steps_lost=None if at is None else _reached(theirs) - at,
        twice=0 if fault.changes_ranks else extra.total(),
        never=0 if fault.changes_ranks else missing.total(),
        difference=difference,
        rate=_rates(ours, theirs),
        left=other.left,
        files_left=len({_pattern(each) for each in other.files - whole.files} - _known(whole)),
        seconds_lost=other.seconds - whole.seconds,
    )


def judge_undisturbed(whole: Rehearsal, last: int) -> Result:
    """Whether the script can be drilled at all, and what shows without a fault."""
    recording = whole.recording
    cause = ""
    if whole.codes[-1] != DONE:
        cause = f"the undisturbed run ended with code {whole.codes[-1]}: {_last_error(whole)}"
    elif not recording.length:
        cause = "no step of a torch optimizer was seen"
    elif shared := _shared_file(recording):
        cause = f"{shared}: save on rank 0 alone"
    elif last and recording.length < last:
        cause = ""
    return Result("none", not cause, cause, tuple(whole.codes), left=whole.left)


def _cause(fault: Fault, whole: Rehearsal, other: Rehearsal) -> str:
    """What is wrong, before any comparison of the end; "" if nothing is."""
    ours, theirs = whole.recording, other.recording
    if other.left:
        return f"processes of the job remained after its end: {other.left}"
    if any(save["in_handler"] for save in theirs.saves):
        return (
            "the script saves within its signal handler, in the middle of a step: let the handler set a flag, "
            "and save at the end of the step"
        )
    lasts = [rank.attempts[-1].first for rank in theirs.ranks]
    if not all(first is None or first["is_of_model"] for first in lasts):
        return (
            "the optimizer updates tensors that are no longer the model's: load the weights in place, or "
            "create the optimizer after the model"
        )
    error = other.said[0]
    if fault.is_request and "DataLoader worker" in error and other.codes[0] != DONE:
        return (
            "the signal ended a DataLoader worker before its rank could save: leave SIGTERM alone in "
            "worker_init_fn, and let the rank decide"
        )
    if not ours.saves and _begins_anew(theirs):
        return f"no checkpoint was written within {ours.length} steps: nothing survives"
    points = [_last_resume(rank) for rank in theirs.ranks]
    if not fault.changes_ranks and len(points) > 1 and len(set(points)) > 1:
        shown = ", ".join(f"rank {n} from step {_text(at)}" for n, at in enumerate(points))
        return (
            f"the ranks resume from different states ({shown}): load the checkpoint on every rank"
        )
    if other.codes[-1] != DONE:
        return _failed_resume(fault, other)
    if points and points[0] is None and _has_resumed(theirs):
        if fault.name == "flip":
            return (
                "the flipped bit was loaded without an error: keep a checksum beside the checkpoint, as "
                "mpiddp.Checkpoints does"
            )
        return "the weights at the resume are those of no step of the run"
    if _begins_anew(theirs) and _saved_before(theirs):
        return (
            f"the run begins anew, although it had saved at step {max(_saved_before(theirs))}: load the newest "
            "checkpoint at the start"
        )
    if fault.changes_ranks:
        return ""
    return "" if _difference(ours, theirs) == 0.0 else _state_cause(ours, theirs)


def _state_cause(ours: Recording, theirs: Recording) -> str:
    """The first state of rank 0, or of another, that is not what it was at the step of the resume."""
    for number, (whole, rank) in enumerate(zip(ours.ranks, theirs.ranks, strict=False)):
        at, last = _last_resume(rank), rank.attempts[-1]
        if at is None or last.first is None or at + 1 >= len(whole.steps) or not last.steps:
            continue
        saved, first, then, now = rank.steps[at], last.first, whole.steps[at + 1], last.steps[0]
        if first["optimizer"] != saved["optimizer"] and at:
            lacks = "is not in the checkpoint" if not first["optimizer"] else "is another one"
            return f"rank {number}'s optimizer state {lacks}: save and load optimizer.state_dict()"
        if now["rates"] != then["rates"]:
            return _rate_cause(whole, at, now)
        if number == 0 and first["buffers"] != saved["buffers"]:
            return (
                "the model's buffers, such as BatchNorm's statistics, are not in the checkpoint: save "
                "model.state_dict() and not its parameters alone"
            )
        if sorted(now["samples"]) != sorted(then["samples"]):
            return _order_cause(whole, at, now)
        if now["random"] != then["random"]:
            return (
                "the random numbers after the resume are not those that would have come: save and restore "
                "torch.get_rng_state(), and those of random and numpy, for each rank"
            )
    return ""


def _rate_cause(whole: History, at: int, now: State) -> str:
    rates = [step["rates"][0] for step in whole.steps[1:]]
    was, found = rates[at], now["rates"][0]
    facts = f"learning rate {found:.3g} at the first step after the resume, was {was:.3g}"
    if rates[0] == found and rates[0] < max(rates[: at + 1]):
        return f"the warm-up begins anew ({facts}): save and load the scheduler, or use the step's number"
    return f"the scheduler is not in the checkpoint ({facts}): save and load scheduler.state_dict()"


def _order_cause(whole: History, at: int, now: State) -> str:
    earlier = [sorted(step["samples"]) for step in whole.steps[1:]]
    length = _steps_of_epoch(earlier)
    if sorted(now["samples"]) not in earlier[:at]:
        return (
            "the samples after the resume are others: save the seed of the order, the epoch and the position "
            "in it"
        )
    number = earlier.index(sorted(now["samples"])) + 1
    if number <= length and at >= length and (at + 1 - number) % length == 0:
        return "the resumed run repeats epoch 0's order: call sampler.set_epoch with the epoch's number"
    return (
        f"the resumed run reads the samples of step {number} again: save the position in the epoch, and skip "
        "the batches before it"
    )


def _steps_of_epoch(steps: list[list[int]]) -> int:
    """The steps before the first sample that comes again."""
    seen: set[int] = set()
    for number, samples in enumerate(steps):
        if seen & set(samples):
            return number
        seen.update(samples)
    return len(steps)


def _unequal(whole: Rehearsal, other: Rehearsal) -> str:
    ours, theirs = whole.recording, other.recording
    if ours.length != theirs.length:
        return f"the resumed run ended after step {theirs.length}, the undisturbed one after {ours.length}"
    pairs = zip(ours.ranks[0].steps, theirs.ranks[0].steps, strict=True)
    first = next((n for n, (a, b) in enumerate(pairs) if a["weights"] != b["weights"]), ours.length)
    return f"the weights differ from step {first} on, by a cause that was not recorded"


def _failed_resume(fault: Fault, other: Rehearsal) -> str:
    code = other.codes[-1]
    if code is None:
        return "the resumed run did not end in time"
    error = _last_error(other)
    how = f"the resumed run ended with code {code}: {error}"
    if "Weights only load failed" in other.said[-1]:
        return f"{how}: save tensors, numbers and strings alone, or name your classes to torch.load"
    if fault.act == "kill in save" or fault.act == "full in save":
        return f"the checkpoint is torn ({error}): write into a file beside it, then os.replace"
    if fault.harm is not None and _DAMAGED.search(other.said[-1]):
        return f"{how}: keep two checkpoints, and use the older one if the newest cannot be read"
    return how


def _last_error(other: Rehearsal) -> str:
    said = other.said[-1]
    ours = [line for line in said.splitlines() if line.startswith("mpiddp: ")]
    errors = _ERROR.findall(said) or ours
    text = (errors or ["it printed no error"])[0].removeprefix("mpiddp: ").strip()
    return text if len(text) <= _PHRASE_LENGTH else f"{text[:_PHRASE_LENGTH]}…"


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


def _has_resumed(theirs: Recording) -> bool:
    return bool(theirs.ranks) and bool(theirs.ranks[0].resumed_from)


def _last_resume(rank: History) -> int | None:
    return rank.resumed_from[-1] if rank.resumed_from else None


def _resumed_from(theirs: Recording) -> int | None:
    return _last_resume(theirs.ranks[0]) if theirs.ranks else None


def _begins_anew(theirs: Recording) -> bool:
    return _resumed_from(theirs) == 0


def _saved_before(theirs: Recording) -> list[int]:
    saves = [save["step"] for rank in theirs.ranks for save in rank.attempts[0].saves]
    return [step for step in saves if step < _reached(theirs)]


def _reached(theirs: Recording) -> int:
    """The steps of the first attempt of rank 0."""
    return len(theirs.ranks[0].attempts[0].steps)


def _rates(ours: Recording, theirs: Recording) -> str:
    at = _resumed_from(theirs)
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
    shared = next((path for path, ranks in writers.items() if len(ranks) > 1), "")
    name = shared.rpartition("/")[2]
    return (
        f"ranks {', '.join(map(str, sorted(writers[shared])))} write into one file, {name}"
        if shared
        else ""
    )


def _text(at: int | None) -> str:
    return "unknown" if at is None else str(at)


def _pattern(file: str) -> str:
    return re.sub(r"\d+", "0", file)


def _known(whole: Rehearsal) -> set[str]:
    return {_pattern(each) for each in whole.files}
