"""The plans of a job's later attempts: the hosts are read again, and those that can be used now take part.

A list of hosts that is being edited changes nothing until it is right. A host with which the job did not
start is avoided for a while.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import forget_addresses
from mpiddp.launch import log
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.plan import Plan, make_plan, read_hosts
from mpiddp.launch.supervise.growing import Look
from mpiddp.text import all_of, counted

if TYPE_CHECKING:
    from mpiddp.launch.preflight import HostInfo

AVOIDED_INTERVALS = 8  # looks for hosts, before one is tried again with which the job did not start


class Planner:
    """Plans a job's attempts after the first. `plan` is the latest one.

    Args:
        started_at: when the user started the command, in seconds since 1970.
        plan: of the first attempt.
    """

    def __init__(self, options: LaunchOptions, started_at: float, plan: Plan) -> None:
        self.plan = plan
        self._options = options
        self._started_at = started_at
        self._named = plan.named  # the latest list without an error
        self._seen: set[str] = set()  # hosts that took part, or were left out
        self._avoided: dict[Host, float] = {}  # until a time of time.monotonic()
        self._see(plan)

    def next(self, max_ranks: int | None) -> Plan:
        """The plan for the hosts that are usable now.

        Raises:
            UserError: too few are.
            JobFailed: a machine failed.
        """
        forget_addresses()
        read = self._read()
        problem: UserError | JobFailed | None = None
        for named in self._choices(read):
            try:
                plan = self._make(max_ranks, named)
            except (UserError, JobFailed) as error:
                problem = problem or error
                continue
            if problem is not None and named != read and named == self._named:
                log.info(_keeps(problem))
            else:
                self._named = read
            self._see(plan)
            self.plan = plan
            return plan
        assert problem is not None
        raise problem

    def look(self, max_ranks: int | None) -> Look:
        """Whether more ranks could start now than the latest plan has. Checks only hosts without a rank."""
        request, n = self.plan.request, self._options.where.n
        if n is not None and request.world_size >= n:
            return Look()
        if max_ranks is not None and request.world_size >= max_ranks:
            return Look()
        try:
            named = self._without_avoided(read_hosts(self._options.where, os.environ))
        except (UserError, JobFailed) as error:
            return Look(problem=_keeps(error))
        missing = [host for host in named.usable if host not in self._used]
        if not missing:
            return Look()
        forget_addresses()
        try:
            return self._compare(self._make(max_ranks, named, self.plan.infos))
        except (UserError, JobFailed) as error:
            return Look(problem=f"the job cannot grow now: {error}")

    def go_back(self, plan: Plan) -> tuple[str, ...]:
        """Return to an earlier plan, whose hosts work, and avoid those that the latest one has besides.

        Returns:
            The names of the avoided hosts.
        """
        avoided = [host for host in self._used if host not in plan.hosts.hosts]
        until = time.monotonic() + self.avoided_s
        self._avoided |= dict.fromkeys(avoided, until)
        self.plan = plan
        return tuple(host.name for host in avoided)

    @property
    def avoided_s(self) -> float:
        """For how long a host is avoided, in seconds."""
        return AVOIDED_INTERVALS * (self._options.when.grow_s or 0.0)

    @property
    def _used(self) -> tuple[Host, ...]:
        return self.plan.hosts.hosts

    def _make(
        self, max_ranks: int | None, named: Hosts, known: Mapping[Host, HostInfo] | None = None
    ) -> Plan:
        return make_plan(
            self._options,
            self._started_at,
            os.environ,
            max_ranks=max_ranks,
            named=named,
            earlier=self.plan,
            known=known,
        )

    def _see(self, plan: Plan) -> None:
        self._seen |= {host.name for host in plan.request.hosts.hosts} | set(plan.left_out)

    def _read(self) -> Hosts:
        """The hosts that are named now. A list with an error counts as not changed."""
        try:
            return read_hosts(self._options.where, os.environ)
        except (UserError, JobFailed) as error:
            log.info(_keeps(error))
            return self._named

    def _choices(self, read: Hosts) -> list[Hosts]:
        """The lists of hosts to try, the best one first."""
        choices = [self._without_avoided(read)]
        choices += [read] if read not in choices else []
        choices += [self._named] if self._named not in choices else []
        return choices

    def _without_avoided(self, named: Hosts) -> Hosts:
        """The list without avoided hosts. Of a host whose line has changed, the earlier line counts."""
        now = time.monotonic()
        earlier = {host.key: host for host in self._used}
        kept = [
            earlier.get(host.key) if self._avoided.get(host, now) > now else host
            for host in named.hosts
        ]
        left = tuple(host for host in kept if host is not None)
        kept_hosts = replace(named, hosts=left)
        return kept_hosts if kept_hosts.usable else named

    def _compare(self, plan: Plan) -> Look:
        """What a plan has more than the latest one."""
        before, after = (
            {host.name: host.ranks for host in each.request.hosts.hosts}
            for each in (self.plan, plan)
        )
        if sum(after.values()) <= sum(before.values()):
            return Look()
        if new := [name for name in after if name not in before]:
            are = "is" if len(new) == 1 else "are"
            how = f"{are} back" if self._seen.issuperset(new) else "can join"
            return Look(f"{all_of(new)} {how}", f"on {counted(len(after), 'host')}")
        larger = [name for name, ranks in after.items() if ranks > before[name]]
        has = "has" if len(larger) == 1 else "have"
        ranks = counted(sum(after.values()), "rank")
        return Look(f"{all_of(larger)} {has} more slots", f"with {ranks}")


def _keeps(error: UserError | JobFailed) -> str:
    return f"the list of hosts cannot be used now, so the one of before stays in force: {error}"
