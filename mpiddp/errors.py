"""The one exception that people read: a sentence about their input, never a traceback.

Everything else that is raised is a bug or a failed job, and keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any, NoReturn


class UserError(Exception):
    """Bad input: one sentence with what was found, what was expected and what mends it.

    The command line prints it on stderr, once per job, and exits with code 2.
    """


class OneSentenceParser(argparse.ArgumentParser):
    """argparse whose complaints are a UserError, without a page of usage before it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}. See: {self.prog} --help")


class DefaultsShown(argparse.ArgumentDefaultsHelpFormatter):
    """Each option's default after its help, where it has one worth reading that the help has not told."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_told = "default" in (action.help or "")
        is_plain = action.default is None or isinstance(action.default, (bool, list))
        return action.help if is_told or is_plain else super()._get_help_string(action)


class RankParser(OneSentenceParser):
    """The same for a verb that every rank of a job calls: its help is printed once."""

    def print_help(self, file: Any = None) -> None:
        from mpiddp.world import likely_place  # which itself needs this module

        if likely_place(os.environ)[0] == 0:
            super().print_help(file)


def say_alone(sentence: str, rank: int, local_rank: int) -> None:
    """Print what every rank may have to say, where no word can pass between them; then it is to exit.

    Rank 0 speaks at once, and its end makes most launchers end the others. One rank of each host
    that is still there then speaks too: the trouble may be that host's alone.
    """
    if rank != 0:
        time.sleep(2.0)
    if rank == 0 or local_rank == 0:
        print(sentence, file=sys.stderr, flush=True)
