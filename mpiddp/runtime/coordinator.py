"""All ranks of a job, joined by one store: they exchange values, refuse together and leave together.

mpirun kills every rank as soon as one exits with an error, be it in mid-save or before rank 0 has
printed its sentence. So what one rank cannot do is first everyone's knowledge, then rank 0 speaks,
then all go.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from mpiddp.errors import BAD_INPUT, UserError
from mpiddp.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

# What ranks may tell each other. A tuple arrives as a list.
JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"
Value = TypeVar("Value", bound=JSON)

AGREE_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 600.0  # a rank may still be at work; one that has failed ends the others anyway
RANK_0_LEFT = "rank 0 left"  # the key that says so, before its store goes


class Refused(SystemExit):
    """All ranks have left together, with code 2, after rank 0 said why."""

    def __init__(self) -> None:
        super().__init__(BAD_INPUT)


class Coordinator:
    """The ranks of `world`, and the key-value store that rank 0 (or torchrun's agent) serves."""

    def __init__(self, world: World, store: Store) -> None:
        self.world = world
        self.store = store
        # A connection of its own for a thread: one is locked while it waits.
        self.second_store: Store = store.clone()  # type: ignore[attr-defined]
        self.hostnames: tuple[str, ...] = ()  # [world_size]; empty until the ranks have joined
        self._is_first: bool | None = None
        self._round = 0
        self._published = ""  # the key of what rank 0 has published in the newest exchange

    def all_gather_json(self, value: Value, *, timeout_s: float) -> list[Value]:
        """Every rank's value, by rank: [world_size]. All ranks must call this.

        Rank 0 reads N keys and publishes one, so the load on the store grows linearly with the job.

        Raises:
            UserError: not every rank called within `timeout_s`; it names the missing ones.
        """
        text = json.dumps(value)
        if self.world.world_size == 1:
            return [json.loads(text)]
        prefix = self.unique_prefix("exchange")
        ranks = range(self.world.world_size)
        self.store.set(f"{prefix}/{self.world.rank}", text)
        if self.world.rank == 0:
            keys = [f"{prefix}/{rank}" for rank in ranks]
            absent = self._absent(keys, timeout_s)
            missing = [rank for rank in ranks if keys[rank] in absent]
            if missing:
                raise UserError(
                    f"only {len(ranks) - len(missing)} of {len(ranks)} ranks joined in "
                    f"{timeout_s:g} s. Missing: {', '.join(map(self._name, missing))}."
                )
            self.store.set(
                f"{prefix}/all", f"[{','.join(self.store.get(k).decode() for k in keys)}]"
            )
        # Rank 0 is the one to tell who is missing; the others give it time to say so.
        elif self._absent([f"{prefix}/all"], timeout_s + 5):
            raise UserError(f"{self._name(self.world.rank)} heard nothing from rank 0.")
        values: list[Value] = json.loads(self.store.get(f"{prefix}/all"))
        # Else a long run fills the store. What all have read now is what was published before.
        self.store.delete_key(f"{prefix}/{self.world.rank}")
        if self.world.rank == 0:
            self.store.delete_key(self._published)
            self._published = f"{prefix}/all"
        return values

    def broadcast_json(self, value: Value) -> Value:
        """Rank 0's value, on every rank. All ranks must call this."""
        return self.all_gather_json(value, timeout_s=AGREE_TIMEOUT_S)[0]

    def unique_prefix(self, name: str) -> str:
        """A prefix for keys, never used before and the same on every rank: all must call this."""
        self._round += 1
        return f"{name}/{self._round}"

    def require_equal(self, what: str, value: str, *, hint: str) -> None:
        """Raise a UserError on all ranks unless all have the same value. All ranks must call this."""
        values = self.all_gather_json(value, timeout_s=AGREE_TIMEOUT_S)
        if len(set(values)) > 1:
            first = {value: self._name(values.index(value)) for value in values}
            shown = ", ".join(f"{value} ({name})" for value, name in first.items())
            raise UserError(f"{what} differs: {shown}. {hint}")

    @contextlib.contextmanager
    def all_or_none(self, *, timeout_s: float = 600.0) -> Iterator[None]:
        """A body that every rank runs, and that succeeds on all ranks or on none.

        A `UserError` of any rank is printed once, by rank 0, and ends every rank with exit code 2.
        """
        problem = ""
        try:
            yield
        except UserError as error:
            problem = str(error)
        problems = self.all_gather_json(problem, timeout_s=timeout_s)
        if not any(problems):
            return
        spoken = self.unique_prefix("spoken")
        if self.world.rank == 0:
            for sentence in self._sentences(problems):
                # Not by the log: a script's logging.config may have switched that off.
                print(sentence, file=sys.stderr, flush=True)
            self.store.set(spoken, "")
        else:  # the first to end makes mpirun end rank 0 as well, be it in mid-sentence
            self._absent([spoken], AGREE_TIMEOUT_S)
        self.leave()
        raise Refused

    def claim_first_failure(self) -> bool:
        """Whether this rank is the first of the job to fail; no, where the store is gone.

        To be asked as soon as an error is seen: its unwinding breaks connections, which the other
        ranks will notice.
        """
        if self._is_first is None:
            try:
                self._is_first = bool(self.store.add("failures", 1) == 1)
            except RuntimeError:  # rank 0 has ended, and it was first
                self._is_first = self.world.rank == 0
        return self._is_first

    def arrive(self, place: str) -> None:
        """Say that this rank is at `place`, where each is once at most."""
        self.store.set(f"{place}/{self.world.rank}", "")

    def wait_for_all(self, place: str, *, timeout_s: float) -> None:
        """Wait until every rank has arrived at `place`, or time is up."""
        ranks = range(self.world.world_size)
        self._absent([f"{place}/{rank}" for rank in ranks], timeout_s)

    def leave(self) -> None:
        """Say goodbye; rank 0, whose process is the store, stays until all have or time is up.

        All ranks must call this, when there is nothing left that needs the store.
        """
        prefix = self.unique_prefix("left")
        with contextlib.suppress(RuntimeError):  # rank 0 may have gone, its store with it
            if self.world.rank > 0:
                self.store.set(f"{prefix}/{self.world.rank}", "")
            else:
                others = range(1, self.world.world_size)
                if self._absent([f"{prefix}/{rank}" for rank in others], LEAVE_TIMEOUT_S):
                    self.store.set(RANK_0_LEFT, "")
                    time.sleep(2.0)  # for all to read it

    def _absent(self, keys: list[str], timeout_s: float) -> list[str]:
        """Those of the keys that nobody has set, once all are or time is up.

        It looks again and again: the store's own wait() logs its timeouts on stderr.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = 0.001
        while keys and not self.store.check(keys):
            if time.monotonic() > deadline:
                return [key for key in keys if not self.store.check([key])]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        return []

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.hostnames[rank]}" if self.hostnames else f"rank {rank}"

    def _sentences(self, problems: list[str]) -> list[str]:
        """Each distinct problem once: bare if every rank has it, else with the first rank's name."""
        if len(set(problems)) == 1:
            return problems[:1]
        first_rank = {problem: problems.index(problem) for problem in problems if problem}
        return [f"{self._name(rank)}: {problem}" for problem, rank in first_rank.items()]
