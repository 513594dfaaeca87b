"""Report the ranks that a job waits for, to make a step or to join, and where in their code they are."""

from __future__ import annotations

import re

from mpiddp.launch.supervise.job_state import JobState

# The innermost frame of a rank that waits for others: torch, inside a collective or a backward pass.
_WAITS = re.compile(r"/torch/")
_FRAME = re.compile(r'^  File "([^"]+)", (.*)(?:\n    (.*))?', re.MULTILINE)

# The first lines of faulthandler's output for the main thread.
_INNERMOST = re.compile(r'^Stack .*\n  File "([^"]+)", (.*)', re.MULTILINE)


def hang_sentences(state: JobState, timeout_s: float) -> list[str]:
    """A sentence for each stuck rank, followed by its stack.

    The stuck ranks are those that do not answer; else those that are behind; else those that are outside
    of torch, where the others wait.
    """
    ranks = [rank for rank in range(state.world_size) if rank not in state.done]
    steps = {rank: state.stacks[rank]["step"] for rank in ranks if rank in state.stacks}
    furthest = max(steps.values(), default=0)
    mute = [rank for rank in ranks if rank not in steps]
    behind = [rank for rank, step in steps.items() if step < furthest]
    outside = [rank for rank in steps if not _waits(state.stacks[rank]["text"])]
    found = []
    for rank in mute or behind or outside or ranks:
        what = f"{state.name(rank)} has made no step for {timeout_s:g} s"
        if rank in mute and rank in state.frames:
            found.append(
                f"{what}: native code holds its Python interpreter. The others wait at step "
                f"{furthest}. Its Python stack follows, innermost call first.\n"
                f"{state.frames[rank].rstrip()}"
            )
        elif rank in mute:
            found.append(
                f"{what} and does not answer: it is stopped, or stuck in native code. "
                f"The others wait at step {furthest}."
            )
        else:
            others = f" while the others wait at step {furthest}" if len(ranks) > 1 else ""
            text = state.stacks[rank]["text"].rstrip()
            found.append(f"{what}{others}. Its Python stack follows.\n{text}")
    return found


def _waits(text: str) -> bool:
    """Whether the main thread is inside torch."""
    frames = _main_frames(text)
    return bool(frames) and bool(_WAITS.search(frames[-1][0]))


def missing_sentence(state: JobState, timeout_s: float) -> str:
    """A sentence that names the ranks that did not join, with the last messages of the first of them."""
    ranks = state.missing
    names = ", ".join(map(state.name, ranks))
    owner = "Its last words" if len(ranks) == 1 else f"The last words of rank {ranks[0]}"
    return (
        f"only {len(state.joining)} of {state.world_size} ranks joined in {timeout_s:g} s. "
        f"Missing: {names}. {owner}: {_last_line(state, ranks[0])}"
    )


def _last_line(state: JobState, rank: int) -> str:
    """The line that the rank's Python executes: the innermost one outside of Python's import system."""
    if rank not in state.started:
        return "none; its Python has not started."
    if rank not in state.stacks and (top := _INNERMOST.search(state.frames.get(rank, ""))):
        return f"in {top[1]}, {top[2]}, where native code holds the interpreter."
    if rank not in state.stacks:
        pid = state.started[rank]["pid"]
        return (
            f"none; it started (pid {pid}) but does not answer: it is stopped, or stuck in native "
            "code."
        )
    frames = _main_frames(state.stacks[rank]["text"])
    file, line, code = [frame for frame in frames if not frame[0].startswith("<frozen ")][-1]
    return f"in {file}, {line}: {code}"


def _main_frames(text: str) -> list[tuple[str, str, str]]:
    """The main thread's frames, outermost first: file, "line 3, in work", and that line's code."""
    # It comes last, so it remains when the text is truncated.
    main = text.rpartition("thread MainThread:\n")[2].partition("\nthread ")[0]
    return _FRAME.findall(main)
