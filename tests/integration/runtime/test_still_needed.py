"""Workarounds for Python and torch. Each test fails once its workaround is no longer needed."""

from __future__ import annotations

import subprocess
import sys

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env


def run(code: str) -> str:
    """The output of a new Python process."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_hashlib_still_loads_openssl():
    """mpiddp/protocol/channel.py, `_mac`"""
    is_loaded = "import sys; print('_hashlib' in sys.modules)"
    assert run(f"import hashlib; {is_loaded}") == "True"
    assert run(f"import mpiddp.launch.main, mpiddp.protocol; {is_loaded}") == "False"


def test_python_still_forgets_the_exit_code_of_a_script():
    """mpiddp/runtime/join.py"""
    state = (
        "[n for n in ('last_exc', 'last_value', 'last_type') if hasattr(sys, n)], sys.exc_info()"
    )
    code = f"import atexit, sys; atexit.register(lambda: print({state})); sys.exit(3)"
    assert run(code) == "[] (None, None, None)"
    hooks = "sys.excepthook = sys.unraisablehook = lambda *args: print(args)"
    assert run(f"import sys; {hooks}; sys.exit(3)") == ""
