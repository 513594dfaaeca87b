"""All ranks of a job, joined by one store: they exchange words, refuse together and leave together.

mpirun kills every rank as soon as one exits with an error, be it in mid-save or before rank 0 has
printed its sentence. So what one rank cannot do is first everyone's knowledge, then rank 0 speaks,
then all go.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from mpiddp.errors import UserError
from mpiddp.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

LEAVE_TIMEOUT_S = 30.0


class Crew:
    """The ranks of `world`, and the key-value store that rank 0 (or torchrun's agent) serves."""

    def __init__(self, world: World, store: Store) -> None:
        self.world = world
        self.store = store
        self.hostnames: tuple[str, ...] = ()  # [world_size]; empty until the ranks have met
        self._round = 0

    def exchange(self, text: str, *, timeout_s: float) -> list[str]:
        """Every rank's text, by rank: [world_size]. All ranks must call this.

        Rank 0 reads N keys and publishes one, so the load on the store grows linearly with the job.

        Raises:
            UserError: not every rank called within `timeout_s`; it names the missing ones.
        """
        if self.world.world_size == 1:
            return [text]
        self._round += 1
        prefix = f"exchange/{self._round}"
        everyone = range(self.world.world_size)
        self.store.set(f"{prefix}/{self.world.rank}", text)
        if self.world.rank == 0:
            keys = [f"{prefix}/{rank}" for rank in everyone]
            self._wait(keys, timeout_s)
            self.store.set(f"{prefix}/all", json.dumps([self.store.get(k).decode() for k in keys]))
        else:
            # Rank 0 is the one to tell who is missing; the others give it time to say so.
            self._wait([f"{prefix}/all"], timeout_s + 5)
        texts: list[str] = json.loads(self.store.get(f"{prefix}/all"))
        return texts

    def agreed(self, text: str) -> str:
        """Rank 0's text, on every rank. All ranks must call this."""
        return self.exchange(text, timeout_s=LEAVE_TIMEOUT_S)[0]

    @contextlib.contextmanager
    def together(self, *, timeout_s: float = 600.0) -> Iterator[None]:
        """A body that every rank runs, and that succeeds on all ranks or on none.

        A `UserError` of any rank is printed once, by rank 0, and ends every rank with exit code 2.
        """
        problem = ""
        try:
            yield
        except UserError as error:
            problem = str(error)
        problems = self.exchange(problem, timeout_s=timeout_s)
        if not any(problems):
            return
        spoken = f"spoken/{self._round}"
        if self.world.rank == 0:
            for sentence in self._sentences(problems):
                print(sentence, file=sys.stderr, flush=True)
            self.store.set(spoken, "")
        else:  # the first to end makes mpirun end rank 0 as well, be it in mid-sentence
            self._wait([spoken], LEAVE_TIMEOUT_S)
        self.leave()
        raise SystemExit(2)

    def is_first(self, event: str) -> bool:
        """Whether this rank is the first to come here with `event`; no, where the store is gone."""
        try:
            return bool(self.store.add(f"first/{event}", 1) == 1)
        except RuntimeError:  # rank 0 has ended, and it was first
            return False

    def leave(self) -> None:
        """Say goodbye; rank 0, whose process is the store, stays until all have or time is up."""
        if self.world.rank > 0:
            with contextlib.suppress(RuntimeError):  # nor need the store outlive its last reader
                self.store.set(f"left/{self.world.rank}", "")
        elif self.world.world_size > 1:
            with contextlib.suppress(RuntimeError):  # a peer that died will never say goodbye
                self.store.wait(self._farewells(), timedelta(seconds=LEAVE_TIMEOUT_S))

    def _farewells(self) -> list[str]:
        return [f"left/{rank}" for rank in range(1, self.world.world_size)]

    def _wait(self, keys: list[str], timeout_s: float) -> None:
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:
            missing = [i for i, key in enumerate(keys) if not self.store.check([key])]
            if self.world.rank != 0 or not missing:
                raise
            raise UserError(
                f"only {len(keys) - len(missing)} of {len(keys)} ranks joined in {timeout_s:g} s. "
                f"Missing: {', '.join(self._name(rank) for rank in missing)}."
            ) from None

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.hostnames[rank]}" if self.hostnames else f"rank {rank}"

    def _sentences(self, problems: list[str]) -> list[str]:
        """Each distinct problem once: bare if every rank has it, else with the first rank's name."""
        if len(set(problems)) == 1:
            return problems[:1]
        first_rank = {problem: problems.index(problem) for problem in problems if problem}
        return [f"{self._name(rank)}: {problem}" for problem, rank in first_rank.items()]
