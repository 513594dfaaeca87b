"""The ranks of a job share one store: they exchange values, refuse together and leave together.

mpirun kills every rank as soon as one exits with an error, even in the middle of a save or before rank 0
has printed its sentence. So a rank that cannot continue first informs all others, then rank 0 prints the
sentence, and then all ranks exit.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mpiddp.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    JobFailed,
    NoAnswer,
    UserError,
    print_error,
)
from mpiddp.runtime.job.ending import Refused
from mpiddp.runtime.job.signed_store import NEWS, SignedStore
from mpiddp.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

# The values that ranks may exchange. A tuple arrives as a list.
JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"
Value = TypeVar("Value", bound=JSON)

AGREE_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 600.0  # a rank may still be busy; a rank that failed ends the others earlier
_EARLY_S = 1.0  # for the others to end as well
_FIRST_FAILURE = "first failure"  # keys with the number of the rank that failed first
RANK_0_LEFT = "rank 0 left"  # a key that rank 0 sets before it closes the store


class Coordinator:
    """The ranks of `world`, and the key-value store that rank 0 (or torchrun's agent) serves.

    `store` is for torch's process groups, `values` for everything that the ranks act on.

    Args:
        secret: what only the ranks know, see `SignedStore`.
        hostnames: [world_size], for sentences; empty until the ranks have met.
        has_launcher: whether a launcher prints why a job failed.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        secret: str = "",
        *,
        hostnames: tuple[str, ...] = (),
        has_launcher: bool = False,
    ) -> None:
        self.world = world
        self.store = store
        self.secret = secret
        self.values = SignedStore(store, secret)
        # For the watch's thread: a connection is locked while it waits.
        self.watched_values = self.values.clone()
        self.hostnames = hostnames
        self.has_launcher = has_launcher
        self._stay = 0  # counts the times that this rank has entered
        self._is_first: bool | None = None
        self._round = 0
        self._published = ""  # the key that rank 0 published in the latest exchange

    def met(
        self, world: World, hostnames: tuple[str, ...], *, has_launcher: bool = False
    ) -> Coordinator:
        """This coordinator, now that the ranks have met. All ranks must call this."""
        known = copy.copy(self)
        known.world, known.hostnames, known.has_launcher = world, hostnames, has_launcher
        return known

    def all_gather_json(self, value: Value, *, timeout_s: float) -> list[Value]:
        """The values of all ranks, by rank: [world_size]. All ranks must call this.

        Rank 0 reads N keys and publishes one, so the load on the store grows linearly with the job.

        Raises:
            NoAnswer: some rank did not call within `timeout_s`. The sentence names the missing ranks.
        """
        text = json.dumps(value)
        if self.world.world_size == 1:
            return [json.loads(text)]
        prefix = self.unique_prefix("exchange")
        ranks = range(self.world.world_size)
        self.values.set(f"{prefix}/{self.world.rank}", text)
        published = f"{prefix}/all"
        if self.world.rank == 0:
            keys = [f"{prefix}/{rank}" for rank in ranks]
            found = self.values.wait(keys, timeout_s)
            missing = [rank for rank in ranks if keys[rank] not in found]
            if missing:
                raise self.no_answer(missing, timeout_s)
            listed = _listed([found[key] for key in keys])
            self.values.set(published, listed)
        else:
            # Rank 0 names the missing ranks; the others wait a little longer, so that it can.
            answer = self.values.wait([published], timeout_s + 5)
            if not answer:
                waited_s = f"{timeout_s + 5:g} s"
                raise NoAnswer(
                    f"{self._name(self.world.rank)}: no answer from {self._name(0)} in {waited_s}."
                )
            listed = answer[published]
        values: list[Value] = _unlisted(listed, self.world.world_size)
        # Delete the keys, or a long run fills the store. Rank 0 deletes the previous list: every rank
        # that takes part in this exchange has read it.
        self.values.delete(f"{prefix}/{self.world.rank}")
        if self.world.rank == 0:
            self.values.delete(self._published)
            self._published = published
        return values

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
        sentences = self._sentences(problems)
        if code == FAILED and self.has_launcher:
            self.leave()
            raise Refused(code, "\n".join(sentences), is_printed=False)
        printed = self.unique_prefix("printed")
        if self.world.rank == 0:
            for sentence in sentences:
                # Print it: a script's logging.config may have switched the log off.
                print_error(sentence)
            self.values.set(printed, "")
        else:  # the first rank to exit makes mpirun kill rank 0, even in the middle of its sentence
            self.values.wait([printed], AGREE_TIMEOUT_S)
        self.leave()
        raise Refused(code, "\n".join(sentences))

    def enter(self) -> int:
        """Begin another stay in the job, which ends with `leave`. Returns its number.

        A script may catch the error that has ended a stay. In the next one no rank has failed.
        """
        self._stay += 1
        self._is_first = None
        return self._stay

    def claim_first_failure(self) -> bool:
        """Whether this rank is the first to fail in this stay.

        Without a store, only rank 0 counts as the first. Call this as soon as an error is caught: the
        unwinding breaks connections, and the other ranks then fail as well.
        """
        if self._is_first is None:
            try:
                own = str(self.world.rank)
                self._is_first = self.values.set_if_missing(self._first_failure, own) == own
            except RuntimeError:  # rank 0 has ended, so it was first
                self._is_first = self.world.rank == 0
        return self._is_first

    def has_failed(self, values: SignedStore) -> bool:
        """Whether a rank has failed in this stay.

        Args:
            values: the store over a connection of the calling thread.
        """
        return values.get(self._first_failure) is not None

    @property
    def _first_failure(self) -> str:
        return self.of_stay(_FIRST_FAILURE)

    def of_stay(self, name: str) -> str:
        """A key of this stay, the same on every rank, whatever each of them has exchanged before."""
        return f"{name}/{self._stay}"

    def arrive(self, point: str) -> None:
        """Record that this rank is at `point`; at most once per point. Does not wait."""
        self.values.set(f"{point}/{self.world.rank}", "")

    def wait_for_all(self, point: str, *, timeout_s: float) -> None:
        """Wait until every rank has arrived at `point` or the timeout has passed."""
        ranks = range(self.world.world_size)
        self.values.wait([f"{point}/{rank}" for rank in ranks], timeout_s)

    def leave(self) -> None:
        """Leave the job. Rank 0 serves the store, so it waits until all others have left, or a timeout.

        All ranks must call this, as the last use of the store.
        """
        self._leave(self.values, LEAVE_TIMEOUT_S)

    def leave_early(self) -> None:
        """Leave while the others may go on. Without rank 0, they have no store. Any thread may."""
        self._leave(self.watched_values, _EARLY_S)

    def _leave(self, values: SignedStore, timeout_s: float) -> None:
        prefix = self.of_stay("left")
        with contextlib.suppress(RuntimeError):  # rank 0 may have ended, and its store with it
            if self.world.rank > 0:
                values.set(f"{prefix}/{self.world.rank}", "")
            else:
                others = [f"{prefix}/{rank}" for rank in range(1, self.world.world_size)]
                if len(values.wait(others, timeout_s)) < len(others):
                    values.set(RANK_0_LEFT, "")
                    values.set(NEWS, "")
                    time.sleep(2.0)  # so that all ranks can read it

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.hostnames[rank]}" if self.hostnames else f"rank {rank}"

    def _sentences(self, problems: list[str]) -> list[str]:
        """Each distinct problem once: bare if all ranks have it, else after the name of the first rank."""
        if len(set(problems)) == 1:
            return problems[:1]
        first_rank = {problem: problems.index(problem) for problem in problems if problem}
        return [f"{self._name(rank)}: {problem}" for problem, rank in first_rank.items()]


def _listed(texts: Sequence[str]) -> str:
    """The JSON of all values: the most frequent one once, and the others by rank.

    Most values are equal on all ranks, and the answer goes to every rank.
    """
    usual, _ = Counter(texts).most_common(1)[0]
    others = (f'"{rank}": {text}' for rank, text in enumerate(texts) if text != usual)
    return f'{{"usual": {usual}, "others": {{{", ".join(others)}}}}}'


def _unlisted(listed: str, world_size: int) -> list[Any]:
    values = json.loads(listed)
    usual, others = values["usual"], values["others"]
    return [others.get(str(rank), usual) for rank in range(world_size)]
