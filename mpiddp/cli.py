"""The verbs of the command line: one table, each verb's module loaded only when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from mpiddp.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    UserError,
    print_from_one_rank,
    silence_stdout,
)
from mpiddp.world import likely_place

# verb: (module with main(argv) -> int, what it is for)
VERBS = {
    "launch": ("mpiddp.launch.main", "start a script on every slot of a hostfile with one mpirun"),
    "run": (
        "mpiddp.runtime.run_script",
        "run an env:// script as this rank, under mpirun, srun or torchrun",
    ),
    "train": ("mpiddp.train.main", "train a ResNet as this rank, or alone"),
    "hosts": ("mpiddp.hosts.main", "check, convert and compare hostfiles"),
    "checkpoints": ("mpiddp.checkpoints.main", "list, verify and prune checkpoints"),
    "bench": ("mpiddp.bench.main", "measure scaling, all-reduce, start-up, the step, the data"),
    "bench-rank": ("mpiddp.bench.ranks.main", "one rank of a benchmark, which bench starts"),
}

RANKS = ("run", "train", "bench-rank")  # the verbs that every rank of a job calls


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 2, and one sentence stands on stderr, for bad input."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if args[0].startswith(("--local-rank", "--local_rank")):
        # torch.distributed.launch puts it before all that the user wrote; the environment has it too.
        del args[0]
    verb, *rest = args or ["--help"]
    try:
        try:
            return _call(verb, rest)
        finally:
            if verb not in RANKS and sys.stdout is not None:  # it may have been closed
                sys.stdout.flush()  # here, where it can be told that nobody reads any more
    except UserError as error:
        # Of the ranks of a job one is to speak; a launcher's variables mean nothing to other verbs.
        place = likely_place(os.environ) if verb in RANKS else (0, 0)
        print_from_one_rank(str(error), *place)
        return BAD_INPUT
    except BrokenPipeError:
        if verb in RANKS:
            raise
        silence_stdout()
        return FAILED
    except KeyboardInterrupt:
        if verb in RANKS:  # a script ends as Python ends it
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
        raise UserError(f'mpiddp: no verb "{verb}". Known: {", ".join(VERBS)}.')
    code: int = import_module(VERBS[verb][0]).main(args)
    return code


def usage() -> str:
    verbs = "\n".join(f"  {verb:<12} {purpose}" for verb, (_, purpose) in VERBS.items())
    return f"usage: mpiddp VERB [options]\n\n{verbs}\n\nmpiddp VERB --help tells more of each."
