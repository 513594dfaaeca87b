"""Where the main thread of a rank is, by its stack, and how a sentence says it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpiddp.launch.monitor.ranks import Ranks, frames_of, main_frames

_NAMED = 4  # ranks of one place
_LONGEST_CODE = 60  # characters

# A rank waits for others in a collective, in torch's store, or where mpiddp's ranks agree. In a backward
# pass and at the end of a GPU's work it may wait or compute. Elsewhere in torch it computes.
_WAITS = re.compile(r"/torch/distributed/")
_MAY_WAIT = re.compile(r"/torch/autograd/graph\.py$|/torch/(cuda|xpu|accelerator)/")
_AGREES = re.compile(r"/mpiddp/runtime/job/")
_JOINS = re.compile(
    r"/(threading|concurrent/futures/\w+)\.py$"
)  # a thread that waits for another one
_DATA = re.compile(r"/torch/utils/data/|/mpiddp/train/(?:datasets|image_folder|cifar10)\.py")
_FILES = re.compile(r"/torch/serialization\.py$")
_OF_LIBRARIES = re.compile(
    r"^<frozen |/lib/python3|/torch/|/site-packages/|/dist-packages/|/mpiddp/runtime/"
)
_LINE = re.compile(r"line (\d+), in (.*)")
_WRAPPERS = ("wrapper", "_fn", "inner", "decorate_context")


class Place(NamedTuple):
    """Where the main thread of a rank is. Without frames, the rank does not answer."""

    frames: tuple[tuple[str, str, str], ...] = ()
    cpu_s: float = 0.0  # that the rank and the processes below it have used
    is_in_disk: bool = False  # the kernel waits for a disk, or a network file system
    runs: bool = False  # the main thread has a core

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        files = [frame[0] for frame in self.frames]
        if any(_DATA.search(file) or _FILES.search(file) for file in files):
            return False
        if any(map(_MAY_WAIT.search, files[-1:])):
            return not self.runs
        return any(map(_WAITS.search, files[-1:])) or any(map(_AGREES.search, files[-3:]))

    @property
    def loads_data(self) -> bool:
        return any(_DATA.search(frame[0]) for frame in self.frames)

    @property
    def text(self) -> str:
        """For a sentence: "all_reduce (train.py:88)", or "load (data.py:40): f = open(path)"."""
        if not self.frames:
            return ""
        own = [n for n, frame in enumerate(self.frames) if not _OF_LIBRARIES.search(frame[0])]
        at = own[-1] if own else len(self.frames) - 1
        file, where, code = self.frames[at]
        line, function = _line_of(where)
        called = [_line_of(frame[1])[1] for frame in self.frames[at + 1 :]]
        if self.waits:
            function = next((name for name in called if name not in _WRAPPERS), function)
        what = f"{function} ({file.rpartition('/')[2]}:{line})"
        return what if self.waits or not code else f"{what}: {code[:_LONGEST_CODE].rstrip(':,')}"


def places_of(ranks: Ranks) -> dict[int, Place]:
    """The places of the ranks that have not ended, by the stacks that they have sent."""
    left = [rank for rank in range(ranks.world_size) if rank not in ranks.done]
    return {rank: place_of(ranks.stacks.get(rank)) for rank in left}


def place_of(stacks: Mapping[str, Any] | None) -> Place:
    """The place by the stacks of a rank, a message "stacks"; None if it has sent none."""
    if stacks is None:
        return Place()
    return Place(
        tuple(_frames(stacks["text"])),
        stacks.get("cpu_s", 0.0),
        stacks.get("state") == "D",
        stacks.get("state") == "R",
    )


def _frames(text: str) -> list[tuple[str, str, str]]:
    """The main thread's frames, or those of the thread of the script for which the main thread waits."""
    main = main_frames(text)
    if not main or not _JOINS.search(main[-1][0]):
        return main
    others = [frames_of(each) for each in text.split("\nthread ") if "MainThread:" not in each[:20]]
    own = (each for each in others if each and not all(_OF_LIBRARIES.search(f) for f, _, _ in each))
    return next(own, main)


def _line_of(where: str) -> tuple[str, str]:
    """The number and the function of "line 3, in work"."""
    found = _LINE.match(where)
    return (found[1], found[2]) if found else ("?", where)


def places_sentence(ranks: Ranks, places: Mapping[int, Place]) -> str:
    """ "15 ranks wait in all_reduce (train.py:88); rank 11 on gpu03 is in load (data.py:40): open(path)."."""
    groups: dict[tuple[bool, bool, str], list[int]] = {}
    for rank, place in places.items():
        key = (not place.waits, bool(place.frames), place.text)
        groups.setdefault(key, []).append(rank)
    clauses = []
    for (is_outside, answers, text), members in sorted(
        groups.items(), key=lambda group: (group[0][0], -len(group[1]))
    ):
        is_one, who = len(members) == 1, _who(ranks, members)
        if not answers:
            do = "does not answer" if is_one else "do not answer"
            clauses.append(f"{who} {do}: stopped, or stuck in native code")
        elif is_outside:
            clauses.append(f"{who} {'is' if is_one else 'are'} in {text}")
        else:
            clauses.append(f"{who} {'waits' if is_one else 'wait'} in {text}")
    if finished := sorted(ranks.done):  # others may wait for them in vain
        clauses.append(
            f"{_who(ranks, finished)} {'has' if len(finished) == 1 else 'have'} finished"
        )
    return "; ".join(clauses) + "."


def _who(ranks: Ranks, members: Sequence[int]) -> str:
    return f"{len(members)} ranks" if len(members) > _NAMED else ", ".join(map(ranks.name, members))
