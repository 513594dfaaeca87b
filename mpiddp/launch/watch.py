"""Ranks that hang, and stragglers: when the launcher asks for the stacks of all ranks, and what they show.

A job that is quiet for long may evaluate, save, or make a slow first step. So there are two samples of its
stacks, which cost a rank a few milliseconds. A straggler shows in the times of its steps.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.launch.control import Console, ControlServer
from mpiddp.launch.ranks import WINDOW_S, Ranks, find_stragglers, straggler_sentence
from mpiddp.protocol.channel import Peer, encode
from mpiddp.protocol.server import Message

CHRONIC = 3  # windows in a row that name the same straggler
QUIET_S, QUIET_STEPS = 60.0, 20  # until the first sample: the longer of these, in median steps
BETWEEN_SAMPLES_S = 10.0
BUSY_FACTOR = 5  # ranks that compute or save may be in one line for so much longer
_BUSY = 0.2  # of a core
_STEPS = 50  # whose median counts

STACKS_S, INTERRUPTED_S = 4.0, 1.0  # for ranks to send their stacks, also after an interrupt
_NAMED = 4  # ranks of one place
_LONGEST_CODE = 60  # characters

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
    rf"/torch/utils/data/|^{re.escape(_PACKAGE)}train/(?:datasets|image_folder|cifar10)\.py"
    r"|/torch/serialization\.py$"
)
_OF_LIBRARIES = re.compile(r"^<frozen |/lib/python3|/torch/|/site-packages/|/dist-packages/")
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in (.*)(?:\n    (.*))?', re.MULTILINE)
_WRAPPERS = ("wrapper", "_fn", "inner", "decorate_context", "__enter__", "__exit__")


class Watch:
    """Decides once a second whether to ask for the stacks, and what to say. It ends nothing.

    With --hang-timeout (`timeout_s`), the job makes no step in so long only if it hangs. Without it, the
    limit is a guess from the steps: two samples have to confirm it, as before the first step.
    """

    def __init__(self, ranks: Ranks, now: float, timeout_s: float | None = None) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self.straggler = ""  # a sentence about that of the latest window
        self._named: set[int] = set()
        self._window_ends_at = now + WINDOW_S
        self._in_a_row: dict[int, int] = {}  # the latest windows in which each rank was a straggler
        self._began_at, self._quiet_since = now, float("-inf")
        self._sample_at = float("inf")
        self._step, self._step_at = 0, now  # the newest, and when it was reported
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._first: tuple[float, Mapping[int, Place]] | None = None  # the sample before

    def judge_steps(self, now: float) -> str:
        """A sentence about ranks that are stragglers for long, each named once; "" for none."""
        if now < self._window_ends_at:
            return ""
        self._window_ends_at = now + WINDOW_S
        if self._ranks.newest_step[1] <= now - WINDOW_S:  # no rank makes steps: nobody is slower
            self.straggler = ""
            return ""
        latest, works = find_stragglers(self._ranks)
        self.straggler = straggler_sentence(self._ranks, latest, works)
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank in latest}
        chronic = [rank for rank in latest if self._in_a_row[rank] >= CHRONIC]
        if self._named >= {*chronic}:
            return ""
        self._named |= {*chronic}
        return straggler_sentence(self._ranks, chronic, works)

    def wants_stacks(self, now: float, printed_at: float) -> bool:
        """Whether to ask for the stacks. The last output, at `printed_at`, counts until there are steps."""
        ranks = self._ranks
        step, at = ranks.newest_step
        if step != self._step:
            if 0 < self._step < step:
                self._step_s.append((at - self._step_at) / (step - self._step))
            self._step, self._step_at = step, at
        signs = [pace.since for pace in ranks.paces.values()]
        if self._timeout_s is None or not signs:  # with --hang-timeout, the steps alone count
            signs = signs if step else [printed_at]
            ends = [message.at for message in ranks.done.values()]
            signs += [ranks.last_saved_at, *ranks.saving.values(), *ends]
        quiet_since = max(self._began_at, *signs)
        if quiet_since != self._quiet_since:
            self._quiet_since, self._first = quiet_since, None
            self._sample_at = quiet_since + self._patience_s
        return now >= self._sample_at

    @property
    def _patience_s(self) -> float:
        median_s = sorted(self._step_s)[len(self._step_s) // 2] if self._step_s else 0.0
        return self._timeout_s or max(QUIET_S, QUIET_STEPS * median_s)

    def judge_stacks(self, now: float, printed_at: float) -> list[str]:
        """Sentences about a hang by the stacks, which are there."""
        if not self.wants_stacks(now, printed_at):  # a rank has moved meanwhile
            return []
        if self._timeout_s is not None and self._ranks.paces:
            return stuck_sentences(self._ranks, self._timeout_s)
        places, before = places_of(self._ranks), self._first
        self._first = None if before else (now, places)
        hangs = before is not None and self._hang(*before, now, places)
        pause_s = self._patience_s if before else BETWEEN_SAMPLES_S
        self._sample_at = float("inf") if hangs else now + pause_s  # until there is a sign of life
        if not hangs:
            return []
        what = "made a step" if self._step else "made a step or printed anything"
        quiet_s = now - self._quiet_since
        return [f"no rank has {what} for {quiet_s:.0f} s: {places_sentence(self._ranks)}"]

    def _hang(
        self, before: float, first: Mapping[int, Place], now: float, last: Mapping[int, Place]
    ) -> bool:
        """Whether no rank has moved, and one that the others may wait for does nothing."""
        if any(first.get(rank, Place()).frames != place.frames for rank, place in last.items()):
            return False
        # On a crowded host, a rank that computes has a core for a small part of the time.
        idle_s = _BUSY * (now - before)
        is_idle = [
            place.state != "R" and place.cpu_s - first[rank].cpu_s < idle_s
            for rank, place in last.items()
            if not place.waits
        ]
        if len(is_idle) == len(last) and not (self._step and any(is_idle)):
            return False  # nobody waits for another rank: all compute, or a program makes no steps
        if now - self._quiet_since >= BUSY_FACTOR * self._patience_s:
            return True
        return not self._ranks.saving and (any(is_idle) or not is_idle)


# --- the stacks ---


class Stacks:
    """The collection of all ranks' stacks, one at a time, for viewers and for the launcher itself."""

    def __init__(self, ranks: Ranks, server: ControlServer, console: Console) -> None:
        self._ranks, self._server, self._console = ranks, server, console
        self._timers = server.selector
        self._interrupts = False
        self._mute: set[int] = set()  # the ranks that have not answered
        self._viewers: list[Peer] = []  # that wait for the stacks
        self.then: Callable[[], None] | None = None  # what the launcher does with them

    def collect(self, then: Callable[[], None] | None = None, *, interrupts: bool = False) -> None:
        """Request the stacks, unless they are on their way. `interrupts`: scripts that do not answer."""
        if then is not None:
            self.then, self._interrupts = then, interrupts
        if self._report not in self._timers.timers:
            self._ranks.stacks.clear()
            self._mute = self._server.request_stacks() - self._ranks.done.keys()
            limit_s = STACKS_S + INTERRUPTED_S if self._mute else 0.0
            self._timers.after(STACKS_S, self._interrupt)
            self._timers.after(limit_s, self._report)

    def note(self, message: Message) -> None:
        """Take note of a viewer that wants the stacks, of stacks, and of ranks that end."""
        if message.kind == "view_stacks":
            self._viewers.append(message.facts["viewer"])
            self.collect()
        is_end = not message.from_script and message.kind in ("exited", "done", "lost")
        if message.kind == "stacks" or is_end:
            self._mute.discard(message.rank)
            if not self._mute and self._report in self._timers.timers:
                self._report()

    def _interrupt(self) -> None:
        for rank in self._mute if self.then and self._interrupts else ():
            self._server.send(rank, encode("stacks"))  # its agent interrupts the script

    def _report(self) -> None:
        """All stacks are there, or the time is over."""
        self._timers.cancel(self._interrupt, self._report)
        viewers, then = self._viewers, self.then
        self._viewers, self.then = [], None
        stacks = {rank: facts["text"] for rank, facts in self._ranks.stacks.items()}
        sentence = places_sentence(self._ranks) if viewers else ""
        for viewer in viewers:
            self._console.answer(viewer, sentence=sentence, stacks=stacks)
        if then is not None:
            then()


