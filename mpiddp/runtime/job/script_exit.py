"""Leave a context when the interpreter exits, with the error that ended a script without a `with`.

Python keeps an uncaught error in `sys.last_value` for the handlers of atexit, but not the SystemExit that
ends a script (CPython 3.10 to 3.13). The script's outermost frame shows that there was one: otherwise the
frame's last instruction is a return. Its code is the process's own, which the parent sees.

tests/integration/runtime/test_still_needed.py fails once Python keeps it.
"""

from __future__ import annotations

import atexit
import contextlib
import dis
import os
import sys
import traceback
from contextlib import AbstractContextManager
from types import FrameType
from typing import NoReturn, TypeVar

from mpiddp.errors import FAILED
from mpiddp.runtime.job.ending import ending_of
from mpiddp.runtime.job.session import current

Value = TypeVar("Value")


class ExitUnknown(SystemExit):
    """The script has ended by a SystemExit whose code nobody knows but its parent."""


def enter_until_exit(context: AbstractContextManager[Value]) -> Value:
    """Enter the context, and leave it when the interpreter exits, with the error that ended the script."""
    value = context.__enter__()
    outermost = sys._getframe()
    while outermost.f_back is not None:
        outermost = outermost.f_back

    def leave() -> None:
        error = _ending_error(outermost)
        try:
            context.__exit__(type(error) if error else None, error, None)
        except SystemExit as end:
            # Python ignores the code of a handler. The script has succeeded, but its last save has not; or
            # its error is a sentence that has been printed.
            if not isinstance(error, ExitUnknown) and not ending_of(error).traceback:
                exit_now(end.code)
        except BaseException:  # Python would print it, and end with the script's own code
            traceback.print_exc()
            exit_now(FAILED)

    atexit.register(leave)
    return value


def exit_now(code: object) -> NoReturn:
    """End the process with this code, without the remaining handlers of atexit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a script may replace them by anything
            stream.flush()
    os._exit(code if isinstance(code, int) else 1)


def _ending_error(outermost: FrameType) -> BaseException | None:
    """The exception that has ended the script with this frame, None if it ran to its end."""
    session = current()
    if session.control is not None:
        return session.error
    error: BaseException | None = getattr(sys, "last_value", None)
    last_instruction = dis.opname[outermost.f_code.co_code[outermost.f_lasti]]
    if error is None and not last_instruction.startswith("RETURN"):
        return ExitUnknown()
    return error
