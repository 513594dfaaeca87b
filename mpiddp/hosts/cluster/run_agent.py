"""Runs one command on a host, for `mpiddp hosts run`, which sends this source there.

It needs Python 3.8 and the standard library. The end of the connection ends all that the command has started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import NoReturn

GRACE_S = 2.0  # between SIGTERM and SIGKILL


def main(proof: str, folder: str, command: list[str]) -> NoReturn:
    """Print `proof`, run the command, and exit with its code.

    It runs in `folder`, else in the home folder, else in /: a container's user may have no home.
    """
    print(proof, flush=True)
    for each in (folder, os.path.expanduser("~"), "/"):
        with contextlib.suppress(OSError):
            os.chdir(each)
            break
    try:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
    # Ctrl-C reaches this process too where its host is that of the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watcher = os.fork()
    if watcher == 0:
        _end_with_connection(running.pid)
    code = running.wait()
    os.kill(watcher, signal.SIGTERM)  # which it ignores while it ends the others of the group
    os.waitpid(watcher, 0)
    sys.exit(code if code >= 0 else 128 - code)


def _end_with_connection(group: int) -> NoReturn:
    """Wait until nobody reads stdout any more, then end the command's process group.

    A process of its own does this, so that it also works where its parent is killed.
    """
    poll = select.poll()
    poll.register(1, 0)  # errors and hang-ups are always reported
    poll.poll()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + GRACE_S
    number: int = signal.SIGTERM
    while True:
        try:
            os.killpg(group, number)
        except OSError:  # all have ended
            os._exit(0)
        time.sleep(0.02)
        number = 0 if time.monotonic() < deadline else signal.SIGKILL  # 0 only asks
