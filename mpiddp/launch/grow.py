"""Look for hosts that can join a running job: `--grow 10m`.

A look reads files, resolves names and logs in to hosts, any of which may hang. So a thread looks, and wakes
the launcher's loop when it has found something. A look contacts hosts that could add
ranks, and the first of the job, whose versions they must have.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Collection
from dataclasses import replace

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.names import forget_addresses
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.plan import Plan, read_hosts, run_preflight
from mpiddp.text import all_of

_LONGEST = 1 << 16  # bytes of a sentence


class HostSearch:
    """The looks during one attempt. Its file descriptor is readable when `found` has news."""

    def __init__(self, options: LaunchOptions, plan: Plan, avoided: Collection[str]) -> None:
        self._options = options
        self._plan = plan
        self._avoided = avoided
        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._is_over = threading.Event()

    def fileno(self) -> int:
        return self._receiver.fileno()

    def begin(self) -> None:
        """Look from now on, every `--grow`."""
        threading.Thread(target=self._search, daemon=True).start()

    def found(self) -> str:
        """What a look has found: "node1 can join"."""
        return self._receiver.recv(_LONGEST).decode()

    def close(self) -> None:
        """Look no more. A look that hangs is left alone: its thread ends with the process."""
        self._is_over.set()
        self._receiver.close()

    def _search(self) -> None:
        with self._sender, contextlib.suppress(OSError):  # the attempt is over
            while not self._is_over.wait(self._options.grow_s):
                if found := look(self._options, self._plan, self._avoided):
                    self._sender.send(found.encode()[:_LONGEST])


def look(options: LaunchOptions, plan: Plan, avoided: Collection[str] = ()) -> str:
    """Look once, for hosts that `plan` could do with: "node1 can join", or "".

    A list of hosts in error, as while it is edited, and a machine that fails, are for the next look.

    Args:
        avoided: the keys of hosts that the job does without.
    """
    if options.n is not None and plan.request.world_size >= options.n:
        return ""
    used = {host.key for host in plan.hosts.hosts}
    try:
        listed = read_hosts(options, os.environ, is_first=False).usable
        new = [host for host in listed if host.key not in {*used, *avoided}]
        if not new or len(listed) - options.spares <= len(plan.hosts.usable):
            return ""
        forget_addresses()
        # With the same versions as the first host of the job.
        together = replace(plan.named, hosts=(*plan.hosts.usable[:1], *new))
        checked = run_preflight(options, together, plan.starter, os.environ)
    except (UserError, JobFailed):
        return ""
    joining = [host.name for host in new if host not in checked.complaints]
    return f"{all_of(joining)} can join" if joining else ""
