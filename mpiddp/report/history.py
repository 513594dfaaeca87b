"""The starts of a run, from its ranks' logs and its saves: how each ended, and what a restart cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mpiddp.report.rank_files import Failure, RankFiles


@dataclass(frozen=True)
class Save:
    step: int
    at: float  # seconds since 1970


@dataclass(frozen=True)
class Start:
    """One start of the run's rank 0. The times are in seconds since 1970.

    None stands for what no file tells, as after the loss of a host, and in the first start for `cause`,
    `repeated_s` and `idle_s`.
    """

    begins: float
    ends: float | None
    outcome: str  # "done", "failed" or ""
    failure: str  # that of the first rank to fail; "" if it left no sentence
    step: int | None  # of the newest save before it: there its records begin
    cause: str | None  # why the start before ended
    repeated_s: float | None  # the work of the start before since that save
    idle_s: float | None  # nothing ran since the start before


def starts_of(ranks: Sequence[RankFiles], saves: Sequence[Save], last_sign: float) -> list[Start]:
    """The starts of rank 0.

    Args:
        saves: those that are left, by step.
        last_sign: when the run last wrote. The last start ended there, if nothing else tells.
    """
    own = next((each.attempts for each in ranks if each.rank == 0), [])
    failures = sorted((each for rank in ranks for each in rank.failures), key=nearest_first)
    starts: list[Start] = []
    for attempt, until in zip_longest(own, [each.begins for each in own[1:]]):
        first = next((each for each in failures if _is_within(each, attempt.begins, until)), None)
        # A rank 0 that was killed ended when the first other rank failed, if one did.
        ends = attempt.ends or (first.at if first else None)
        if ends is None and until is None:
            ends = max(last_sign, attempt.begins)
        outcome = attempt.outcome or ("failed" if first else "")
        failure = first.sentence if first and not first.is_consequence else ""
        earlier = [save for save in saves if save.at < attempt.begins]
        step = earlier[-1].step if earlier else None if starts else 0
        lost = _lost(starts[-1], earlier, attempt.begins) if starts else (None, None, None)
        starts.append(Start(attempt.begins, ends, outcome, failure, step, *lost))
    return starts


def nearest_first(failure: Failure) -> tuple[bool, float]:
    """A key that sorts the nearest to the root cause first: by time, consequences last."""
    return failure.is_consequence, float("inf") if failure.at is None else failure.at


def _is_within(failure: Failure, begins: float, until: float | None) -> bool:
    return failure.at is not None and begins <= failure.at < (until or float("inf"))


def _lost(
    before: Start, saves: Sequence[Save], begins: float
) -> tuple[str, float | None, float | None]:
    """Why a start ended, the work that the next one repeats, and the time until it begins."""
    told = {"done": "a stop", "failed": "a rank ended without a word", "": "not known"}
    cause = before.failure or told[before.outcome]
    if before.ends is None:
        return cause, None, None
    saved = saves[-1].at if saves and saves[-1].at >= before.begins else None
    repeated = None if saved is None else max(0.0, before.ends - saved)
    return cause, repeated, max(0.0, begins - before.ends)
