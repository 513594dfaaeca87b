"""Kill the processes that a job left on other hosts. Only processes that carry the job's id are killed.

A killed daemon or a killed mpirun may leave ranks behind that hang in a collective. The id is in the
environment that each process was started with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.nodes import Node, is_this_host
from mpiddp.hosts.ssh import has_ssh, run_on_hosts
from mpiddp.protocol import JOB

TIMEOUT_S = 8.0

_REMOTE_PROGRAM = """
import os, signal
from pathlib import Path
mark = {mark!r}
for entry in Path("/proc").iterdir():
    try:
        if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\\0"):
            os.kill(int(entry.name), signal.SIGKILL)
            print(entry.name)
    except OSError:  # it has ended, or belongs to another user
        pass
"""


def kill_orphans(nodes: Sequence[Node], job: str, python: str, log: Callable[[str], None]) -> None:
    """Kill the remaining processes of `job` on all other hosts at once, and log how many there were.

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
    program = _REMOTE_PROGRAM.format(mark=f"{JOB}={job}".encode())
    for host, answer in run_on_hosts(hosts, python, program, timeout_s=TIMEOUT_S).items():
        if answer.exit_code != 0:
            log(
                f"{host.name} cannot be reached, so no leftover process was killed there; "
                "its ranks end by themselves."
            )
        elif killed := [line for line in answer.stdout.splitlines() if line.isdigit()]:
            count = len(killed)
            processes = "leftover process" if count == 1 else "leftover processes"
            log(f"killed {count} {processes} of the job on {host.name}.")