# --- where the ranks are ---


class Place(NamedTuple):
    """Where the main thread of a rank is. Without frames, the rank does not answer."""

    # A file, a line, a function, its code; the outermost first.
    frames: Sequence[tuple[str, str, str, str]] = ()
    cpu_s: float = 0.0  # that the rank and the processes below it have used
    state: str = ""  # of the main thread, as in /proc: "D" waits for a disk, "R" has a core

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        files = [frame[0] for frame in self.frames]
        if any(map(_DATA_OR_FILES.search, files)):
            return False
        if any(map(_MAY_WAIT.search, files[-1:])):
            return self.state != "R"
        return any(map(_WAITS.search, files[-1:])) or any(map(_AGREES.search, files[-3:]))

    @property
    def text(self) -> str:
        """For a sentence: "all_reduce (train.py:88)", or "load (data.py:40): f = open(path)"."""
        own = [n for n, frame in enumerate(self.frames) if not _is_library(frame[0])]
        at = own[-1] if own else len(self.frames) - 1
        file, line, function, code = self.frames[at]
        if self.waits:
            called = [frame[2] for frame in self.frames[at + 1 :]]
            function = next((name for name in called if name not in _WRAPPERS), function)
        what = f"{function} ({file.rpartition('/')[2]}:{line})"
        return what if self.waits or not code else f"{what}: {code[:_LONGEST_CODE].rstrip(':,')}"

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


