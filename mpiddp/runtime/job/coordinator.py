"""The ranks of a job share one channel: they exchange values, refuse together and leave together.

mpirun kills every rank as soon as one exits with an error, even in the middle of a save or before rank 0
has printed its sentence. So a rank that cannot continue first informs all others, then rank 0 prints the
sentence, and then all ranks exit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from mpiddp.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    JobFailed,
    NoAnswer,
    UserError,
    print_error,
)
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
        self._own: dict[str, Any] = {}  # what a single rank has put

    def all_gather_json(self, value: Value, *, timeout_s: float) -> list[Value]:
        """The values of all ranks, by rank: [world_size]. All ranks must call this.

        Raises:
            NoAnswer: some rank did not call within `timeout_s` of the first. The sentence names the missing
                ranks.
        """
        if self.channel is None or self.world.world_size == 1:
            return [json.loads(json.dumps(value))]
        key = self.unique_prefix("exchange")
        try:
            return self.channel.gather(key, value, timeout_s=timeout_s)
        except Silent as silent:
            raise self.no_answer(silent.ranks, timeout_s) from None

    def put(self, key: str, value: JSON) -> None:
        """Let other ranks collect a value. Does not wait."""
        if self.channel is None:
            self._own[key] = json.loads(json.dumps(value))
        else:
            self.channel.put(key, value)

    def collect(self, key: str, ranks: Sequence[int], *, timeout_s: float) -> list[Any]:
        """The values that these ranks have put, once all have.

        Raises:
            Silent, AnotherFailed, ChannelLost: see `JobChannel.collect`.
        """
        if self.channel is None:
            return [self._own[key] for _ in ranks]
        return self.channel.collect(key, ranks, timeout_s=timeout_s, unless_failed=True)

    def forget(self, prefix: str) -> None:
        """Forget what this rank has put under keys with this prefix, once all ranks have collected it."""
        if self.channel is not None:
            self.channel.forget(prefix)
        self._own = {key: value for key, value in self._own.items() if not key.startswith(prefix)}

    def no_answer(self, missing: Sequence[int], timeout_s: float) -> NoAnswer:
        """The error that names the ranks that did not answer."""
        names = ", ".join(map(self._name, missing))
        if self.hostnames:  # they have joined
            return NoAnswer(f"{names} did not answer in {timeout_s:g} s.")
        world_size = self.world.world_size
        return NoAnswer(
            f"only {world_size - len(missing)} of {world_size} ranks joined in {timeout_s:g} s. "
            f"Missing: {names}."
        )

    def broadcast_json(self, value: Value) -> Value:
        """Rank 0's value, on every rank. All ranks must call this."""
        return self.all_gather_json(value, timeout_s=AGREE_TIMEOUT_S)[0]

    def unique_prefix(self, name: str) -> str:
        """A new prefix for keys, the same on every rank. All ranks must call this."""
        self._round += 1
        return f"{name}/{self._round}"

    def require_equal(self, what: str, value: str, *, hint: str) -> None:
        """Raise a UserError on all ranks unless all values are equal. All ranks must call this."""
        values = self.all_gather_json(value, timeout_s=AGREE_TIMEOUT_S)
        if len(set(values)) > 1:
            first = {value: self._name(values.index(value)) for value in values}
            shown = ", ".join(f"{value} ({name})" for value, name in first.items())
            raise UserError(f"{what} differs: {shown}. {hint}")

    @contextlib.contextmanager
    def all_or_none(self, *, timeout_s: float = 600.0) -> Iterator[None]:
        """Run the body on every rank; it succeeds on all ranks or on none.

        If any rank raises a `UserError` or a `JobFailed`, rank 0 prints it once and every rank exits, with
        code 2 or 1. A `NoAnswer` is raised at once: the missing rank would be missing here as well.
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
        problems = self.all_gather_json(problem, timeout_s=timeout_s)
        if not any(problems):
            return
        codes = set(self.all_gather_json(code, timeout_s=AGREE_TIMEOUT_S)) - {DONE}
        code = min(codes)  # a failure of a machine may cause what looks like bad input
        sentences = self.sentences(problems)
        if code == FAILED and self.has_launcher:
            self.leave()
            raise Refused(code, "\n".join(sentences), is_printed=False)
        printed = self.unique_prefix("printed")
        if self.world.rank == 0:
            for sentence in sentences:
                # Print it: a script's logging.config may have switched the log off.
                print_error(sentence)
            self.arrive(printed)
        else:  # the first rank to exit makes mpirun kill rank 0, even in the middle of its sentence
            self.wait_for(printed, [0], timeout_s=AGREE_TIMEOUT_S)
        self.leave()
        raise Refused(code, "\n".join(sentences))

    def claim_first_failure(self) -> bool:
        """Whether this rank is the first to fail.

        If the channel is lost, only rank 0 counts as the first. Call this as soon as an error is caught: the
        unwinding breaks connections, and the other ranks then fail as well.
        """
        if self.channel is None:
            return True
        try:
            return self.channel.claim_first_failure()
        except ChannelLost:
            return self.world.rank == 0

    def arrive(self, point: str) -> None:
        """Record that this rank is at `point`. Does not wait."""
        if self.channel is not None:
            self.channel.put(point, None)

    def wait_for(self, point: str, ranks: Sequence[int], *, timeout_s: float) -> None:
        """Wait until these ranks have arrived at `point` or are gone, or the timeout has passed."""
        if self.channel is not None:
            with contextlib.suppress(Silent, ChannelLost):
                self.channel.collect(point, ranks, timeout_s=timeout_s, or_gone=True)

    def leave(self, *, waits: bool | None = None) -> None:
        """Leave the job. All ranks must call this.

        Args:
            waits: until all others have left, or a timeout. By default rank 0 does: it serves torch's store.
        """
        self.arrive("left")
        if self.world.rank == 0 if waits is None else waits:
            self.wait_for("left", range(self.world.world_size), timeout_s=LEAVE_TIMEOUT_S)
        if self.channel is not None:
            self.channel.leave()

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.hostnames[rank]}" if self.hostnames else f"rank {rank}"

    def sentences(self, problems: list[str]) -> list[str]:
        """Each distinct problem once: bare if all ranks have it, else after the name of the first rank."""
        if len(set(problems)) == 1:
            return problems[:1]
        first_rank = {problem: problems.index(problem) for problem in problems if problem}
        return [f"{self._name(rank)}: {problem}" for problem, rank in first_rank.items()]
