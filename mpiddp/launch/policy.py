"""The restart policy: what follows an attempt, and when, by the verdicts on the attempts' records so far."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED
from mpiddp.launch.events import Stop
from mpiddp.launch.outcome import Outcome

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Move(Enum):
    """What the job does next."""

    END = auto()
    RESTART = auto()  # because of a failure that counts
    GROW = auto()  # restart on more hosts
    SHRINK = auto()  # return to the hosts that it had before it grew


def next_move(
    latest: Outcome, failures: Sequence[Outcome], max_restarts: int, *, has_grown: bool
) -> Move:
    """What follows the latest outcome, after these failures that count.

    `has_grown`: it has made no step since there are more hosts.
    """
    if latest.stop >= Stop.BY_USER or latest.code in (DONE, INTERRUPTED):
        return Move.END
    if latest.stop is Stop.TO_GROW:
        return Move.GROW
    if has_grown and latest.code in (FAILED, BAD_INPUT):
        return Move.SHRINK
    is_left = latest.code == FAILED and len(failures) < max_restarts
    return Move.RESTART if is_left else Move.END


def pause_s(failures: Sequence[Outcome]) -> float:
    """The pause before the restart after the last of these failures.

    The first restart begins at once. The pause doubles with each failure that follows another without a step
    between them.
    """
    in_a_row = 0
    for failure in failures:
        in_a_row = 1 if failure.made_steps else in_a_row + 1
    doubled = FIRST_PAUSE_S * 2 ** min(in_a_row - 2, 10)
    return min(doubled, LONGEST_PAUSE_S) if in_a_row > 1 else 0.0
