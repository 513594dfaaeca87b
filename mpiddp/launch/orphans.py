"""Kill the processes that a job left on other hosts. Only processes that carry the job's id are killed.

A killed daemon or a killed mpirun may leave ranks behind that hang in a collective. The id is in the
environment that each process was started with.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpiddp.hosts import pidfd
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.names import is_this_host
from mpiddp.hosts.remote import program_with
from mpiddp.hosts.ssh import run_on_hosts
from mpiddp.hosts.transport import Transport
from mpiddp.launch import log
from mpiddp.protocol.variables import JOB

TIMEOUT_S = 8.0

_KILL = """
for pid in sys.modules[{module!r}].kill_marked({mark!r}):
    print(pid)
"""


def kill_orphans(hosts: Sequence[Host], job: str, python: str, transport: Transport) -> None:
    """Kill the remaining processes of `job` on all other hosts at once, and log how many there were.

    Args:
        python: an interpreter that every host has.
    """
    others = [host for host in hosts if not is_this_host(host.name)]
    if not transport.is_installed:
        return
    answers = run_on_hosts(
        others, python, remote_program(job), timeout_s=TIMEOUT_S, transport=transport
    )
    for host, answer in answers.items():
        if answer.exit_code != 0:
            log.info(
                f"{host.name} cannot be reached, so no leftover process was killed there; "
                "its ranks end by themselves."
            )
        elif killed := [line for line in answer.stdout.splitlines() if line.isdigit()]:
            log.info(f"killed leftover processes of the job on {host.name}: {len(killed)}.")


def remote_program(job: str) -> str:
    """The program that kills the processes of `job` on its host, and prints their pids."""
    mark = f"{JOB}={job}".encode()
    return program_with((pidfd,), _KILL.format(module=pidfd.__name__, mark=mark))
