"""The code and the cause of a script's end are what wait() says, whatever the script does to itself.

Tests mpiddp/runtime/agent.py, mpiddp/runtime/script.py.
"""

from socket import gethostname

import pytest

from tests.support.ranks import LAUNCH, run_command, script

IN_A_DESTRUCTOR = """
import ctypes
libc = ctypes.CDLL("libc.so.6")
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
"""
HANDLED = "try: 1 / 0\nexcept ArithmeticError: sys.exit(4)"
AGAIN = (
    "os.getenv('A') and os._exit(6); os.putenv('A', '1'); os.execv(sys.executable, sys.orig_argv)"
)
NO_FILES = "import resource as r, torch; r.setrlimit(r.RLIMIT_NOFILE, (0, 0)); raise OSError('a')"
# What rank 1 does, and what is said of it. Plainer ends are in tests/promises/test_failures.py.
ENDS = {
    "sys.exit('no data.')": "ended first, with exit code 1: no data. ",
    HANDLED: "ended first, with exit code 4: ZeroDivisionError: division by zero.",
    AGAIN: "ended first, with exit code 6.",
    NO_FILES: "failed first: OSError: a.",
    "os.closerange(3, 999); os._exit(8)": "ended first, with exit code 8.",
    "os.execvp('sh', ['sh', '-c', 'exit 5'])": "ended first, with exit code 5.",
    IN_A_DESTRUCTOR: "was killed by SIGABRT.",
}
TEXT = """
import os, sys, time
if os.environ["RANK"] == "1":
    exec(sys.argv[1])
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("code", ENDS, ids=lambda each: each.strip().split("\n")[0])
def test_an_end_is_what_wait_says(tmp_path, code):
    done = run_command([*LAUNCH, "-H", "localhost:2", script(tmp_path, TEXT), code])
    assert f"rank 1 on {gethostname()} {ENDS[code]}" in done.stderr, done.stderr
    assert (done.returncode, "Exception ignored" in done.stderr) == (1, False), done.stderr
