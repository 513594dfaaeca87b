"""Which ranks a job that makes no step is waiting for, and where in their Python code they are."""

from __future__ import annotations

import re

from mpiddp.launch.record import Record

# The innermost frame of a rank that waits for others: torch, inside a collective or a backward pass.
_WAITS = re.compile(r"/torch/")
_FRAME = re.compile(r'^  File "([^"]+)"', re.MULTILINE)


def sentences(record: Record, timeout_s: float) -> list[str]:
    """A sentence for each stuck rank, its stacks behind it.

    Stuck are those that do not even answer; else those that are behind; else those that are outside
    of torch, where the others wait.
    """
    ranks = [rank for rank in range(record.world_size) if rank not in record.done]
    steps = {rank: record.stacks[rank]["step"] for rank in ranks if rank in record.stacks}
    furthest = max(steps.values(), default=0)
    mute = [rank for rank in ranks if rank not in steps]
    behind = [rank for rank, step in steps.items() if step < furthest]
    outside = [rank for rank in steps if not _waits(record.stacks[rank]["text"])]
    found = []
    for rank in mute or behind or outside or ranks:
        what = f"{record.name(rank)} has made no step for {timeout_s:g} s"
        if rank in mute:
            found.append(
                f"{what} and does not answer: stopped, or stuck in native code. "
                f"The others wait at step {furthest}."
            )
        else:
            others = f" while the others wait at step {furthest}" if len(ranks) > 1 else ""
            text = record.stacks[rank]["text"].rstrip()
            found.append(f"{what}{others}. Its Python stack follows.\n{text}")
    return found


def _waits(text: str) -> bool:
    """Whether the main thread is inside torch."""
    main = text.partition("thread MainThread:\n")[2].partition("\nthread ")[0]
    files = _FRAME.findall(main)
    return bool(files) and bool(_WAITS.search(files[-1]))
