"""Where a rank is, by the stack that it has sent: whether it waits for others, and its line of the script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_LONGEST_CODE = 60  # characters
_BUSY = 0.2  # of a core: on a crowded host, a rank that computes has a small part of one

# The folder of this package, the same on every host, and the programs in it that ranks run as scripts.
_PACKAGE = f"{Path(__file__).parents[1]}/"
_PROGRAMS = tuple(f"{_PACKAGE}{room}/" for room in ("bench", "doctor", "train"))
# A rank waits for others in a collective, in torch's store, or where mpiddp's ranks agree. In a backward
# pass and at the end of a GPU's work it may wait or compute. Elsewhere in torch it computes.
_WAITS = re.compile(r"/torch/distributed/")
_MAY_WAIT = re.compile(r"/torch/autograd/graph\.py$|/torch/(cuda|xpu|accelerator)/")
_AGREES = re.compile(rf"^{re.escape(_PACKAGE)}runtime/job/")
_JOINS = re.compile(r"/(threading|concurrent/futures/\w+)\.py$")  # waits for another thread
_DATA_OR_FILES = re.compile(
    rf"/torch/utils/data/|^{re.escape(_PACKAGE)}train/(?:data|folder|cifar10)\.py"
    r"|/torch/serialization\.py$"
)
_OF_LIBRARIES = re.compile(r"^<frozen |/lib/python3|/torch/|/site-packages/|/dist-packages/")
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in (.*)(?:\n    (.*))?', re.MULTILINE)
_WRAPPERS = ("wrapper", "_fn", "inner", "decorate_context", "__enter__", "__exit__")


@dataclass(frozen=True)
class Place:
    """Where the main thread of a rank is. Without frames, the rank does not answer."""

    # A file, a line, a function, its code; the outermost first.
    frames: Sequence[tuple[str, str, str, str]] = ()
    cpu_s: float = 0.0  # that the rank and the processes below it have used
    state: str = ""  # of the main thread, as in /proc: "D" waits for a disk, "R" has a core

    @cached_property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        files = [frame[0] for frame in self.frames]
        if any(map(_DATA_OR_FILES.search, files)):
            return False
        if any(map(_MAY_WAIT.search, files[-1:])):
            return self.state != "R"
        return any(map(_WAITS.search, files[-1:])) or any(map(_AGREES.search, files[-3:]))

    def is_busy(self, before: Place, seconds: float) -> bool:
        """Whether the rank computes, where it was `seconds` ago."""
        return self.state == "R" or self.cpu_s - before.cpu_s >= _BUSY * seconds

    @cached_property
    def _own(self) -> int:
        """The innermost frame of the script."""
        own = [n for n, frame in enumerate(self.frames) if not _is_library(frame[0])]
        return own[-1] if own else len(self.frames) - 1

    @property
    def function(self) -> str:
        """Of the script, "" if the rank does not answer."""
        return self.frames[self._own][2] if self.frames else ""

    @property
    def text(self) -> str:
        """For a sentence: "all_reduce (train.py:88)", or "load (data.py:40): f = open(path)"."""
        file, line, function, code = self.frames[self._own]
        if self.waits:
            called = [frame[2] for frame in self.frames[self._own + 1 :]]
            function = next((name for name in called if name not in _WRAPPERS), function)
        what = f"{function} ({file.rpartition('/')[2]}:{line})"
        code = code.rstrip(":,.")
        if len(code) > _LONGEST_CODE:
            code = f"{code[:_LONGEST_CODE].rstrip()} …"
        return what if self.waits or not code else f"{what}: {code}"

    @property
    def clauses(self) -> tuple[str, str]:
        """What one rank does here, and what several do."""
        if not self.frames:
            mute = "not answer: stopped, or stuck in native code"
            return f"does {mute}", f"do {mute}"
        one, several = ("waits", "wait") if self.waits else ("is", "are")
        return f"{one} in {self.text}", f"{several} in {self.text}"


def _is_library(file: str) -> bool:
    """Whether a file is no part of what the ranks run as their script."""
    if file.startswith(_PACKAGE):
        return not file.startswith(_PROGRAMS)
    return _OF_LIBRARIES.search(file) is not None


def place_of(stacks: Mapping[str, Any] | None) -> Place:
    """The place by a message "stacks" of a rank; None if it has sent none."""
    if stacks is None:
        return Place()
    frames, *others = map(_FRAME.findall, stacks["text"].split("\nthread "))
    # The main thread's, or that of the thread of the script for which it waits.
    if frames and _JOINS.search(frames[-1][0]):
        of_script = (each for each in others if not all(_is_library(frame[0]) for frame in each))
        frames = next(of_script, frames)
    return Place(tuple(frames), stacks["cpu_s"], stacks["state"])
