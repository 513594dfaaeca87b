"""`mpiddp launch`: one command that starts a script on every host of a hostfile.

Reads the hosts, composes one command for the MPI that is installed, watches over it, and turns its
end into an exit code.

    mpiddp launch --hostfile hostfiles/two_nodes --dry-run train.py --epochs 3
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time

from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import make_request
from mpiddp.launch.starters.compose import compose
from mpiddp.launch.starters.environment import without_secrets
from mpiddp.protocol import ANNOUNCED


def main(argv: list[str]) -> int:
    """Launch what `argv` says. The exit code: 0 done, 1 the job failed, 2 its ranks refused their
    input, 75 stopped on request after a checkpoint, 130 interrupted.

    Raises:
        UserError: bad input, found before anything was started.
    """
    started_at = time.time()
    os.environ.pop(ANNOUNCED, None)  # a job around this one is another job
    options = parse_options(argv)
    if options.is_module and options.command[:2] == ["mpiddp", "train"]:
        from mpiddp.train.config import parse

        parse(options.command[2:])  # its ranks would only say what is wrong once they meet
    starter, request = make_request(options, started_at, os.environ, _say)
    if options.dry_run:
        print(compose(starter, request).explained())
        return 0
    from mpiddp.launch.restarts import run  # a dry run has no use for sockets and secrets

    outcome = run(options, starter, request, started_at, _say)
    if outcome.sentence:
        _say(outcome.sentence)
    if outcome.resumes:
        words = [*without_secrets(argv), *outcome.announcement.resume_args]
        _say(f"to go on: {shlex.join(['mpiddp', 'launch', *words])}")
    return outcome.code


def _say(sentence: str) -> None:
    # Not by way of sys.stderr, which at exit would try once more, and end this process with code 120.
    with contextlib.suppress(OSError):  # a terminal that is gone must not take the job with it
        os.write(2, f"mpiddp: {sentence}\n".encode(errors="backslashreplace"))
