"""Wait for hosts that do not answer yet: `--wait-for-hosts 10m`.

The pods of a cluster start one by one. A name may not resolve at first, and sshd may not listen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mpiddp.hosts import nodes
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import Answer, run_on_hosts
from mpiddp.hosts.transport import Transport
from mpiddp.launch import log
from mpiddp.text import counted, duration, listed

PAUSE_S = 1.0  # between two attempts
REPEAT_S = 60.0  # between two lines of the same hosts
ANSWER_S = 10.0  # for one attempt


def wait_for_hosts(hosts: Sequence[Host], wait_s: float, transport: Transport) -> None:
    """Wait until every name resolves and every host answers, at most `wait_s` seconds.

    Logs how many hosts answer when the number changes, and every minute. The preflight explains why a
    host does not answer in the end.
    """
    began = time.monotonic()
    deadline = began + wait_s
    waiting = list(hosts)
    logged, logged_at = len(hosts) + 1, began
    while True:
        timeout_s = min(ANSWER_S, max(1.0, deadline - time.monotonic()))
        waiting = _without_answer(waiting, timeout_s, transport)
        now = time.monotonic()
        if waiting and (len(waiting) != logged or now - logged_at >= REPEAT_S):
            logged, logged_at = len(waiting), now
            names = listed([host.name for host in waiting], most=3)
            log.info(
                f"{len(hosts) - len(waiting)} of {counted(len(hosts), 'host')} answer; waiting for {names} "
                f"(up to {duration(max(1.0, deadline - now))})"
            )
        if not waiting or now >= deadline:
            break
        time.sleep(min(PAUSE_S, deadline - now))
    if logged <= len(hosts) and not waiting:
        log.info(
            f"all {counted(len(hosts), 'host')} answer after {duration(time.monotonic() - began)}"
        )


def _without_answer(hosts: Sequence[Host], timeout_s: float, transport: Transport) -> list[Host]:
    """The hosts whose names do not resolve, or that do not answer in time."""
    nodes.forget_addresses()
    nodes.resolve_all([host.name for host in hosts])
    resolved = [
        host for host in hosts if nodes.is_this_host(host.name) or nodes.addresses_of(host.name)
    ]
    answers = run_on_hosts(resolved, "sh", "exit 0\n", timeout_s=timeout_s, transport=transport)
    return [host for host in hosts if host not in answers or _may_answer_later(answers[host])]


def _may_answer_later(answer: Answer) -> bool:
    """Whether the host did not answer, for a reason that may pass. Only people change a host key."""
    return answer.exit_code != 0 and "Host key verification failed" not in answer.stderr
