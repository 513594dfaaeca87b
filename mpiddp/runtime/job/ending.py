"""How a rank ended: one record, from its error, its exit code or the signal that killed its command.

Everyone else asks this record: what to print, what to report to the launcher, and with which code the other
ranks end.
"""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

from mpiddp.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    STOPPED,
    JobFailed,
    UserError,
    missing_package,
    package_we_lack,
)
from mpiddp.protocol.messages import recorded_error
from mpiddp.protocol.variables import ERROR_FILE


class Refused(SystemExit):
    """All ranks leave together. `code` is 2 for bad input, 1 if a machine or the network is the reason.

    Rank 0 has printed the `sentence`, unless the launcher will (`is_printed`).
    """

    def __init__(self, code: int, sentence: str, *, is_printed: bool = True) -> None:
        super().__init__(code)
        self.sentence = sentence
        self.is_printed = is_printed


class CommandFailed(SystemExit):
    """The command of a rank has ended with this exit code, not 0. `reason` explains it, "" for no reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


class Ending(NamedTuple):
    """The end of a rank.

    code: the exit code of its process, as its parent sees it: [0, 255]. 0 if it has not failed.
    sentence: what went wrong, "" if nothing says it.
    traceback: of an error that is a bug of the script; "" where the sentence, or the code, says it all.
    is_verdict: the sentence names what failed, which may be another rank.
    """

    code: int
    sentence: str = ""
    traceback: str = ""
    is_verdict: bool = False

    @property
    def is_failure(self) -> bool:
        return self.code != DONE

    @property
    def is_refusal(self) -> bool:
        """Whether it is bad input, which the rank itself has to print."""
        return self.code == BAD_INPUT and bool(self.sentence)

    def line(self, rank: str) -> str:
        """The line that names `rank`, "" if the rank has printed why, or stops on request."""
        if self.traceback:
            return f"{rank} failed: {self.sentence}"
        if self.is_verdict or self.is_refusal:
            return self.sentence
        if self.code in (DONE, BAD_INPUT, STOPPED):
            return ""
        return f"{rank} ended with exit code {self.code}{': ' * bool(self.sentence)}{self.sentence}"


def ending_of(error: BaseException | None, *, has_stopped: bool = False) -> Ending:
    """The ending of a script that ended with this error, None for none.

    Args:
        has_stopped: whether the script ends early, as requested. Exit code 75 is no failure then.
    """
    if error is None:
        return Ending(DONE)
    if isinstance(error, Refused):
        assert isinstance(error.code, int)
        if error.is_printed:
            return Ending(error.code)
        return Ending(error.code, error.sentence, is_verdict=True)
    if isinstance(error, SystemExit):
        return _of_exit(error, has_stopped)
    if isinstance(error, JobFailed):
        return Ending(FAILED, str(error), is_verdict=True)
    if isinstance(error, UserError):
        return Ending(BAD_INPUT, str(error))
    if package := package_we_lack(error):
        return Ending(BAD_INPUT, missing_package("a rank", package))
    import traceback  # takes 5 ms, and few ranks need it

    try:
        said = str(error)
    except Exception:  # its own __str__ fails
        said = ""
    kind = type(error).__name__
    sentence = f"{kind}: {said}" if said else kind
    return Ending(FAILED, sentence, "".join(traceback.format_exception(error)))


def _of_exit(error: SystemExit, has_stopped: bool) -> Ending:
    if not error.code or (error.code == STOPPED and has_stopped):
        return Ending(DONE)
    # A process ends with the lowest 8 bits of its code: -1 is 255. For the other ranks, 256 is no success.
    code = error.code & 0xFF or FAILED if isinstance(error.code, int) else FAILED
    if isinstance(error, CommandFailed):
        said = error.reason
    else:
        said = "" if isinstance(error.code, int) else str(error.code)
    return Ending(code, said or recorded_error(os.environ.get(ERROR_FILE, "")))


def ending_of_command(code: int) -> Ending:
    """The ending of a command with this exit code, -N if signal N has killed it: 128 + N, as in a shell."""
    status = 128 - code if code < 0 else code
    number = status - 128
    if number not in set(signal.Signals):
        return Ending(status)
    name = signal.Signals(number).name
    return Ending(status, f"its command was killed by {name}" if code < 0 else f"128 + {name}")
