"""Why a resumed run is not the undisturbed one, and what to change: pure functions, one sentence each."""

from __future__ import annotations

import re

from mpiddp.drill.faults import Fault
from mpiddp.drill.records import History, Recording, State
from mpiddp.drill.rehearse import Rehearsal
from mpiddp.errors import BAD_INPUT, DONE

_DAMAGED = re.compile(
    r"PytorchStreamReader|failed finding central directory|EOFError|UnpicklingError: (pickle|invalid)|"
    r"unexpected EOF|is truncated|zip archive"
)
_ERROR = re.compile(r"^(?:\[rank \d+[^\]]*\] )?((?:[\w.]+\.)?\w*(?:Error|Exception): .*)", re.M)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PHRASE_LENGTH = 160


UNNOTICED = (
    "the damage was loaded without an error: keep a checksum beside the checkpoint, as "
    "mpiddp.Checkpoints does"
)


def cause_of(fault: Fault, whole: Rehearsal, other: Rehearsal) -> str:
    """What is wrong whatever the weights are at the end; "" if nothing is."""
    ours, theirs = whole.recording, other.recording
    if other.left:
        return f"processes of the job remained after its end: {other.left}"
    if any(save["in_handler"] for save in theirs.saves):
        return (
            "the script saves within its signal handler, in the middle of a step: let the handler set a "
            "flag, and save at the end of the step"
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
    # A script whose first weights are others each time resumes from no known step, also if it begins anew.
    begins_anew = theirs.resumed_from == 0 or (theirs.resumed_from is None and not whole.files)
    if not ours.saves and begins_anew:
        return f"no checkpoint was written within {ours.length} steps: nothing survives"
    points = [rank.last_resume for rank in theirs.ranks]
    if not fault.changes_ranks and len(points) > 1 and len(set(points)) > 1:
        shown = ", ".join(f"rank {n} from step {at}" for n, at in enumerate(points))
        return (
            f"the ranks resume from different states ({shown}): load the checkpoint on every rank"
        )
    if other.codes[-1] != DONE:
        return _failed_resume(fault, other)
    if theirs.ranks[0].resumed_from and points[0] is None:
        return (
            UNNOTICED if fault.harm else "the weights at the resume are those of no step of the run"
        )
    if theirs.resumed_from == 0 and (saved := theirs.saved_before_fault(ours)):
        return (
            f"the run begins anew, although it had saved at step {max(saved)}: load "
            "the newest checkpoint at the start"
        )
    return ""


def state_cause(ours: Recording, theirs: Recording, *, repeats: bool) -> str:
    """The first state of rank 0, or of another, that is not what it was at the step of the resume.

    `repeats`: whether two undisturbed runs agree. If not, they have other samples and random numbers anyway.
    """
    for number, (whole, rank) in enumerate(zip(ours.ranks, theirs.ranks, strict=False)):
        at, last = rank.last_resume, rank.attempts[-1]
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
        if repeats and sorted(now["samples"]) != sorted(then["samples"]):
            return _order_cause(whole, at, now)
        if repeats and now["random"] != then["random"]:
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


def _failed_resume(fault: Fault, other: Rehearsal) -> str:
    code = other.codes[-1]
    if code is None:
        return "the resumed run did not end in time"
    error = last_error(other)
    how = f"the resumed run ended with code {code}: {error}"
    if "Weights only load failed" in other.said[-1]:
        return f"{how}: save tensors, numbers and strings alone, or name your classes to torch.load"
    if fault.is_of_save:
        return f"the checkpoint is torn ({error}): write into a file beside it, then os.replace"
    if fault.harm is not None and _DAMAGED.search(other.said[-1]):
        return f"{how}: keep two checkpoints, and use the older one if the newest cannot be read"
    return how


def last_error(other: Rehearsal) -> str:
    said = _COLOUR.sub("", other.said[-1])
    lines = [line for line in said.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("mpiddp: ")]
    others = [line for line in lines if line not in ours]
    if other.codes[-1] == BAD_INPUT:
        ours = others[-1:]  # a rank refuses its input; what the launcher said before is no error
    errors = _ERROR.findall(said) or ours or lines[-1:]
    text = (errors or ["it printed no error"])[0].removeprefix("mpiddp: ").strip()
    return text if len(text) <= _PHRASE_LENGTH else f"{text[:_PHRASE_LENGTH]}…"
