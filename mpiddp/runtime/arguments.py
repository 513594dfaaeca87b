"""argparse for the verbs that every rank of a job calls."""

from __future__ import annotations

import os
from typing import Any

from mpiddp.arguments import OneSentenceParser
from mpiddp.world import likely_ranks


class RankParser(OneSentenceParser):
    """The same for a verb that every rank of a job calls: its help is printed once."""

    def print_help(self, file: Any = None) -> None:
        if likely_ranks(os.environ)[0] == 0:
            super().print_help(file)
