"""Kill what a job has left on other hosts: processes that carry its id, and no others.

A daemon that was killed, or an mpirun that had to be, may leave ranks behind which hang in a
collective. The id is in the environment that each process was started with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.nodes import Node, is_this_host
from mpiddp.hosts.ssh import has_ssh, run_on_hosts
from mpiddp.protocol import JOB

TIMEOUT_S = 8.0

_FAR_PROGRAM = """
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


def kill_orphans(nodes: Sequence[Node], job: str, python: str, say: Callable[[str], None]) -> None:
    """Kill what is left of `job` on all other hosts at once, and say what that was.

    Args:
        python: an interpreter that every host has.
    """
    hosts = [
        Host(node.name, user=node.user, port=node.port)
        for node in nodes
        if not is_this_host(node.name)
    ]
    if not has_ssh():
        return
    program = _FAR_PROGRAM.format(mark=f"{JOB}={job}".encode())
    for host, answer in run_on_hosts(hosts, python, program, timeout_s=TIMEOUT_S).items():
        if answer.exit_code != 0:
            say(
                f"{host.name} cannot be reached, so nothing was swept there; "
                "its ranks end by themselves."
            )
        elif killed := [line for line in answer.stdout.splitlines() if line.isdigit()]:
            say(f"swept {len(killed)} of the job's processes from {host.name}.")


sweep = kill_orphans  # the old name
