"""All looks at one attempt: who hangs, who holds the others up, and what a viewer gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpiddp.launch.monitor.console import job_facts
from mpiddp.launch.monitor.hang import HangWatch, stacks_sentence
from mpiddp.launch.monitor.looks import LookWatch
from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.launch.monitor.skew import SkewWatch
from mpiddp.launch.monitor.status import status_lines
from mpiddp.launch.options import LaunchOptions


class Monitor:
    """What there is to say of the ranks, by their reports. It ends nothing.

    Times are those of the caller's clock, in seconds.

    Args:
        now: when the attempt began.
    """

    def __init__(self, ranks: Ranks, options: LaunchOptions, now: float) -> None:
        self._ranks = ranks
        self._is_command = options.job.is_command
        self._hang_timeout_s = options.hang_timeout_s
        self._hangs = HangWatch(ranks, now, self._hang_timeout_s)
        self._skew = SkewWatch(now)
        self._looks = LookWatch(ranks)

    def look(self, now: float, running_s: float) -> list[str]:
        """Sentences about steps that are slow, or cannot be watched. Call this about once a second.

        Args:
            running_s: the time since all ranks have joined.
        """
        ranks, timeout_s = self._ranks, self._hang_timeout_s
        found = []
        newest_step = max((step for step, _ in ranks.steps.values()), default=0)
        if holder := self._skew.look(now, ranks.paces, newest_step):
            found.append(holder.sentence(ranks.names(holder.ranks)))
        is_silent = self._is_command and ranks.newest_step_at is None
        if timeout_s is not None and is_silent and running_s >= timeout_s:
            found.append(
                f"no rank has made a step in {timeout_s:g} s. --hang-timeout watches a command only if its "
                "script calls mpiddp.should_stop() in every step."
            )
        return found

    @property
    def slow_hosts(self) -> dict[str, float]:
        """The hosts of the ranks that held the others up for long, and their part of the others' speed."""
        held = self._skew.named.items()
        return {self._ranks.hosts[rank]: each.others_s / each.time.own_s for rank, each in held}

    def wants_stacks(self, now: float, silent_s: float) -> bool:
        """Whether the job is so quiet that the stacks of all ranks should be there for `look_at_stacks`.

        Args:
            silent_s: for how long no rank has printed anything.
        """
        return self._hangs.is_due(now, silent_s)

    def look_at_stacks(self, now: float) -> list[str]:
        """Sentences that say who waits where, if the ranks hang; else none."""
        return self._hangs.look(now)

    def wants_look(self, now: float) -> bool:
        """Whether the stacks of all ranks should be there for `look_at_steps`. Ask at random moments."""
        return self._looks.is_due(now)

    def look_at_steps(self, now: float) -> list[str]:
        """Sentences that say who holds the others up without using a core; else none."""
        return self._looks.look(now)

    def job_facts(self, latest: Mapping[int, bytes], now: float) -> dict[str, Any]:
        """The state of the job for a viewer.

        Args:
            latest: the end of what each rank has written.
        """
        facts = job_facts(self._ranks, latest, now)
        if sentence := self._holder:
            facts["holder"] = sentence
        return facts

    @property
    def _holder(self) -> str:
        """Who holds the others up in the latest steps; "" if nobody does."""
        holder = self._skew.holder
        return holder.sentence(self._ranks.names(holder.ranks)) if holder else self._looks.holder

    def status_lines(self, attempt: int, now: float) -> list[str]:
        """What a terminal shows below the output, see `mpiddp.launch.monitor.status`."""
        return status_lines(self._ranks, attempt, self._holder, now)

    def stacks_facts(self) -> dict[str, Any]:
        """The stacks that the ranks have sent, for a viewer, and a sentence about them."""
        stacks = {rank: facts["text"] for rank, facts in self._ranks.stacks.items()}
        return {"sentence": stacks_sentence(self._ranks), "stacks": stacks}
