"""The command line: finds the verb, calls it, and turns its end into an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from mpiddp.arguments import RANK_VERBS, VERBS
from mpiddp.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    UserError,
    print_from_one_rank,
    silence_stdout,
)
from mpiddp.text import did_you_mean
from mpiddp.world import likely_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 2, and one sentence stands on stderr, for bad input."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if args[0].startswith(("--local-rank", "--local_rank")):
        # torch.distributed.launch puts it before all that the user wrote; the environment has it too.
        del args[0]
    verb, *rest = args or ["--help"]
    is_rank = verb in RANK_VERBS
    try:
        try:
            return _call(verb, rest)
        finally:
            if not is_rank and sys.stdout is not None:  # it may have been closed
                sys.stdout.flush()  # here, where it can be told that nobody reads any more
    except UserError as error:
        # One rank of a job prints it; a launcher's variables mean nothing to other verbs.
        rank, local_rank = likely_ranks(os.environ) if is_rank else (0, 0)
        print_from_one_rank(str(error), rank, local_rank)
        return BAD_INPUT
    except BrokenPipeError:
        if is_rank:
            raise
        silence_stdout()
        return FAILED
    except KeyboardInterrupt:
        if is_rank:  # a script ends as Python ends it
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _call(verb: str, args: list[str]) -> int:
    if verb in ("-h", "--help"):
        print(usage())
        return DONE
    if verb == "--version":
        from mpiddp import __version__

        print(f"mpiddp {__version__}")
        return DONE
    if verb not in VERBS:
        hint = did_you_mean(verb, VERBS)
        raise UserError(f'mpiddp: no verb "{verb}".{hint} Known: {", ".join(VERBS)}.')
    code: int = import_module(VERBS[verb][0]).main(args)
    return code


def usage() -> str:
    verbs = "\n".join(f"  {verb:<12} {purpose}" for verb, (_, purpose) in VERBS.items())
    return f"usage: mpiddp VERB [options]\n\n{verbs}\n\nmpiddp VERB --help tells more of each."
