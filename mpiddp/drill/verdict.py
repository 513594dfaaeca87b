"""From what was recorded to pass or fail, with the cause in one sentence and what to change. Pure functions.

A resumed run passes if it ends with the bits of the undisturbed one. Only then does it not matter how it got
there; otherwise the first sentence of `_causes` names the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpiddp.drill.faults import Fault
from mpiddp.drill.records import History, Recording, State
from mpiddp.drill.rehearse import Ended, Rehearsal
from mpiddp.errors import BAD_INPUT, DONE
from mpiddp.explain.explain import VERDICT

_DAMAGED = re.compile(
    r"PytorchStreamReader|failed finding central directory|EOFError|UnpicklingError: (pickle|invalid)|"
    r"unexpected EOF|is truncated|zip archive|Weights only load failed"
)
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
    all are. weights_equal: the bits of parameters, optimizer and buffers at the end. checkpoint_lost: the run
    resumed from an older step than that of its newest save.
    """

    fault: str
    passed: bool | None
    cause: str = ""
    codes: tuple[int | None, ...] = ()
    differs_from: int | None = None
    steps_lost: int | None = None
    checkpoint_lost: bool | None = None
    weights_equal: bool | None = None
    leftover_processes: int = 0


@dataclass(frozen=True)
class _Case:
    """What the undisturbed run has recorded (`before`), and the run that a fault has hit (`after`)."""

    fault: Fault
    before: Recording
    after: Recording
    ended: list[Ended]  # the first command, and the resume

    @property
    def at(self) -> int | None:
        """The step from which rank 0 resumed last."""
        return self.after.ranks[0].last_resume

    @property
    def differs_from(self) -> int | None:
        """If None, a resumed run should end with the same bits."""
        if self.fault.fewer_ranks_first:
            return None
        attempt = self.after.ranks[0].attempts[0]
        states = [*filter(None, [attempt.first]), *attempt.steps]
        return _first_difference(self.before.ranks[0].steps, states)

    @property
    def is_comparable(self) -> bool:
        return not self.fault.changes_ranks and self.differs_from is None

    @property
    def weights_equal(self) -> bool | None:
        return [*_ends(self.before)] == [*_ends(self.after)] if self.is_comparable else None


