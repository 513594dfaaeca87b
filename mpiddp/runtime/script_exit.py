"""What ended a script that has no `with` around its process group.

Python keeps an uncaught error in `sys.last_value` for handlers of atexit, but nothing of the SystemExit
that ends a script (CPython 3.10 to 3.13): no hook is called for it, and it is freed before they run.
So `sys.exit` is replaced by one that keeps its status. The script's outermost frame tells whether that
SystemExit was caught on the way: then its last instruction is a return.

tests/test_still_needed.py fails on the day that Python tells it.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from typing import NoReturn


def observe() -> Callable[[], BaseException | None]:
    """To be called by the script; what it returns says at exit what ended it, None where it ran out.

    From now on `sys.exit` notes its code. One that was caught on the way is known by the script's own
    frame, which then has returned all the same.
    """
    codes: list[object] = [None]
    original = sys.exit

    def noting_exit(status: object = None, /) -> NoReturn:
        codes.append(status)
        original(status)  # type: ignore[arg-type]

    sys.exit = noting_exit
    outermost = sys._getframe()
    while outermost.f_back is not None:
        outermost = outermost.f_back

    def what_ended_it() -> BaseException | None:
        error: BaseException | None = getattr(sys, "last_value", None)
        last_instruction = dis.opname[outermost.f_code.co_code[outermost.f_lasti]]
        if error is None and not last_instruction.startswith("RETURN"):
            return SystemExit(codes[-1])
        return error

    return what_ended_it
