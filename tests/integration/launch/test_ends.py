"""The code and the cause of a script's end are what wait() says, whatever the script does to itself.

Tests mpiddp/runtime/agent.py, mpiddp/runtime/script.py.
python -m pytest tests/integration/launch/test_ends.py
"""

from __future__ import annotations

import subprocess
from socket import gethostname

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, mpirun, script

IN_A_DESTRUCTOR = """
import ctypes
libc = ctypes.CDLL("libc.so.6")
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
"""
# What rank 1 does, and what is said of it. Plainer ends are in tests/promises/test_failures.py.
ENDS = {
    "raise SystemExit(4)": "ended first, with exit code 4.",
    "sys.exit('no data')": "ended first, with exit code 1: no data.",
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


def launch(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, "-H", "localhost:2", *args],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("code", ENDS, ids=lambda each: each.strip().split("\n")[0])
def test_an_end_is_what_wait_says(tmp_path, code):
    done = launch(script(tmp_path, TEXT), code)
    assert f"rank 1 on {gethostname()} {ENDS[code]}" in done.stderr, done.stderr
    assert done.returncode == 1


OF_A_SCRIPT = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
import mpiddp
mpiddp.init(backend="gloo")
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, end="")
"""


def test_a_script_may_ignore_sigchld_and_its_programs_inherit_no_mask(tmp_path):
    for done in (launch(script(tmp_path, OF_A_SCRIPT)), mpirun(2, script(tmp_path, OF_A_SCRIPT))):
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("set()") >= 1, done.stdout


def test_a_command_needs_no_torch(tmp_path):
    """A folder in front of the path has a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    done = subprocess.run(
        [*LAUNCH, "-H", "localhost:2", "--", "python3", "-c", "print('hi')"],
        env=clean_env({"PYTHONPATH": str(tmp_path)}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "hi" in done.stdout