def judge(undisturbed: Rehearsal, fault: Fault, disturbed: Rehearsal) -> Result:
    """Compare a disturbed run with the undisturbed one."""
    last = disturbed.ended[-1]
    if not disturbed.injected:
        why = "the script ended before" if last.code == DONE else last_error(last)
        return Result(fault.name, None, f"did not occur: {why}", disturbed.codes)
    case = _Case(fault, undisturbed.recording, disturbed.recording, disturbed.ended)
    cause, at, saved = next(_causes(case), ""), case.at, case.after.saved_before_fault
    return Result(
        fault.name,
        not cause,
        cause,
        disturbed.codes,
        differs_from=case.differs_from,
        steps_lost=None if at is None else case.after.reached - at,
        checkpoint_lost=None if at is None or not saved else at < max(saved),
        weights_equal=case.weights_equal,
        leftover_processes=disturbed.leftover,
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
    elif shared := _shared_file(recording):
        cause = f"{shared}: save on rank 0 alone"
    leftover = undisturbed.leftover
    return Result("none", not cause, cause, undisturbed.codes, leftover_processes=leftover)


def _causes(case: _Case) -> Iterator[str]:
    """What is wrong, each in a sentence; the first one is the cause of the others."""
    before, after = case.before, case.after
    yield from _habits(case)
    yield from _resume(case)
    if not case.weights_equal and not case.fault.changes_ranks:
        for rank, histories in enumerate(zip(before.ranks, after.ranks, strict=False)):
            yield from _state(rank, *histories, case.is_comparable)
    if case.weights_equal is False and before.length != after.length:
        ends = f"the resumed run ended after step {after.length}"
        yield f"{ends}, the undisturbed one after {before.length}"
    elif case.weights_equal is False:
        first = _first_difference(before.ranks[0].steps, after.ranks[0].steps)
        step = before.length if first is None else first
        yield f"the weights differ from step {step} on, by a cause that was not recorded"


def _habits(case: _Case) -> Iterator[str]:
    """What is wrong whatever the weights are at the end."""
    firsts = [rank.attempts[-1].first for rank in case.after.ranks]
    is_cut = case.fault.is_request and case.ended[0].code != DONE
    if leftover := sum(each.leftover for each in case.ended):
        yield f"processes of the job remained after its end: {leftover}"
    if any(save["in_handler"] for save in case.after.saves):
        yield (
            "the script saves within its signal handler, in the middle of a step: let the handler set a "
            "flag, and save at the end of the step"
        )
    if any(first is not None and not first["is_of_model"] for first in firsts):
        yield (
            "the optimizer updates tensors that are no longer the model's: load the weights in place, or "
            "create the optimizer after the model"
        )
    if is_cut and "DataLoader worker" in case.ended[0].said:
        yield (
            "the signal ended a DataLoader worker before its rank could save: leave SIGTERM alone in "
            "worker_init_fn, and let the rank decide"
        )


def _resume(case: _Case) -> Iterator[str]:
    """What is wrong with the resume as a whole."""
    fault, before, after, last = case.fault, case.before, case.after, case.ended[-1]
    at, saved = case.at, after.saved_before_fault
    # A script whose first weights are others each time resumes from no known step, also if it begins anew.
    failed = at is None and last.code != DONE
    if not before.saves and not at and not failed:
        yield f"no checkpoint was written within {before.length} steps: nothing survives"
    points = [rank.last_resume for rank in after.ranks]
    if len(set(points)) > 1 and not fault.changes_ranks:
        shown = ", ".join(f"rank {n} from step {at}" for n, at in enumerate(points))
        yield f"the ranks resume from different states ({shown}): load the checkpoint on every rank"
    if last.code is None:
        yield "the resumed run did not end in time"
    elif last.code != DONE:
        yield _failed_resume(fault, last)
    if at == 0 and saved:
        yield (
            f"the run begins anew, although it had saved at step {max(saved)}: load the newest checkpoint "
            "at the start"
        )
    is_unknown = at is None and after.ranks[0].has_resumed
    if fault.damage is not None and (is_unknown or case.weights_equal is False):
        yield (
            "the damage was loaded without an error: keep a checksum beside the checkpoint, as "
            "mpiddp.Checkpoints does"
        )
    if is_unknown:
        yield "the weights at the resume are those of no step of the run"


def _failed_resume(fault: Fault, last: Ended) -> str:
    error = last_error(last)
    how = f"the resumed run ended with code {last.code}: {error}"
    if fault.damage is not None and _DAMAGED.search(last.said):
        return f"{how}: keep two checkpoints, and use the older one if the newest cannot be read"
    if "Weights only load failed" in last.said:
        return f"{how}: save tensors, numbers and strings alone, or name your classes to torch.load"
    if fault.is_of_save:
        return f"the checkpoint is torn ({error}): write into a file beside it, then os.replace"
    return how


def _state(rank: int, before: History, after: History, repeats: bool) -> Iterator[str]:
    """The state of a rank that is not what it was at the step of the resume.

    `repeats`: whether both runs had the same weights. If not, they have other samples anyway.
    """
    at, last = after.last_resume, after.attempts[-1]
    if at is None or last.first is None or at + 1 >= len(before.steps) or not last.steps:
        return
    saved, first, then, now = after.steps[at], last.first, before.steps[at + 1], last.steps[0]
    if first["optimizer"] != saved["optimizer"] and at:
        lacks = "is not in the checkpoint" if not first["optimizer"] else "is another one"
        yield f"rank {rank}'s optimizer state {lacks}: save and load optimizer.state_dict()"
    if now["rates"] != then["rates"]:
        yield _rate_cause(before, at, now)
    if rank == 0 and first["buffers"] != saved["buffers"]:
        yield (
            "the model's buffers, such as BatchNorm's statistics, are not in the checkpoint: save "
            "model.state_dict() and not its parameters alone"
        )
    if repeats and sorted(now["samples"]) != sorted(then["samples"]):
        yield _order_cause(before, at, now)
    if repeats and now["random"] != then["random"]:
        yield (
            "the random numbers after the resume are not those that would have come: save and restore "
            "torch.get_rng_state(), and those of random and numpy, for each rank"
        )


def _rate_cause(before: History, at: int, now: State) -> str:
    rates, found = [step["rates"][0] for step in before.steps[1:]], now["rates"][0]
    facts = f"learning rate {found:.3g} at the first step after the resume, was {rates[at]:.3g}"
    if rates[0] == found and rates[0] < max(rates[: at + 1]):
        return f"the warm-up begins anew ({facts}): save and load the scheduler, or use the step's number"
    return f"the scheduler is not in the checkpoint ({facts}): save and load scheduler.state_dict()"


def _order_cause(before: History, at: int, now: State) -> str:
    earlier = [sorted(step["samples"]) for step in before.steps[1:]]
    samples = sorted(now["samples"])
    if samples not in earlier[:at]:
        return (
            "the samples after the resume are others: save the seed of the order, the epoch and the position "
            "in it"
        )
    number, length = earlier.index(samples) + 1, _steps_of_epoch(earlier)
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
        if seen.intersection(samples):
            return number
        seen.update(samples)
    return len(steps)


def _first_difference(some: list[State], others: list[State]) -> int | None:
    """The first step whose weights are not the same bits in both."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((n for n, (a, b) in pairs if a["weights"] != b["weights"]), None)


def _ends(recording: Recording) -> Iterator[tuple[object, ...]]:
    for number, rank in enumerate(recording.ranks):
        end = rank.steps[-1] if rank.steps else {}
        # DDP sends rank 0's buffers to the others before each forward pass.
        buffers = end.get("buffers") if number == 0 else None
        yield len(rank.steps), end.get("weights"), end.get("optimizer"), buffers


def _shared_file(recording: Recording) -> str:
    """A sentence about a file that several ranks write."""
    writers: dict[str, list[str]] = {}
    for number, rank in enumerate(recording.ranks):
        for path in {save["path"] for attempt in rank.attempts for save in attempt.saves} - {""}:
            writers.setdefault(path, []).append(str(number))
    shared = ((path, ranks) for path, ranks in writers.items() if len(ranks) > 1)
    path, ranks = next(shared, ("", []))
    return path and f"ranks {', '.join(ranks)} write into one file, {Path(path).name}"


def last_error(end: Ended) -> str:
    """The error that a command has printed: of Python, of mpiddp, or else its last line."""
    said = _COLOUR.sub("", end.said)
    lines = [line for line in said.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("mpiddp: ")]
    if end.code == BAD_INPUT:
        # A rank refuses its input; what the launcher said before is no error.
        ours = [line for line in lines if line not in ours][-1:]
    verdicts = [line for line in ours if VERDICT.fullmatch(line)] or ours[-1:]
    errors = _ERROR.findall(said) or verdicts or lines[-1:] or ["it printed no error"]
    text = errors[0].removeprefix("mpiddp: ").strip().rstrip(".")
    return text if len(text) <= _PHRASE_LENGTH else f"{text[:_PHRASE_LENGTH]}…"
