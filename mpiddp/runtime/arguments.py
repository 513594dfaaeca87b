"""The argument parser of the commands that every rank of a job runs."""

from __future__ import annotations

import os
from typing import Any

from mpiddp.arguments import OneSentenceParser
from mpiddp.world import likely_ranks


class RankParser(OneSentenceParser):
    """A parser for every rank of a job: only rank 0 prints the help."""

    def print_help(self, file: Any = None) -> None:
        if likely_ranks(os.environ)[0] == 0:
            super().print_help(file)
