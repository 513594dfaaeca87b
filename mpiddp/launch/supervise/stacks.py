"""Report the ranks that a job waits for, to make a step or to join, and where in their code they are."""

from __future__ import annotations

import re

from mpiddp.launch.supervise.control import ControlServer
from mpiddp.launch.supervise.ranks import Ranks

# The innermost frame of a rank that waits for others: torch, inside a collective or a backward pass.
_WAITS = re.compile(r"/torch/")
_FRAME = re.compile(r'^  File "([^"]+)", (.*)(?:\n    (.*))?', re.MULTILINE)

# The first lines of faulthandler's output for the main thread.
_INNERMOST = re.compile(r'^Stack .*\n  File "([^"]+)", (.*)', re.MULTILINE)


class StackRequest:
    """The request for the Python stacks of all connected ranks. Their answers are in `ranks`."""

    def __init__(self, server: ControlServer, ranks: Ranks) -> None:
        self._server = server
        self._ranks = ranks

    def send(self) -> None:
        self._ranks.stacks.clear()
        self._ranks.frames.clear()
        self._server.request_stacks()

    @property
    def silent_ranks(self) -> set[int]:
        """The ranks that are connected and have not answered."""
        return self._server.connected - self._ranks.stacks.keys() - self._ranks.done

    def interrupt_silent_ranks(self) -> None:
        for rank in self.silent_ranks:
            self._server.interrupt(rank)


def hang_sentences(ranks: Ranks, timeout_s: float) -> list[str]:
    """A sentence for each stuck rank, followed by its stack.

    The stuck ranks are those that do not answer; else those that are behind; else those that are outside
    of torch, where the others wait.
    """
    left = [rank for rank in range(ranks.world_size) if rank not in ranks.done]
    steps = {rank: ranks.stacks[rank]["step"] for rank in left if rank in ranks.stacks}
    furthest = max(steps.values(), default=0)
    mute = [rank for rank in left if rank not in steps]
    behind = [rank for rank, step in steps.items() if step < furthest]
    outside = [rank for rank in steps if not _waits(ranks.stacks[rank]["text"])]
    # None waits if the rank is the only one that is left, nor do ranks of which none has answered.
    others = f"the others wait at step {furthest}" if steps and len(left) > 1 else ""
    found = []
    for rank in mute or behind or outside or left:
        what = f"{ranks.name(rank)} has made no step for {timeout_s:g} s"
        if rank in mute:
            found.append(f"{what}{_mute(ranks, rank, f' The{others[3:]}.' if others else '')}")
        else:
            text = ranks.stacks[rank]["text"].rstrip()
            beside = f" while {others}" if others else ""
            found.append(f"{what}{beside}. Its Python stack follows.\n{text}")
    return found


def _mute(ranks: Ranks, rank: int, others: str) -> str:
    """Of a rank that does not answer."""
    if rank not in ranks.frames:
        return f" and does not answer: it is stopped, or stuck in native code.{others}"
    return (
        f": native code holds its Python interpreter.{others} Its Python stack follows, innermost call "
        f"first.\n{ranks.frames[rank].rstrip()}"
    )


def _waits(text: str) -> bool:
    """Whether the main thread is inside torch."""
    frames = _main_frames(text)
    return bool(frames) and bool(_WAITS.search(frames[-1][0]))


def missing_sentence(ranks: Ranks, timeout_s: float) -> str:
    """A sentence that names the ranks that did not join, with the last messages of the first of them."""
    missing = ranks.missing
    names = ", ".join(map(ranks.name, missing))
    owner = "Its last words" if len(missing) == 1 else f"The last words of rank {missing[0]}"
    return (
        f"only {len(ranks.joining)} of {ranks.world_size} ranks joined in {timeout_s:g} s. "
        f"Missing: {names}. {owner}: {_last_line(ranks, missing[0])}"
    )


def _last_line(ranks: Ranks, rank: int) -> str:
    """The line that the rank's Python executes: the innermost one outside of Python's import system."""
    if rank not in ranks.started:
        return "none; its Python has not started."
    if rank in ranks.exited:
        return "none; it has ended, with exit code 0."
    if rank not in ranks.stacks and (top := _INNERMOST.search(ranks.frames.get(rank, ""))):
        return f"in {top[1]}, {top[2]}, where native code holds the interpreter."
    if rank not in ranks.stacks:
        pid = ranks.started[rank]["pid"]
        return (
            f"none; it started (pid {pid}) but does not answer: it is stopped, or stuck in native "
            "code."
        )
    frames = _main_frames(ranks.stacks[rank]["text"])
    own = [frame for frame in frames if not frame[0].startswith("<frozen ")]
    if not own:
        return "none; its Python stack shows no line of a script."
    file, line, code = own[-1]
    return f"in {file}, {line}: {code}"


def _main_frames(text: str) -> list[tuple[str, str, str]]:
    """The main thread's frames, outermost first: file, "line 3, in work", and that line's code."""
    # It comes last, so it remains when the text is truncated.
    main = text.rpartition("thread MainThread:\n")[2].partition("\nthread ")[0]
    return _FRAME.findall(main)
