"""The status below a job's output: on a terminal while the ranks make steps, and nowhere else.

Tests mpiddp/launch/monitor/status.py, mpiddp/runtime/torch/steps.py.
python -m pytest tests/ranks/launch/test_status_of_a_job.py
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path

from tests.support.ranks import LAUNCH, ROOT, clean_env, launch, script

STEPS = """
import os, sys, time, mpiddp
with mpiddp.process_group(backend="gloo") as world:
    step = 0
    for wrong in (1.5, -1, "1"):  # an error of the script, which would else end its connection
        try:
            mpiddp.progress(wrong)
        except (TypeError, ValueError):
            continue
        sys.exit(f"{wrong!r} is no step")
    while not os.path.exists(sys.argv[1]) and step < 30000:
        step += 1
        mpiddp.progress(step, 10**9, loss=0.5, nan=float("nan"), note=object())
        time.sleep(0.01)
print("the end")
"""


def test_a_terminal_shows_the_status_until_the_ranks_end(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    command = [*LAUNCH, "-H", "localhost:2", script(tmp_path, STEPS), str(seen)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(command[0], command, clean_env({"TERM": "xterm"}))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    shown = b""
    with os.fdopen(terminal, "rb", buffering=0) as file:
        while chunk := _read(file.fileno()):  # the job ends by itself if no status comes
            shown += chunk
            if re.search(
                rb"step \d+/1,000,000,000 \(0%\)  .*  loss 0\.5  nan nan\x1b.*2 ranks",
                shown,
                re.DOTALL,
            ):
                seen.touch()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    assert b"note" not in shown
    last = shown.rpartition(b"\x1b[J")[2]
    assert b"the end" in shown
    assert b"2 ranks" not in last


def test_a_pipe_has_no_status(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.touch()
    done = launch("-H", "localhost:2", script(tmp_path, STEPS), str(seen))
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n" * 2, "")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # all who had it have ended
        return b""
