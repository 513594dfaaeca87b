"""Write what this process finds at its first line, by field, to NAME and its rank: finds.py NAME.

docs/differences.md has the fields that differ between launchers.
"""

import ctypes
import faulthandler
import gc
import json
import locale
import logging
import os
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

_PR_GET_PDEATHSIG = 2


def signal_at_parents_end() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value


def handlers() -> dict[str, str]:
    """The signals that do not what they do by default."""
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    every = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {str(number): str(each)[:14] for number, each in every.items() if each not in defaults}


def frames() -> int:
    count, frame = 0, sys._getframe(2)
    while frame.f_back is not None:
        count, frame = count + 1, frame.f_back
    return count


def found() -> dict[str, Any]:
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "modules of torch, numpy": [each for each in ("torch", "numpy") if each in sys.modules],
        "argv": sys.argv[2:],
        "orig_argv": sys.orig_argv[1:],
        "name": [__name__, str(__spec__), os.path.relpath(__file__)],
        "main module": sorted(vars(sys.modules["__main__"]).keys() - globals().keys()),
        "path": os.path.relpath(sys.path[0]),
        "umask": os.umask(0o22),
        "locale": locale.setlocale(locale.LC_ALL),
        "encodings": [sys.stdout.encoding, sys.stdin.encoding, sys.getfilesystemencoding()],
        "limits": {name: resource.getrlimit(getattr(resource, name))[0] for name in limits},
        "nice": os.nice(0),
        "flags": str(sys.flags),
        "warnings": [sys.warnoptions, len(warnings.filters)],
        "logging": len(logging.root.handlers),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "garbage collection": [gc.isenabled(), gc.get_freeze_count(), gc.get_threshold()],
        "stdout": [sys.stdout.line_buffering, sys.stdout.write_through],
        "stderr": [sys.stderr.line_buffering, sys.stderr.write_through],
        "session": os.getsid(0) == os.getpid(),
        "signals": handlers(),
        "faulthandler": faulthandler.is_enabled(),
        "signal at the parent's end": signal_at_parents_end(),
        "threads": [each.name for each in threading.enumerate()],
        "files": len([*Path("/proc/self/fd").iterdir()]),
        "meta_path": len(sys.meta_path),
        "frames below": frames(),
        "variables": sorted(each for each in os.environ if not each.startswith("TEST_")),
    }


if __name__ == "__main__":
    text = json.dumps(found())
    Path(f"{sys.argv[1]}{os.environ.get('RANK', 0)}.json").write_text(text, encoding="utf-8")
