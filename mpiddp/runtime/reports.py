"""What a script announces to its launcher: how to restart it, and that it saves. Without one, nothing.

    mpiddp.announce(resume_args=["--resume", "last"], global_batch_size=512, max_ranks=256)

The launcher knows no script's options. It appends `resume_args` to the command of a restart, and starts
at most `max_ranks` ranks. A restart with another number of ranks reads the global batch of the first
attempt from `announced()`, and decides itself how to divide it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpiddp.protocol.messages import LINE_LIMIT
from mpiddp.protocol.variables import ANNOUNCED
from mpiddp.runtime.job.session import script_session
from mpiddp.text import shown


@dataclass(frozen=True)
class Announced:
    """What an earlier attempt of this job announced, see `announced`.

    Attributes:
        global_batch_size: samples of one step over all ranks.
        world_size: number of ranks of that attempt.
    """

    global_batch_size: int
    world_size: int


def announce(
    *,
    resume_args: Sequence[str] = (),
    global_batch_size: int | None = None,
    max_ranks: int | None = None,
) -> None:
    """Send the launcher what a restart of this job needs. Without `mpiddp launch` this does nothing.

    Call it on every rank or on one rank, as soon as the values are known and before the first step. A
    later call replaces an earlier one.

    Args:
        resume_args: arguments to append to the same command, so that it resumes where this job ends.
        global_batch_size: samples of one step over all ranks, which a restart keeps.
        max_ranks: the largest number of ranks that the job can use.

    Raises:
        TypeError: `resume_args` is a string.
        ValueError: a number below 1, or a string that no command can get, such as one with a NUL.
    """
    if isinstance(resume_args, str):
        raise TypeError(f"resume_args: expected a sequence of strings, not {resume_args!r}")
    facts = {
        "resume_args": list(resume_args),
        "global_batch_size": global_batch_size,
        "max_ranks": max_ranks,
    }
    numbers = [each for each in (global_batch_size, max_ranks) if each is not None]
    is_right = all(map(_is_argument, resume_args)) and all(
        isinstance(each, int) and 0 < each < 1 << 63 for each in numbers
    )
    if not is_right or len(json.dumps(facts)) > LINE_LIMIT // 2:
        raise ValueError(
            f"mpiddp.announce: not the arguments of a command, or too large: {shown(str(facts))}"
        )
    script_session().send("announce", **facts)


def _is_argument(text: object) -> bool:
    """Whether a program can get `text` as an argument."""
    try:
        return isinstance(text, str) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate
        return False


def announced(env: Mapping[str, str] | None = None) -> Announced | None:
    """The global batch that an earlier attempt of this job announced, for a restart with other ranks.

        before = mpiddp.announced()
        global_batch_size = before.global_batch_size if before else 512

    Args:
        env: the variables of a rank, by default those of this process.

    Returns:
        None in the first attempt, without `mpiddp launch`, or if no attempt announced a global batch.
    """
    text = (os.environ if env is None else env).get(ANNOUNCED)
    return Announced(**json.loads(text)) if text else None


def saving() -> contextlib.AbstractContextManager[None]:
    """Within the body, this rank saves its work: after a request to stop, it has time until --save-grace.

    `should_stop()` declares the same when it returns True, until the script ends. So this is for saves
    that may be under way when a stop is requested. Without `mpiddp launch` it does nothing.

        with mpiddp.saving():
            torch.save(model.state_dict(), path)

    Bodies may be nested, and may run in several threads at once. `mpiddp.Checkpoints` needs none.
    """
    return script_session().saving()
