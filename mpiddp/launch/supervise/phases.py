"""The phases of an attempt, and what may happen in them. `Attempt._TABLE` says what each event does."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """What the ranks are doing. An attempt only moves on, never back."""

    STARTING = 0  # none has started
    JOINING = 1  # some have not joined the job
    RUNNING = 2  # all have joined. With `--grow` they may be asked to stop after their present step
    STOPPING = 3  # the user has asked them to stop
    SAVING = 4  # they have made their last step, and save
    ENDING = 5  # they are being ended


class Event(Enum):
    """What the ranks, the user and the clock do."""

    STARTED = auto()  # a rank has started
    FIRST_JOINED = auto()
    ALL_JOINED = auto()
    LAST_STEP = auto()  # a rank has made its last step before a stop
    FAILED = auto()  # a rank has failed, or its connection has ended
    HOST_LOST = auto()  # a rank's host has stopped answering
    ALL_LEFT = auto()  # no rank is connected any more
    STOP = auto()  # the user's first request
    SECOND_STOP = auto()
    HOST_FOUND = auto()  # it can join the job
    START_TIMEOUT = auto()
    START_STACKS = auto()  # all stacks are there, for a sentence about ranks of which none joins
    JOIN_TIMEOUT = auto()
    JOIN_STACKS = auto()  # all stacks are there, for the report of the ranks that have not joined
    SEE_STEPS = auto()
    HANG_STACKS = auto()  # all stacks are there, for a look at a quiet job
    LOOK_STACKS = auto()  # all stacks are there, for a look at ranks that make steps
    VIEW_STACKS = auto()  # all stacks are there, for a viewer
    STACKS_LATE = auto()
    STACKS_OVER = auto()
    SEE_GRACE = auto()
    ACCEPT_AGAIN = auto()
    END_RANKS = auto()
    END_MPIRUN = auto()
    KILL = auto()
