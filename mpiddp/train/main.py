"""`mpiddp train`: one rank of a training. `mpiddp train --help` lists its options."""

from __future__ import annotations

import sys

from mpiddp.train.config import parse


def main(argv: list[str]) -> int:
    """Train, and return the exit code. Raises UserError for wrong options, before torch is imported."""
    options = parse(argv)
    from mpiddp.train.run import run  # only now: it imports torch

    return run(options)


if __name__ == "__main__":  # of a copy of the trainer: docs/train.md
    sys.exit(main(sys.argv[1:]))
