"""The command of every rank: a script, a module, any command, or a verb of mpiddp that joins by itself."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from mpiddp.arguments import OPTION_CHECKS, RANK_VERBS, Requests


@dataclass(frozen=True)
class Job:
    """A script, the name of a module, or with `is_command` any program; and its arguments."""

    command: tuple[str, ...]
    is_module: bool = False
    is_command: bool = False

    @property
    def rank_verb(self) -> str | None:
        """The verb, if the job is one of mpiddp's own verbs that join a job by themselves."""
        is_ours = self.is_module and self.command[0] == "mpiddp"
        verb = self.command[1] if is_ours and len(self.command) > 1 else None
        return verb if verb in RANK_VERBS else None

    def check_options(self) -> Requests | None:
        """What the job's options request of the launcher; None for any job but mpiddp's own.

        The ranks themselves would report a wrong option only after they have joined.

        Raises:
            UserError: an invalid option.
            SystemExit: code 0, after --help.
        """
        module = OPTION_CHECKS.get(self.rank_verb or "")
        if module is None:
            return None
        requests: Requests = import_module(module).check_options(list(self.command[2:]))
        return requests

    def rank_command(self, python: Path) -> tuple[str, ...]:
        """The command of a rank: a rank verb unchanged, anything else through `mpiddp run`."""
        if self.rank_verb is not None:
            return (str(python), "-m", *self.command)
        kind = ("-m",) if self.is_module else ("--",) if self.is_command else ()
        return (str(python), "-m", "mpiddp", "run", *kind, *self.command)
