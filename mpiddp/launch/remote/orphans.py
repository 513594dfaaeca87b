"""Ends what a job has left on other hosts: processes that carry its id, and no others.

A daemon that was killed, or an mpirun that had to be, may leave ranks behind which hang in a
collective. The id is in the environment that each process was started with.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.nodes import Node, is_this_host
from mpiddp.hosts.ssh import in_sh, ssh_to
from mpiddp.protocol import JOB

TIMEOUT_S = 8.0

_FAR_SHELL = 'IFS= read -r python; cd / && exec "$python" -'
_FAR_PYTHON = """
import os, signal
from pathlib import Path
mark = {mark!r}
for entry in Path("/proc").iterdir():
    try:
        if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\\0"):
            os.kill(int(entry.name), signal.SIGKILL)
            print(entry.name)
    except OSError:  # it has ended, or is another user's
        pass
"""


def sweep(nodes: Sequence[Node], job: str, python: str, say: Callable[[str], None]) -> None:
    """Kill what is left of `job` on all other hosts at once, and say what that was.

    Args:
        python: an interpreter that every host has.
    """
    mark = f"{JOB}={job}".encode()
    script = f"{python}\n{_FAR_PYTHON.format(mark=mark)}".encode()
    sweepers: dict[str, subprocess.Popen[bytes]] = {}
    for node in nodes if shutil.which("ssh") else ():
        if not is_this_host(node.name):
            host = Host(node.name, user=node.user, port=node.port)
            sweepers[node.name] = subprocess.Popen(
                [*ssh_to(host), in_sh(_FAR_SHELL)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
    for sweeper in sweepers.values():
        assert sweeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            sweeper.stdin.write(script)
            sweeper.stdin.close()
    deadline = time.monotonic() + TIMEOUT_S
    for name, sweeper in sweepers.items():
        assert sweeper.stdout is not None
        if not _ends(sweeper, deadline - time.monotonic()):
            sweeper.kill()
            say(
                f"{name} cannot be reached, so nothing was swept there; its ranks end by themselves."
            )
        elif swept := sweeper.stdout.read().split():
            say(f"swept {len(swept)} of the job's processes from {name}.")
        sweeper.wait()


def _ends(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        return process.wait(max(0.0, within_s)) == 0
    except subprocess.TimeoutExpired:
        return False
