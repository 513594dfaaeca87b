"""Try random inputs on every parser of text from outside, for minutes.

    python -m benchmarks.parsers --minutes 5

tests/outside_text.py lists the parsers and their inputs. Whatever the text, a parser returns or raises its
documented error, within bounded time and memory. At the first input for which this is not true, the
script prints the shortest such input, and exits with code 1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from hypothesis import HealthCheck, given, seed, settings

from mpiddp.text import align_columns
from tests.outside_text import PARSERS, Parser

AT_ONCE = settings(
    max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parsers", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="run time (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="first seed of the inputs")
    options = parser.parse_args()
    share_s = options.minutes * 60 / len(PARSERS)
    rows = [("parser", "inputs")]
    for name, each in PARSERS.items():
        rows.append((name, f"{_try_for(each, share_s, options.seed):,}"))
    print(align_columns(rows, right=[1]))
    return 0


def _try_for(parser: Parser, seconds: float, first_seed: int) -> int:
    """Try new inputs for this time, and return their number. Raises what the parser does not document."""
    tried = 0

    def check(text: object) -> None:
        nonlocal tried
        tried += 1
        parser.check(text)

    deadline = time.monotonic() + seconds
    for number in itertools.count(first_seed):
        if time.monotonic() > deadline:
            break
        seed(number)(AT_ONCE(given(parser.inputs)(check)))()
    return tried


if __name__ == "__main__":
    sys.exit(main())
