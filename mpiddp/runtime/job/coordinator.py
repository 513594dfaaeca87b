"""The ranks of a job share one channel: they exchange values, refuse together and leave together.

mpirun kills every rank as soon as one exits with an error, even in the middle of a save or before rank 0
has printed its sentence. So a rank that cannot continue first informs all others, then rank 0 prints the
sentence, and then all ranks exit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from mpiddp.errors import BAD_INPUT, DONE, FAILED, JobFailed, NoAnswer, UserError, print_error
from mpiddp.runtime.job.channel import ChannelLost, JobChannel, Silent
from mpiddp.runtime.job.ending import Refused
from mpiddp.world import World

# The values that ranks may exchange. A tuple arrives as a list.
JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"
Value = TypeVar("Value", bound=JSON)

AGREE_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 600.0  # a rank may still be busy; a rank that failed ends the others earlier


class Coordinator:
    """The ranks of `world`, and the channel over which they agree.

    Args:
        channel: None for a single rank without a launcher.
        hostnames: [world_size], for sentences; empty until the ranks have met.
        has_launcher: whether a launcher prints why a job failed.
    """

    def __init__(
        self,
        world: World,
        channel: JobChannel | None,
        *,
        hostnames: tuple[str, ...] = (),
        has_launcher: bool = False,
    ) -> None:
        self.world = world
        self.channel = channel
        self.hostnames = hostnames
        self.has_launcher = has_launcher
        self._round = 0

    def all_gather_json(
        self, value: Value, *, timeout_s: float, key: str = "", unless_failed: bool = False
    ) -> list[Value]:
        """The values of all ranks, by rank: [world_size]. All ranks must call this.

        Args:
            key: of a gather that goes on beside others, in a thread.

        Raises:
            NoAnswer: some rank did not call within `timeout_s` of the first. The sentence names it.
            AnotherFailed: with `unless_failed`, a rank has failed.
        """
        if self.channel is None or self.world.world_size == 1:
            return [json.loads(json.dumps(value))]
        key = key or self.unique_prefix("exchange")
        try:
            return self.channel.gather(key, value, timeout_s=timeout_s, unless_failed=unless_failed)
        except Silent as silent:
            [ranks], size = silent.args, self.world.world_size
            names = ", ".join(map(self.name, ranks))
            if self.hostnames:  # they have joined
                raise NoAnswer(f"{names} did not answer in {timeout_s:g} s.") from None
            joined = f"only {size - len(ranks)} of {size} ranks joined in {timeout_s:g} s."
            raise NoAnswer(f"{joined} Missing: {names}.") from None

    def unique_prefix(self, name: str) -> str:
        """A new prefix for keys, the same on every rank. All ranks must call this."""
        self._round += 1
        return f"{name}/{self._round}"

    @contextlib.contextmanager
    def all_or_none(self, *, timeout_s: float = 600.0) -> Iterator[None]:
        """Run the body on every rank; it succeeds on all ranks or on none.

        If any rank raises a `UserError` or a `JobFailed`, the launcher prints it, or else rank 0, and every
        rank exits, with code 2 or 1. A `NoAnswer` is raised at once: the missing rank would be missing here
        as well.
        """
        problem, code = "", DONE
        try:
            yield
        except NoAnswer:
            raise
        except UserError as error:
            problem, code = str(error), BAD_INPUT
        except JobFailed as error:
            problem, code = str(error), FAILED
        answers = self.all_gather_json((problem, code), timeout_s=timeout_s)
        problems = [problem for problem, _ in answers]
        if not any(problems):
            return
        # A failure of a machine may cause what looks like bad input.
        code = min(code for _, code in answers if code != DONE)
        sentences = self.sentences(problems)
        if not self.has_launcher:
            if self.world.rank == 0:
                for sentence in sentences:
                    # Print it: a script's logging.config may have switched the log off.
                    print_error(sentence)
            # The first rank to exit makes mpirun kill rank 0, even in the middle of its sentence.
            self._wait_for_all("printed", AGREE_TIMEOUT_S)
        self.leave()
        raise Refused(code, "\n".join(sentences), is_printed=not self.has_launcher)

    def claim_first_failure(self) -> bool:
        """See `JobChannel.claim_first_failure`."""
        return self.channel is None or self.channel.claim_first_failure()

    def leave(self, *, waits: bool | None = None) -> None:
        """Leave the job. All ranks must call this.

        With `waits`, by default on rank 0, which serves torch's store, wait until all others have left.
        """
        if self.channel is None:
            return
        if self.world.rank == 0 if waits is None else waits:
            self._wait_for_all("left", LEAVE_TIMEOUT_S)
        else:
            self.channel.give(self.unique_prefix("left"), None)
        self.channel.leave()

    def _wait_for_all(self, point: str, timeout_s: float) -> None:
        """Wait until all ranks are at this point or gone, or the timeout has passed."""
        if self.channel is not None:
            with contextlib.suppress(Silent, ChannelLost):
                key = self.unique_prefix(point)
                self.channel.gather(key, None, timeout_s=timeout_s, or_gone=True)

    def name(self, rank: int) -> str:
        """The rank and its host, for sentences."""
        return f"rank {rank} on {self.hostnames[rank]}" if self.hostnames else f"rank {rank}"

    def sentences(self, problems: list[str]) -> list[str]:
        """Each distinct problem once: bare if all ranks have it, else after the name of the first rank."""
        if len(set(problems)) == 1:
            return problems[:1]
        first_rank = {problem: problems.index(problem) for problem in problems if problem}
        return [f"{self.name(rank)}: {problem}" for problem, rank in first_rank.items()]
