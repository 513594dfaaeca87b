"""How a rank ended: one record, from its error, or from what wait() says of its process.

Everyone else asks this record: what to print, what to report to the launcher, and which code ends other ranks.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp import errors
from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED, JobFailed, UserError
from mpiddp.protocol.channel import LINE_LIMIT, STOP_SIGNALS, TEXT_LIMIT
from mpiddp.runtime.stdlib import own
from mpiddp.text import signal_name

_SOURCES = ("third_party/gloo/", "originated at tensorpipe/")


class Refused(SystemExit):
    """All ranks leave together. `code` is 2 for bad input, 1 if a machine or the network is the reason.

    `sentence` is for the launcher; "" without one: rank 0 has printed it.
    """

    def __init__(self, code: int, sentence: str = "") -> None:
        super().__init__(code)
        self.sentence = sentence


class Ending(NamedTuple):
    """The end of a rank, with the fields of a message "failed"."""

    code: int  # the exit code of its process, [0, 255]; 0 if it has not failed
    error: str = ""  # the reason, as a sentence, if anybody says it
    traceback: str = ""  # shows a bug of the script; "" if the sentence, or the code, says it all
    is_verdict: bool = False  # the sentence names what failed, which may be another rank
    signal: int = 0  # has killed it; 0 is none
    follows: bool = False  # the error may follow from the end of another rank

    @property
    def is_failure(self) -> bool:
        return self.code != DONE

    @property
    def is_refusal(self) -> bool:
        """Whether it is bad input, which the rank itself has to print."""
        return self.code == BAD_INPUT and bool(self.error)

    def stops(self, passed: Set[int], *, is_asked: bool | None, says_so: bool) -> bool:
        """Whether a program that has got the `passed` signals ends so on request.

        `is_asked`: whether the launcher has requested it; None without one, where a signal is the request.
        """
        was_asked = not passed.isdisjoint(STOP_SIGNALS) if is_asked is None else is_asked
        ends = {STOPPED, 128 + signal.SIGTERM, *(128 + number for number in passed)}
        # After `except KeyboardInterrupt: save()`, a script may end with any code. Others may still save.
        is_exit = not (self.signal or self.traceback or self.error)
        has_stopped = self.code == STOPPED and says_so
        return has_stopped or (was_asked and (self.code in ends or is_exit))

    @property
    def facts(self) -> dict[str, Any]:
        """What a message can hold of it: the beginning of the sentence, and the end of the traceback."""
        error, traceback = self.error, self.traceback[-TEXT_LIMIT:]
        if "out of memory" in error:
            from mpiddp.runtime.job.out_of_memory import shortened

            error = shortened(error)
        return self._replace(error=error[:TEXT_LIMIT], traceback=traceback)._asdict()

    def line(self, rank: str) -> str:
        """The line that names `rank`, "" if the rank has printed why, or stops on request."""
        if self.traceback:
            return f"{rank} failed: {self.error}"
        if self.is_verdict or self.is_refusal:
            return self.error
        if self.code in (DONE, BAD_INPUT, STOPPED):
            return ""
        if self.signal:
            return f"{rank} was killed by {signal_name(self.signal)}"
        return f"{rank} ended with exit code {self.code}{': ' * bool(self.error)}{self.error}"


def ending_of(error: BaseException | None, *, has_stopped: bool = False) -> Ending:
    """The ending of a script that ended with this error, None for none.

    With `has_stopped` it ends early, as requested, and exit code 75 is no failure.
    """
    if error is None:
        return Ending(DONE)
    if isinstance(error, SystemExit):
        if error.code in (None, DONE) or (error.code == STOPPED and has_stopped):
            return Ending(DONE)
        if not isinstance(error.code, int):
            return Ending(FAILED, str(error.code))
        # The process ends with the lowest 8 bits of a C long: -1 is 255, and 256 is 0.
        code = error.code & 0xFF if error.code.bit_length() < 64 else 0xFF
        if code == DONE:
            return Ending(DONE)
        if isinstance(error, Refused):
            return Ending(code, error.sentence, is_verdict=bool(error.sentence))
        # The script has handled the error itself: it has printed it, for example.
        handled = ending_of(error.__context__ if code not in (BAD_INPUT, STOPPED) else None)
        return Ending(code, handled.error, follows=handled.follows)
    if isinstance(error, JobFailed):
        return Ending(FAILED, str(error), is_verdict=True)
    if isinstance(error, UserError):
        return Ending(BAD_INPUT, str(error))
    if lacking := errors.missing_package(error, "a rank"):
        return Ending(BAD_INPUT, lacking)
    traceback = own("traceback")  # takes 5 ms, and few ranks need it
    sentence = type(error).__name__
    with contextlib.suppress(Exception):  # the __str__ of the error may fail
        sentence = f"{sentence}: {error}".removesuffix(": ")
    code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    text = "".join(traceback.format_exception(error))
    return Ending(code, sentence, text, follows=_may_follow(error))


def _may_follow(error: BaseException) -> bool:
    """Whether this error may follow from the end of another rank: if its first cause is one of connections.

    torch has classes for the errors of its store and of NCCL. Those of gloo and tensorpipe are plain
    RuntimeErrors, and name their place in the source of these libraries.
    """
    for _ in range(100):  # a chain may be a circle: raise error from error
        error = error.__cause__ or (not error.__suppress_context__ and error.__context__) or error
    classes = getattr(sys.modules.get("torch.distributed"), "DistError", ())
    is_plain = type(error) is RuntimeError
    return isinstance(error, classes) or (is_plain and any(map(str(error).__contains__, _SOURCES)))


def ending_of_process(status: int, recorded: Ending, error_file: str = "") -> Ending:
    """The ending of a process with this exit code, -N if signal N has killed it: 128 + N, as in a shell.

    If the script has recorded an error with this exit code, that is the ending: `recorded`, or in the file.
    Otherwise the ending has the process's own code, and the recorded sentence only as a hint.
    """
    from mpiddp.files import read_limited  # only agents need it

    number = max(0, -status)
    ending = Ending(128 + number if number else status, recorded.error, signal=number)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        message = json.loads(read_limited(Path(error_file), LINE_LIMIT))["message"]
        if isinstance(message, dict):
            recorded = Ending(*message.get("ending", recorded))
            message = message["message"]
        ending = ending._replace(error=str(message))
    # A script that has failed may be ended before it has printed all.
    explains = recorded.code == ending.code or ending.signal == signal.SIGTERM
    return recorded if recorded.is_failure and explains else ending


def record(ending: Ending, error_file: str) -> None:
    """Record why this process fails, as torch's `@record` does, for the parent that has named the file.

    A later exit code without a sentence follows from the error that was recorded.
    https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
    path = Path(error_file)
    if error_file and (ending.error or not path.exists()):
        ending = Ending(**ending.facts)
        extra = {"py_callstack": ending.traceback, "timestamp": str(int(time.time()))}
        facts = {"message": ending.error, "extraInfo": extra, "ending": ending}
        with contextlib.suppress(OSError):  # a full disk: the exit code is left
            path.touch(0o600)  # an error may hold a secret
            path.write_text(json.dumps({"message": facts}), encoding="utf-8")
