"""What every rank runs: a script, a module, or one of our own verbs that join a job by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from mpiddp.verbs import VERBS, Verb


@dataclass(frozen=True)
class Job:
    """A script, or with `is_module` the name of a module, and its arguments."""

    command: tuple[str, ...]
    is_module: bool = False

    @property
    def _rank_verb(self) -> Verb | None:
        if not self.is_module or self.command[0] != "mpiddp" or len(self.command) < 2:
            return None
        verb = VERBS.get(self.command[1])
        return verb if verb is not None and verb.is_rank else None

    def check_options(self) -> str | None:
        """The backend that the job asks for: "nccl", "gloo" or "auto"; None if nobody here can tell.

        Ranks would complain of their options only once they have joined; a verb of ours is asked before.

        Raises:
            UserError: an option that makes no sense.
            SystemExit: code 0, after --help.
        """
        verb = self._rank_verb
        if verb is None or verb.options is None:
            return None
        backend: str = import_module(verb.options).check_options(list(self.command[2:]))
        return backend

    def rank_command(self, python: Path) -> tuple[str, ...]:
        """The command of a rank: a rank verb as it is, anything else through `mpiddp run`."""
        if self._rank_verb is not None:
            return (str(python), "-m", *self.command)
        module = ("-m",) if self.is_module else ()
        return (str(python), "-m", "mpiddp", "run", *module, *self.command)