def places_of(ranks: Ranks) -> dict[int, Place]:
    """The places of the ranks that have not ended."""
    return {rank: place_of(ranks.stacks.get(rank)) for rank in ranks.left}


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


def places_sentence(ranks: Ranks) -> str:
    """ "15 ranks wait in all_reduce (train.py:88); rank 11 on gpu03 is in load (data.py:40): open(path)."."""
    groups: dict[tuple[int, str, str], list[int]] = {}  # those that wait first, and the largest
    for rank, place in places_of(ranks).items():
        groups.setdefault((0 if place.waits else 1, *place.clauses), []).append(rank)
    if finished := sorted(ranks.done):  # others may wait for them in vain
        groups[2, "has finished", "have finished"] = finished
    clauses = []
    for key, members in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]))):
        several = len(members) > _NAMED
        who = f"{len(members)} ranks" if several else ", ".join(map(ranks.name, members))
        clauses.append(f"{who} {key[1 if len(members) == 1 else 2]}")
    return "; ".join(clauses) + "."


def stuck_sentences(ranks: Ranks, timeout_s: float) -> list[str]:
    """A sentence for each stuck rank, followed by its stack.

    The stuck ranks are those that do not answer; else those that are behind; else those that are outside
    of torch, where the others wait.
    """
    left, stacks = ranks.left, ranks.stacks
    steps = {rank: stacks[rank]["step"] for rank in left if rank in stacks}
    furthest = max(steps.values(), default=0)
    mute = [rank for rank in left if rank not in steps]
    held = [rank for rank in steps if stacks[rank]["is_held"]]
    behind = [rank for rank, step in steps.items() if step < furthest]
    outside = [rank for rank in steps if not place_of(stacks[rank]).waits]
    # None waits if the rank is the only one that is left, nor do ranks of which none has answered.
    others = f"others wait at step {furthest}." if steps and len(left) > 1 else ""
    rest = f" while the {others}" if others else "."
    if mute or held:
        why = ": native code holds its Python interpreter."
        if mute:
            why = " and does not answer: it is stopped, or stuck in native code."
        rest = f"{why} The {others}" if others else why
    found = []
    for rank in mute or held or behind or outside or left:
        sentence = f"{ranks.name(rank)} has made no step for {timeout_s:g} s{rest}"
        if rank in steps:
            sentence = f"{sentence} Its Python stack follows.\n{stacks[rank]['text'].rstrip()}"
        found.append(sentence)
    return found


def missing_sentence(ranks: Ranks, timeout_s: float) -> str:
    """A sentence that names the ranks that did not join, with the line that the first of them executes."""
    first, *others = missing = ranks.missing
    names = ", ".join(map(ranks.name, missing))
    owner = f"The last words of rank {first}" if others else "Its last words"
    started, frames = ranks.said["started"], place_of(ranks.stacks.get(first)).frames
    own = [frame for frame in frames if not frame[0].startswith("<frozen ")]  # of the import system
    if first not in started:
        words = "none; its Python has not started."
    elif first in ranks.done:
        words = "none; it has ended, with exit code 0."
    elif first not in ranks.stacks:
        pid = started[first].facts["pid"]
        words = f"none; it started (pid {pid}) but does not answer: it is stopped, or stuck in native code."
    elif own:
        words = "in {}, line {}, in {}: {}".format(*own[-1])
    else:
        words = "none; its Python stack shows no line of a script."
    return (
        f"only {ranks.world_size - len(missing)} of {ranks.world_size} ranks joined in {timeout_s:g} s. "
        f"Missing: {names}. {owner}: {words}"
    )
